"""Random draws and samples of the processes of one training, which each process should draw for itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from padiff.errors import PadiffError
from padiff.records import ROOT, Layer, Record, Step, TensorSource
from padiff.sketches.sketch import Sketch

# Sums in sketches from two machines may differ in their last digits.
_SKETCHES_DIFFER = 1e-6
# Largest relative error of gradients that are a multiple of another rank's, and largest relative spread of the factors:
# float32 rounds by some units in the last place.
_ONE_FACTOR = 1e-5


def values_of(source: TensorSource) -> np.ndarray | None:
    """Return the values; `None` if only a sketch exists, or the values can't be read."""
    if source.sketched:
        return None
    try:
        return np.asarray(source.read())
    except (PadiffError, TypeError, ValueError):
        return None


def wide_values_of(source: TensorSource) -> np.ndarray | None:
    """Return the values in float64; `None` if no values exist, or they are not numbers."""
    value = values_of(source)
    try:
        return None if value is None else value.astype(np.float64)
    except (TypeError, ValueError):
        return None


def error(a: Record, b: Record) -> float:
    """Return the relative L2 difference; 0 if the values are equal to the bit (sketches: up to their last digits)."""
    if a.source.identity == b.source.identity:
        return 0.0  # both records share one file
    if a.sketch is not None and b.sketch is not None:
        first, second = a.sketch.projection.astype(np.float64), b.sketch.projection.astype(np.float64)
        distance = _relative(first, second) if first.shape == second.shape else np.inf
        return distance if distance > _SKETCHES_DIFFER else 0.0
    if a.sketch is not None or b.sketch is not None:
        return 0.0  # not comparable
    x, y = a.value, b.value
    if x.shape != y.shape:
        return np.inf
    if np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
        return 0.0
    return _relative(x.astype(np.float64).reshape(-1), y.astype(np.float64).reshape(-1)) or np.finfo(np.float64).tiny


def one_factor(pairs: Iterable[tuple[Record, Record]]) -> float | None:
    """Return the factor between the first and the second records; `None` unless two or more pairs share one factor."""
    factors = []
    for a, b in pairs:
        x, y = (
            r.sketch.projection.astype(np.float64) if r.sketch is not None else r.value.astype(np.float64).reshape(-1)
            for r in (a, b)
        )
        square = float(x @ x) if x.shape == y.shape else 0.0
        if not square or not np.isfinite(square):
            return None
        factor = float(x @ y) / square
        if _relative(factor * x, y) > _ONE_FACTOR:
            return None
        factors.append(factor)
    if len(factors) < 2 or max(factors) - min(factors) > _ONE_FACTOR * abs(factors[0]):
        return None
    return factors[0]


def classes(records: Sequence[tuple[int, Record]]) -> list[list[tuple[int, Record]]]:
    """Group processes by equal records of one tensor.

    The first class is the reference: the largest; among equally large classes the one with the lowest rank.
    """
    groups: list[list[tuple[int, Record]]] = []
    for entry in records:
        same = next((group for group in groups if error(group[0][1], entry[1]) == 0), None)
        if same is None:
            groups.append([entry])
        else:
            same.append(entry)
    return sorted(groups, key=lambda group: (-len(group), group[0][0]))


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    scale, difference = max(float(np.linalg.norm(x)), float(np.linalg.norm(y))), float(np.linalg.norm(x - y))
    if not np.isfinite(difference):
        return np.inf  # NaN or infinity on one side, or at other places
    return difference / scale if scale else 0.0


# Evidence, in bits, from which on equal masks are reported. Masks that are equal by chance are reported in about one of
# 2 ** 14 runs.
_BITS = 14.0
# Evidence, in bits, that the first elements of a large tensor must give before all elements are read (one of 256 clean
# pairs does so); and the number of these elements. 4,096 elements of equal masks behind a ReLU give 24 bits.
_HINT, _FIRST = 8.0, 4096
#: Results in place of evidence: masks differ; and tensors are equal, as on partners in split layers.
_APART, _EQUAL = -1.0, -2.0
# Standard deviations within which a share of zeros counts as the dropout's rate, without zeros of the input.
_SPREAD = 5.0


