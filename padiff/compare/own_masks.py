"""What dropout keeps, held against what it keeps in other processes: each of them should draw its own.

Full tensors tell by their zeros. Of a sketch the share of zeros is exact: two processes that drop other elements have
the same number of zeros by chance only, and never in all layers for some steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from padiff.compare.rank_figures import values_of, wide_values_of
from padiff.records import Layer, Record, Step, TensorSource
from padiff.sketches.sketch import Sketch

# What is equal by chance is reported in one of 2 ** 14 runs, at most two of them: 10 ** -4.
_BITS = 14.0
# What the first elements of a large tensor have to tell before all of two masks are looked at: in one of 256 clean
# pairs they do. Of 4,096, behind a ReLU, equal masks tell 24 bits.
_HINT, _FIRST = 8.0, 4096
#: Of masks that differ; of tensors that are equal, which partners in split layers hold alike.
_APART, _EQUAL = -1.0, -2.0
# A share of zeros that is the dropout's own rate, and not what went in: within so many standard deviations.
_SPREAD = 5.0


def certain(looked: int, ranks: int, places: int = 1) -> float:
    """How many bits have to speak against chance in one of many steps, so that a whole run is reported in one of
    `2 ** _BITS`, about. Chances of later steps add up to less than that of the first: 1/4 + 1/9 + ... < 1.

    Args:
        looked: how many steps were looked at before.
        ranks: any two of so many may agree.
        places: at any of so many.
    """
    return _BITS + math.log2(max(1, ranks * (ranks - 1) // 2) * max(1, places)) + 2 * math.log2(looked + 1)


class SameMasks(NamedTuple):
    """Processes that drop the same elements.

    Attributes:
        ranks: of them.
        places: layers, or functions that layers call.
        since: the first step that shows it.
    """

    ranks: tuple[int, ...]
    places: tuple[str, ...]
    since: int


@dataclass(frozen=True)
class _Dropout:
    """A call of dropout.

    Attributes:
        place: its layer, or the function that a layer calls.
        rate: of what it drops, if that is known.
        out: what it gave.
        given: what went in, where that is known; else it is looked for among the outputs before it.
        site: of its record; empty for a function.
    """

    place: str
    rate: object
    out: TensorSource
    given: TensorSource | None = None
    site: str = ""


class MaskCheck:
    """Looks at the steps of a run in their order."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._rates = {layer.path: layer.settings.get("p") for layer in layers if "Dropout" in layer.type}
        # Whole channels, or other values than zero: the share of zeros says nothing.
        self._elementwise = {
            layer.path for layer in layers if layer.type == "Dropout" and layer.settings.get("axis") is None
        }
        self._looked = 0
        #: Of two processes whose sketches have agreed in the latest steps: how much that says, in bits, since which
        #: step, and where.
        self._agree: dict[tuple[int, int], tuple[float, int, tuple[str, ...]]] = {}

    def look(self, steps: Sequence[Step]) -> list[SameMasks]:
        """What one step shows, of all its processes."""
        calls = {step.rank: {(one.place, k): one for k, one in _numbered(self._calls(step))} for step in steps}
        shared = [key for key in next(iter(calls.values()), {}) if sum(key in own for own in calls.values()) > 1]
        found = self._by_zeros(steps, calls, shared) + self._by_shares(steps[0].number, calls, shared)
        self._looked += 1
        return found

    def _calls(self, step: Step) -> Iterator[_Dropout]:
        for record in step.records:
            if record.layer in self._rates and record.stage == "forward" and record.slot == "output.0":
                yield _Dropout(record.layer, self._rates[record.layer], record.source, site=record.site)
        for call in step.trace.calls if step.trace.functions else ():
            if call.function != "dropout" or call.layer in self._rates or not (call.inputs and call.outputs):
                continue
            given, out = (step.trace.tensors[side[0].tensor].source for side in (call.inputs, call.outputs))
            if given is not None and out is not None and not given.sketched:
                rate = call.arguments.get("p", call.arguments.get("1"))
                yield _Dropout(f"{call.layer}/dropout()", rate, out, given)

    def _by_zeros(
        self,
        steps: Sequence[Step],
        calls: Mapping[int, Mapping[tuple[str, int], _Dropout]],
        shared: Sequence[tuple[str, int]],
    ) -> list[SameMasks]:
        """Processes that drop the same elements, as full tensors show it: all calls of the first step, and later the
        first ones that tell enough, as processes of one seed agree in all.
        """
        agree: dict[tuple[int, int], dict[tuple[str, int], float]] = defaultdict(dict)
        apart: set[tuple[int, int]] = set()
        enough = certain(self._looked, len(steps), len(shared))
        by_rank = {step.rank: step for step in steps}
        for key in shared:
            seen = _Seen(by_rank, calls, key)
            first = {rank: _first_zeros(own[key]) for rank, own in calls.items() if key in own}
            telling = {rank: zeros for rank, zeros in first.items() if zeros is not None and 0 < zeros.mean() < 1}
            for pair, hinted in _hinted(telling):
                found = _bits_of(*map(seen.of, pair)) if hinted and not (self._looked and pair in apart) else _APART
                if found == _APART or (found == _EQUAL and self._looked):
                    apart.add(pair)
                elif found > 0:
                    agree[pair][key] = found
            open_ = (pair not in apart and sum(agree[pair].values()) < enough for pair in combinations(telling, 2))
            if self._looked and len(telling) == len(steps) and not any(open_):
                break
        alike: dict[tuple[int, int], list[str]] = {}
        for pair, found_at in agree.items():
            # One seed is one chance, however many places agree; of some that agree, each is one.
            together = pair not in apart and sum(found_at.values()) >= certain(self._looked, len(steps))
            alike[pair] = [place for (place, _), agreement in found_at.items() if together or agreement >= enough]
            if self._looked and alike[pair]:  # and the places that were not looked at yet
                left = [key for key in shared if key not in found_at and all(key in calls[rank] for rank in pair)]
                more = [key[0] for key in left if _bits_of(*map(_Seen(by_rank, calls, key).of, pair)) > 0]
                alike[pair] = [key[0] for key in shared if key[0] in {*alike[pair], *more}]
        return [SameMasks(ranks, places, steps[0].number) for ranks, places in _together(alike)]

    def _by_shares(
        self,
        number: int,
        calls: Mapping[int, Mapping[tuple[str, int], _Dropout]],
        shared: Sequence[tuple[str, int]],
    ) -> list[SameMasks]:
        """Processes that drop as many elements in all layers, step after step, as sketches show it."""
        kept: dict[tuple[str, int], dict[int, Sketch]] = {}
        for key in shared:
            own = {rank: _elementwise(one[key]) for rank, one in calls.items() if key in one}
            sketches = {rank: sketch for rank, sketch in own.items() if sketch is not None}
            if key[0] in self._elementwise and len(sketches) == len(calls):
                kept[key] = sketches
        if not kept:
            return []
        groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
        for rank in calls:
            groups[tuple(own[rank].zeros for own in kept.values())].append(rank)
        agree = {}
        places = tuple(dict.fromkeys(place for place, _ in kept))
        for ranks in groups.values():
            bits = sum(_chance(own[ranks[0]]) for own in kept.values()) if len(ranks) > 1 else 0.0
            for pair in combinations(ranks, 2):
                # What is equal is what partners in split layers hold alike.
                one, other = pair
                if any(not np.array_equal(own[one].projection, own[other].projection) for own in kept.values()):
                    before, since, _ = self._agree.get(pair, (0.0, number, ()))
                    agree[pair] = before + bits, since, places
        self._agree = agree
        sure = {pair: one for pair, one in agree.items() if one[0] >= certain(self._looked, len(calls))}
        found = []
        for since in sorted({one[1] for one in sure.values()}):
            own_places = {pair: list(one[2]) for pair, one in sure.items() if one[1] == since}
            found += [SameMasks(ranks, names, since) for ranks, names in _together(own_places)]
        return found


