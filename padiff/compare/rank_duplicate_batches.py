"""Detect processes that read the same samples of a batch that should be shared out (dropout masks:
`rank_dropout_masks`).

Also detect batch norms that use each process's own statistics, although each process has different samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from padiff.compare.rank_dropout_masks import bits, certain
from padiff.compare.rank_figures import error, values_of, wide_values_of
from padiff.records import ROOT, Layer, Record, Step

# Bits of information in one fractional number: the precision of bfloat16.
_FRACTION = 8.0
# Number of elements compared before all elements of an input are compared.
_FIRST = 4096
# Largest difference, by rounding in float32, between the mean of a batch norm's output and its bias. With statistics of
# other samples the difference is 1 over the square root of the number of elements: larger for up to 10 ** 8 elements.
_MEAN = 1e-4
#: Names of a batch norm's running statistics in either framework.
STATISTICS = ("running_mean", "running_var", "_mean", "_variance")


def samples_of(step: Step) -> dict[str, Record]:
    """Return the inputs of the model, by site."""
    return {record.site: record for record in step.records if record.layer == ROOT and record.stage == "input"}


def same_samples(steps: Sequence[Step], looked: int) -> list[list[int]]:
    """Return groups of processes that received the same batch, if the batch has enough information to exclude chance.

    Args:
        steps: one step, of all processes.
        looked: number of steps checked before.
    """
    alike: dict[Hashable, list[Step]] = defaultdict(list)
    for step in steps:
        members = samples_of(step)
        if members:
            alike[tuple((site, _begins(record)) for site, record in members.items())].append(step)
    groups: list[list[int]] = []
    for group in (group for group in alike.values() if len(group) > 1):
        evidence = sum(_evidence(record) for record in samples_of(group[0]).values())
        if evidence < certain(looked, len(steps)):
            continue
        together: list[list[Step]] = []
        for step in group:
            same = next((members for members in together if _same(samples_of(members[0]), samples_of(step))), None)
            if same is None:
                together.append([step])
            else:
                same.append(step)
        groups += [[step.rank for step in members] for members in together if len(members) > 1]
    return sorted(groups)


def _same(first: Mapping[str, Record], second: Mapping[str, Record]) -> bool:
    return all(error(record, second[site]) == 0 for site, record in first.items())


def _begins(record: Record) -> Hashable:
    """Return a key of few elements that equal records share and different records rarely do."""
    sketch = record.sketch
    if sketch is not None:  # sums from another machine may differ in the last digits; these fields don't
        return sketch.size, sketch.minimum, sketch.maximum, sketch.zeros
    value = values_of(record.source)
    return None if value is None else (value.shape, value.reshape(-1)[:_FIRST].tobytes())


def _evidence(record: Record) -> float:
    """Return the information in a tensor's values, in bits, if they were drawn at random; 0 for constants."""
    sketch = record.sketch
    if sketch is not None and not sketch.minimum < sketch.maximum:
        return 0.0
    values = sketch.projection if sketch is not None else values_of(record.source)
    if values is None or not values.size:
        return 0.0
    if sketch is not None and sketch.minimum == 0 and sketch.maximum == 1 and sketch.mean == sketch.mean_square:
        # A mask: its projection has many values because of the random signs, but only the zeros carry information.
        return bits(sketch.looked_at, 0.0, sketch.zeros)
    values = np.asarray(values.reshape(-1)[:_FIRST], np.float64)
    different, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    if (different != np.round(different)).any():
        return _FRACTION * int(np.count_nonzero(different))
    share = counts / max(1, counts.sum())
    return float(-counts.sum() * (share * np.log2(share)).sum())


def is_batch_norm(layer: Layer) -> bool:
    """Return True if a layer normalises by the statistics of each process's own batch."""
    return "BatchNorm" in layer.type and "Sync" not in layer.type


def own_statistics(layers: Sequence[Layer], one: Step, other: Step) -> Iterator[str]:
    """Yield batch norms whose outputs have, in both processes, the statistics of that process's own samples."""
    norms = [layer.path for layer in layers if is_batch_norm(layer)]
    if norms:
        records = [_by_site(step) for step in (one, other)]
        for path in norms:
            if all(_normalised(path, side_records) for side_records in records) and _differ(
                f"{path}/forward/output.0", *records
            ):
                yield path


def _by_site(step: Step) -> dict[str, Record]:
    return {record.site: record for record in step.records if record.stage in ("weight", "forward")}


def _value(record: Record | None) -> np.ndarray | None:
    return None if record is None else wide_values_of(record.source)


def _differ(site: str, first: Mapping[str, Record], second: Mapping[str, Record]) -> bool:
    return error(first[site], second[site]) > 0


def _normalised(path: str, records: Mapping[str, Record]) -> bool:
    """Return True if the mean of each channel of a batch norm's output equals its bias."""
    out = _value(records.get(f"{path}/forward/output.0"))
    if out is None or out.ndim < 2 or out.size <= 2 * out.shape[1]:
        return False
    bias, weight = (_value(records.get(f"{path}/weight/{slot}")) for slot in ("bias", "weight"))
    bias = np.zeros(out.shape[1]) if bias is None else bias
    weight = np.ones(out.shape[1]) if weight is None else weight
    if not bias.shape == weight.shape == (out.shape[1],):
        return False
    mean = out.mean(tuple(axis for axis in range(out.ndim) if axis != 1))
    return bool((abs(mean - bias) <= _MEAN * abs(weight)).all())