def certain(looked: int, ranks: int, places: int = 1) -> float:
    """Return the evidence, in bits, that one of many steps needs to be reported.

    With this limit about one clean run in `2 ** _BITS` is reported. The chances of later steps add up to less than the
    chance of the first: 1/4 + 1/9 + ... < 1.

    Args:
        looked: steps checked before.
        ranks: number of processes, any two of which may agree.
        places: number of places where they may agree.
    """
    return _BITS + math.log2(max(1, ranks * (ranks - 1) // 2) * max(1, places)) + 2 * math.log2(looked + 1)


class SameMasks(NamedTuple):
    """Processes that drop the same elements.

    Attributes:
        ranks: the processes.
        places: layers, or functions that layers call.
        since: the first step that shows the equal masks.
    """

    ranks: tuple[int, ...]
    places: tuple[str, ...]
    since: int


@dataclass(frozen=True)
class _Dropout:
    """Call of dropout.

    Attributes:
        place: the dropout layer, or the layer and function of a functional call.
        rate: share of dropped elements, if known.
        out: output of the call.
        given: input of the call, if known; otherwise it is searched among the outputs before the call.
        site: site of the output's record; empty for a functional call.
    """

    place: str
    rate: object
    out: TensorSource
    given: TensorSource | None = None
    site: str = ""


class MaskCheck:
    """Check of a run's dropout masks, fed with the steps in order."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._rates = {layer.path: layer.settings.get("p") for layer in layers if "Dropout" in layer.type}
        # Other layers drop channels, or fill in values other than zero: their share of zeros is no evidence.
        self._elementwise = {
            layer.path for layer in layers if layer.type == "Dropout" and layer.settings.get("axis") is None
        }
        self._looked = 0
        #: For two processes whose sketches agreed in the latest steps: evidence in bits, first step, places.
        self._agree: dict[tuple[int, int], tuple[float, int, tuple[str, ...]]] = {}

    def check(self, steps: Sequence[Step]) -> list[SameMasks]:
        """Return the groups of processes with identical masks in one step."""
        calls = {step.rank: {(call.place, k): call for k, call in _numbered(self._calls(step))} for step in steps}
        shared = [
            key for key in next(iter(calls.values()), {}) if sum(key in rank_calls for rank_calls in calls.values()) > 1
        ]
        findings = self._by_zeros(steps, calls, shared) + self._by_shares(steps[0].number, calls, shared)
        self._looked += 1
        return findings

    def _calls(self, step: Step) -> Iterator[_Dropout]:
        for record in step.records:
            if record.layer in self._rates and record.stage == "forward" and record.slot == "output.0":
                yield _Dropout(record.layer, self._rates[record.layer], record.source, site=record.site)
        for call in step.trace.calls if step.trace.functions else ():
            if call.function != "dropout" or call.layer in self._rates or not (call.inputs and call.outputs):
                continue
            source, out = (step.trace.tensors[side[0].tensor].source for side in (call.inputs, call.outputs))
            if source is not None and out is not None and not source.sketched:
                rate = call.arguments.get("p", call.arguments.get("1"))
                yield _Dropout(f"{call.layer}/dropout()", rate, out, source)

    def _by_zeros(
        self,
        steps: Sequence[Step],
        calls: Mapping[int, Mapping[tuple[str, int], _Dropout]],
        shared: Sequence[tuple[str, int]],
    ) -> list[SameMasks]:
        """Return processes that drop the same elements, as full tensors show.

        All calls of the first step are read; in later steps, only the first calls with enough evidence, because
        processes with the same seed agree in all calls.
        """
        agree: dict[tuple[int, int], dict[tuple[str, int], float]] = defaultdict(dict)
        apart: set[tuple[int, int]] = set()
        enough = certain(self._looked, len(steps), len(shared))
        by_rank = {step.rank: step for step in steps}
        for key in shared:
            values = _Seen(by_rank, calls, key)
            first = {rank: _first_zeros(rank_calls[key]) for rank, rank_calls in calls.items() if key in rank_calls}
            telling = {rank: zeros for rank, zeros in first.items() if zeros is not None and 0 < zeros.mean() < 1}
            for pair, hinted in _hinted(telling):
                evidence = (
                    _bits_of(*map(values.values_of, pair))
                    if hinted and not (self._looked and pair in apart)
                    else _APART
                )
                if evidence == _APART or (evidence == _EQUAL and self._looked):
                    apart.add(pair)
                elif evidence > 0:
                    agree[pair][key] = evidence
            open_ = (pair not in apart and sum(agree[pair].values()) < enough for pair in combinations(telling, 2))
            if self._looked and len(telling) == len(steps) and not any(open_):
                break
        alike: dict[tuple[int, int], list[str]] = {}
        for pair, found_at in agree.items():
            # If all places agree, one equal seed explains this, and the evidence is added up; otherwise each place
            # counts alone.
            together = pair not in apart and sum(found_at.values()) >= certain(self._looked, len(steps))
            alike[pair] = [place for (place, _), agreement in found_at.items() if together or agreement >= enough]
            if self._looked and alike[pair]:  # add the places that were not checked yet
                unchecked = [key for key in shared if key not in found_at and all(key in calls[rank] for rank in pair)]
                more = [key[0] for key in unchecked if _bits_of(*map(_Seen(by_rank, calls, key).values_of, pair)) > 0]
                alike[pair] = [key[0] for key in shared if key[0] in {*alike[pair], *more}]
        return [SameMasks(ranks, places, steps[0].number) for ranks, places in _together(alike)]

    def _by_shares(
        self,
        number: int,
        calls: Mapping[int, Mapping[tuple[str, int], _Dropout]],
        shared: Sequence[tuple[str, int]],
    ) -> list[SameMasks]:
        """Return processes that drop equally many elements in all layers, step after step, as sketches show."""
        sketches_by_place: dict[tuple[str, int], dict[int, Sketch]] = {}
        for key in shared:
            by_rank = {rank: _elementwise(entry[key]) for rank, entry in calls.items() if key in entry}
            sketches = {rank: sketch for rank, sketch in by_rank.items() if sketch is not None}
            if key[0] in self._elementwise and len(sketches) == len(calls):
                sketches_by_place[key] = sketches
        if not sketches_by_place:
            return []
        groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
        for rank in calls:
            groups[tuple(by_rank[rank].zeros for by_rank in sketches_by_place.values())].append(rank)
        agree = {}
        places = tuple(dict.fromkeys(place for place, _ in sketches_by_place))
        for ranks in groups.values():
            bits = sum(_chance(by_rank[ranks[0]]) for by_rank in sketches_by_place.values()) if len(ranks) > 1 else 0.0
            for pair in combinations(ranks, 2):
                # Equal sketches are no evidence: partners in split layers hold equal tensors.
                entry, partner = pair
                if any(
                    not np.array_equal(by_rank[entry].projection, by_rank[partner].projection)
                    for by_rank in sketches_by_place.values()
                ):
                    before, since, _ = self._agree.get(pair, (0.0, number, ()))
                    agree[pair] = before + bits, since, places
        self._agree = agree
        sure = {pair: entry for pair, entry in agree.items() if entry[0] >= certain(self._looked, len(calls))}
        findings = []
        for since in sorted({entry[1] for entry in sure.values()}):
            own_places = {pair: list(entry[2]) for pair, entry in sure.items() if entry[1] == since}
            findings += [SameMasks(ranks, names, since) for ranks, names in _together(own_places)]
        return findings


def _numbered(calls: Iterator[_Dropout]) -> Iterator[tuple[int, _Dropout]]:
    counts: dict[str, int] = defaultdict(int)
    for call in calls:
        yield counts[call.place], call
        counts[call.place] += 1


def _together(alike: Mapping[tuple[int, int], Sequence[str]]) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Group pairs of processes that agree at the same places."""
    by_places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for pair, places in alike.items():
        if places:
            by_places[tuple(dict.fromkeys(places))].append(pair)
    for places, pairs in by_places.items():
        pending = sorted(pairs)
        while pending:
            ranks = set(pending[0])
            ranks |= {rank for pair in pending if ranks & {*pair} for rank in pair}
            pending = [pair for pair in pending if not ranks & {*pair}]
            yield tuple(sorted(ranks)), places


def _first_zeros(call: _Dropout) -> np.ndarray | None:
    """Return a mask of the zeros among the first elements of a dropout's output; `None` without values."""
    value = values_of(call.out)
    if value is None or not value.size:
        return None
    zeros: np.ndarray = value.reshape(-1)[:_FIRST] == 0
    return zeros


def _hinted(zeros: Mapping[int, np.ndarray]) -> Iterator[tuple[tuple[int, int], bool]]:
    """Yield pairs of processes, and True if their first zeros coincide more often than by chance."""
    sizes = {rank: value.size for rank, value in zeros.items()}
    for size in sorted(set(sizes.values())):
        ranks = [rank for rank in zeros if sizes[rank] == size]
        if size < _FIRST:  # the whole tensor is small: skip the preselection
            yield from ((pair, True) for pair in combinations(ranks, 2))
            continue
        matrix = np.array([zeros[rank] for rank in ranks], np.float32)
        both, each = matrix @ matrix.T, matrix.sum(1)
        for i, j in combinations(range(len(ranks)), 2):
            apart, share = float(each[i] + each[j] - 2 * both[i, j]) / size, float(each[i] + each[j]) / (2 * size)
            yield (ranks[i], ranks[j]), bits(size, apart, share) >= _HINT


class _Values(NamedTuple):
    """Output, input (if known) and rate of one process's dropout call."""

    out: np.ndarray | None
    given: np.ndarray | None
    rate: object


class _Seen:
    """Values of one dropout call in each process, read once."""

    def __init__(
        self, steps: Mapping[int, Step], calls: Mapping[int, Mapping[tuple[str, int], _Dropout]], key: tuple[str, int]
    ) -> None:
        self._steps, self._calls, self._key = steps, calls, key
        self._known: dict[int, _Values] = {}

    def values_of(self, rank: int) -> _Values:
        if rank not in self._known:
            call = self._calls[rank][self._key]
            out = wide_values_of(call.out)
            input_values = None if out is None else _went_in(self._steps[rank], call, out)
            self._known[rank] = _Values(out, input_values, call.rate)
        return self._known[rank]


def _bits_of(first: _Values, second: _Values) -> float:
    """Return the evidence, in bits, that two processes drop the same elements of different values.

    Returns `_APART` if the masks differ, `_EQUAL` if the outputs themselves are equal, 0 if unknown.
    """
    a, b = first.out, second.out
    if a is None or b is None or a.shape != b.shape or not a.size:
        return 0.0
    if np.array_equal(a, b):
        return _EQUAL
    if first.given is not None and second.given is not None:
        informative = _may_show(first.given, a) & _may_show(second.given, b)
        if not np.array_equal(a[informative] == 0, b[informative] == 0):
            return _APART
        return bits(int(informative.sum()), 0.0, float(np.mean(a[informative] == 0)) if informative.any() else 0.0)
    # The unrecorded input may contain zeros: the share of zeros must be about the dropout's rate.
    if not all(_is_rate(float(np.mean(x == 0)), first.rate, x.size) for x in (a, b)):
        return 0.0
    assert isinstance(first.rate, int | float)
    return bits(a.size, float(np.mean((a == 0) != (b == 0))), first.rate) or _APART


def _is_rate(share: float, rate: object, count: int) -> bool:
    """Return True if a share of zeros is consistent with dropout at the rate."""
    if not isinstance(rate, int | float) or not 0 < rate < 1:
        return False
    return abs(share - rate) <= _SPREAD * math.sqrt(rate * (1 - rate) / count)


def _elementwise(call: _Dropout) -> Sketch | None:
    """Return the sketch of a dropout's output, if its zeros are the dropped elements."""
    sketch = call.out.sketch
    if sketch is None or not sketch.looked_at or sketch.nonfinite:
        return None
    return sketch if _is_rate(sketch.zeros, call.rate, sketch.looked_at) else None


def _chance(sketch: Sketch) -> float:
    """Return the improbability, in bits, of two masks with equally many zeros: two binomial draws, by their
    densities.
    """
    spread = math.pi * sketch.looked_at * sketch.zeros * (1 - sketch.zeros)
    return max(0.0, math.log2(2 * math.sqrt(spread))) if spread > 0 else 0.0


def bits(count: int, apart: float, share: float) -> float:
    """Return the improbability, in bits, that two independent masks differ in so few elements (Chernoff's bound).

    Args:
        apart: share of the elements in which the masks differ.
        share: share of dropped elements.
    """
    expected = 2 * share * (1 - share)
    if apart >= expected:
        return 0.0
    bound = (1 - apart) * math.log2((1 - apart) / (1 - expected))
    return count * (bound + (apart * math.log2(apart / expected) if apart else 0.0))


def _may_show(inputs: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return a mask of the elements where a zero output means a drop: the input is not zero, also behind a ReLU."""
    rectified = bool((inputs[out != 0] > 0).all())
    shown: np.ndarray = inputs > 0 if rectified else inputs != 0
    return shown


def _went_in(step: Step, call: _Dropout, out: np.ndarray) -> np.ndarray | None:
    """Return the input of a dropout call, as recorded, or found among the earlier outputs; `None` if unknown.

    The dropout's output is a multiple of its input at all nonzero elements.
    """
    if call.given is not None:
        input_values = wide_values_of(call.given)
        return input_values if input_values is not None and input_values.shape == out.shape else None
    nonzero = out != 0
    if not nonzero.any():
        return None
    before: list[Record] = []
    for record in step.records:
        if record.site == call.site:
            break
        if record.stage == "forward" and record.shape == out.shape:
            before.append(record)
    for record in reversed(before):
        value = wide_values_of(record.source)
        if value is not None and (value[nonzero] != 0).all():
            ratio = out[nonzero] / value[nonzero]
            if np.allclose(ratio, ratio[0], rtol=1e-4, atol=0):
                return value
    return None


# Bits of information in one fractional number: the precision of bfloat16.
_FRACTION = 8.0
# Number of elements compared before all elements of an input are compared.
_FIRST_ROWS = 4096
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
    return None if value is None else (value.shape, value.reshape(-1)[:_FIRST_ROWS].tobytes())


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
    values = np.asarray(values.reshape(-1)[:_FIRST_ROWS], np.float64)
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