def _numbered(calls: Iterator[_Dropout]) -> Iterator[tuple[int, _Dropout]]:
    counts: dict[str, int] = defaultdict(int)
    for one in calls:
        yield counts[one.place], one
        counts[one.place] += 1


def _together(alike: Mapping[tuple[int, int], Sequence[str]]) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Pairs of processes that agree at the same places, as groups."""
    by_places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for pair, places in alike.items():
        if places:
            by_places[tuple(dict.fromkeys(places))].append(pair)
    for places, pairs in by_places.items():
        left = sorted(pairs)
        while left:
            ranks = set(left[0])
            ranks |= {rank for pair in left if ranks & {*pair} for rank in pair}
            left = [pair for pair in left if not ranks & {*pair}]
            yield tuple(sorted(ranks)), places


def _first_zeros(call: _Dropout) -> np.ndarray | None:
    """Where the first elements of what a dropout gave are zero; `None` where there are no values."""
    value = values_of(call.out)
    if value is None or not value.size:
        return None
    zeros: np.ndarray = value.reshape(-1)[:_FIRST] == 0
    return zeros


def _hinted(zeros: Mapping[int, np.ndarray]) -> Iterator[tuple[tuple[int, int], bool]]:
    """Pairs of processes, and whether their first zeros are at the same places more often than chance has it."""
    sizes = {rank: value.size for rank, value in zeros.items()}
    for size in sorted(set(sizes.values())):
        ranks = [rank for rank in zeros if sizes[rank] == size]
        if size < _FIRST:  # all there is: no less to be looked at
            yield from ((pair, True) for pair in combinations(ranks, 2))
            continue
        matrix = np.array([zeros[rank] for rank in ranks], np.float32)
        both, each = matrix @ matrix.T, matrix.sum(1)
        for i, j in combinations(range(len(ranks)), 2):
            apart, share = float(each[i] + each[j] - 2 * both[i, j]) / size, float(each[i] + each[j]) / (2 * size)
            yield (ranks[i], ranks[j]), bits(size, apart, share) >= _HINT


class _Values(NamedTuple):
    """What a process's call of dropout gave, what went in where that is known, and the rate."""

    out: np.ndarray | None
    given: np.ndarray | None
    rate: object


