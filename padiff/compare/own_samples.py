"""What processes that share out a batch must not have in common: samples (masks of dropout: `own_masks`).

And what they should have in common though each of them sees its own samples: the statistics of a batch norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from padiff.compare.own_masks import bits, certain
from padiff.compare.rank_figures import error, values_of, wide_values_of
from padiff.records import ROOT, Layer, Record, Step

# A number with a fraction, as little as bfloat16 keeps of it.
_FRACTION = 8.0
# Elements of an input that have to agree before all of them are looked at.
_FIRST = 4096
# What a batch norm gives has the mean that its bias says, but for rounding of float32; of other samples' statistics it
# is off by the square root of one in so many elements: above it up to 10 ** 8 of them.
_MEAN = 1e-4
#: What a batch norm keeps of the samples that it saw, as either framework calls it.
STATISTICS = ("running_mean", "running_var", "_mean", "_variance")


def samples_of(step: Step) -> dict[str, Record]:
    """By site, what goes into the model."""
    return {record.site: record for record in step.records if record.layer == ROOT and record.stage == "input"}


def same_samples(steps: Sequence[Step], looked: int) -> list[list[int]]:
    """Processes that were given the same batch, as far as it tells: not only what is always the same.

    Args:
        steps: one step, of all processes.
        looked: how many steps were looked at before.
    """
    alike: dict[Hashable, list[Step]] = defaultdict(list)
    for step in steps:
        own = samples_of(step)
        if own:
            alike[tuple((site, _begins(record)) for site, record in own.items())].append(step)
    found: list[list[int]] = []
    for group in (group for group in alike.values() if len(group) > 1):
        evidence = sum(_evidence(record) for record in samples_of(group[0]).values())
        if evidence < certain(looked, len(steps)):
            continue
        together: list[list[Step]] = []
        for step in group:
            same = next((own for own in together if _same(samples_of(own[0]), samples_of(step))), None)
            if same is None:
                together.append([step])
            else:
                same.append(step)
        found += [[step.rank for step in own] for own in together if len(own) > 1]
    return sorted(found)


def _same(one: Mapping[str, Record], other: Mapping[str, Record]) -> bool:
    return all(error(record, other[site]) == 0 for site, record in one.items())


def _begins(record: Record) -> Hashable:
    """What two records have in common that are equal, and few that are not; made of few elements."""
    sketch = record.sketch
    if sketch is not None:  # what was added up on another machine may differ in its last digits; these don't
        return sketch.size, sketch.minimum, sketch.maximum, sketch.zeros
    value = values_of(record.source)
    return None if value is None else (value.shape, value.reshape(-1)[:_FIRST].tobytes())


def _evidence(record: Record) -> float:
    """How much the values of a tensor tell, in bits, if it was drawn: what is constant tells nothing."""
    sketch = record.sketch
    if sketch is not None and not sketch.minimum < sketch.maximum:
        return 0.0
    values = sketch.projection if sketch is not None else values_of(record.source)
    if values is None or not values.size:
        return 0.0
    if sketch is not None and sketch.minimum == 0 and sketch.maximum == 1 and sketch.mean == sketch.mean_square:
        # A mask: signs make many values of its sums, which tell no more than where its zeros are.
        return bits(sketch.looked_at, 0.0, sketch.zeros)
    values = np.asarray(values.reshape(-1)[:_FIRST], np.float64)
    different, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    if (different != np.round(different)).any():
        return _FRACTION * int(np.count_nonzero(different))
    share = counts / max(1, counts.sum())
    return float(-counts.sum() * (share * np.log2(share)).sum())


def is_batch_norm(layer: Layer) -> bool:
    """Whether a layer normalises by a batch's statistics, each process by its own."""
    return "BatchNorm" in layer.type and "Sync" not in layer.type


def own_statistics(layers: Sequence[Layer], one: Step, other: Step) -> Iterator[str]:
    """Batch norms whose outputs have, in each of two processes, the statistics of that process's own samples."""
    norms = [layer.path for layer in layers if is_batch_norm(layer)]
    if norms:
        kept = [_by_site(step) for step in (one, other)]
        for path in norms:
            if all(_normalised(path, own) for own in kept) and _differ(f"{path}/forward/output.0", *kept):
                yield path


def _by_site(step: Step) -> dict[str, Record]:
    return {record.site: record for record in step.records if record.stage in ("weight", "forward")}


def _value(record: Record | None) -> np.ndarray | None:
    return None if record is None else wide_values_of(record.source)


def _differ(site: str, one: Mapping[str, Record], other: Mapping[str, Record]) -> bool:
    return error(one[site], other[site]) > 0


def _normalised(path: str, kept: Mapping[str, Record]) -> bool:
    """Whether what a batch norm gave has its bias as the mean of each channel."""
    out = _value(kept.get(f"{path}/forward/output.0"))
    if out is None or out.ndim < 2 or out.size <= 2 * out.shape[1]:
        return False
    bias, weight = (_value(kept.get(f"{path}/weight/{slot}")) for slot in ("bias", "weight"))
    bias = np.zeros(out.shape[1]) if bias is None else bias
    weight = np.ones(out.shape[1]) if weight is None else weight
    if not bias.shape == weight.shape == (out.shape[1],):
        return False
    mean = out.mean(tuple(axis for axis in range(out.ndim) if axis != 1))
    return bool((abs(mean - bias) <= _MEAN * abs(weight)).all())