class _Seen:
    """The values of one call of dropout, of each process; read once."""

    def __init__(
        self, steps: Mapping[int, Step], calls: Mapping[int, Mapping[tuple[str, int], _Dropout]], key: tuple[str, int]
    ) -> None:
        self._steps, self._calls, self._key = steps, calls, key
        self._known: dict[int, _Values] = {}

    def of(self, rank: int) -> _Values:
        if rank not in self._known:
            call = self._calls[rank][self._key]
            out = wide_values_of(call.out)
            given = None if out is None else _went_in(self._steps[rank], call, out)
            self._known[rank] = _Values(out, given, call.rate)
        return self._known[rank]


def _bits_of(one: _Values, other: _Values) -> float:
    """How much speaks against chance where two processes drop the same elements, of other values; `_APART` where they
    drop others, `_EQUAL` where their values are no others, 0 where that is not known.
    """
    a, b = one.out, other.out
    if a is None or b is None or a.shape != b.shape or not a.size:
        return 0.0
    if np.array_equal(a, b):
        return _EQUAL
    if one.given is not None and other.given is not None:
        there = _may_show(one.given, a) & _may_show(other.given, b)
        if not np.array_equal(a[there] == 0, b[there] == 0):
            return _APART
        return bits(int(there.sum()), 0.0, float(np.mean(a[there] == 0)) if there.any() else 0.0)
    # What went in was not recorded, and may hold zeros: they must be about as many as dropout makes.
    if not all(_is_rate(float(np.mean(x == 0)), one.rate, x.size) for x in (a, b)):
        return 0.0
    assert isinstance(one.rate, int | float)
    return bits(a.size, float(np.mean((a == 0) != (b == 0))), one.rate) or _APART


def _is_rate(share: float, rate: object, count: int) -> bool:
    """Whether so large a share of zeros is what dropout makes at its rate."""
    if not isinstance(rate, int | float) or not 0 < rate < 1:
        return False
    return abs(share - rate) <= _SPREAD * math.sqrt(rate * (1 - rate) / count)


def _elementwise(call: _Dropout) -> Sketch | None:
    """The sketch of what a dropout gave, where its zeros are those that were dropped."""
    sketch = call.out.sketch
    if sketch is None or not sketch.looked_at or sketch.nonfinite:
        return None
    return sketch if _is_rate(sketch.zeros, call.rate, sketch.looked_at) else None


def _chance(sketch: Sketch) -> float:
    """How unlikely it is, in bits, that two masks have as many zeros: two draws of a binomial, by their densities."""
    spread = math.pi * sketch.looked_at * sketch.zeros * (1 - sketch.zeros)
    return max(0.0, math.log2(2 * math.sqrt(spread))) if spread > 0 else 0.0


def bits(count: int, apart: float, share: float) -> float:
    """How unlikely it is, in bits, that so few of two masks' elements are apart by chance (Chernoff's bound).

    Args:
        apart: the share of elements in which they are.
        share: of elements that are dropped.
    """
    expected = 2 * share * (1 - share)
    if apart >= expected:
        return 0.0
    bound = (1 - apart) * math.log2((1 - apart) / (1 - expected))
    return count * (bound + (apart * math.log2(apart / expected) if apart else 0.0))


def _may_show(given: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Where a zero that comes out was dropped: where none went in, also through a ReLU in between."""
    rectified = bool((given[out != 0] > 0).all())
    shown: np.ndarray = given > 0 if rectified else given != 0
    return shown


def _went_in(step: Step, call: _Dropout, out: np.ndarray) -> np.ndarray | None:
    """What a dropout was given: the last output before it of which its own is a multiple where it kept it."""
    if call.given is not None:
        given = wide_values_of(call.given)
        return given if given is not None and given.shape == out.shape else None
    there = out != 0
    if not there.any():
        return None
    before: list[Record] = []
    for record in step.records:
        if record.site == call.site:
            break
        if record.stage == "forward" and record.shape == out.shape:
            before.append(record)
    for record in reversed(before):
        value = wide_values_of(record.source)
        if value is not None and (value[there] != 0).all():
            ratio = out[there] / value[there]
            if np.allclose(ratio, ratio[0], rtol=1e-4, atol=0):
                return value
    return None
