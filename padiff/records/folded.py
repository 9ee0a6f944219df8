"""Diffs of many steps in little memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from padiff.records.both import Both
from padiff.records.compared import UNSCALED, Diff, Figures, Pair, Third
from padiff.records.judgement import Judgement
from padiff.records.recorded import Record, Run, Step
from padiff.records.sources import TensorSource
from padiff.sketches.sketch import Sketch

# Of figures, what is a number. NaN where there is none: `bulk_l2`, `floor`, distances from float64, and a judgement's
# `value` and `limit`.
_FLOATS = (
    "max_abs",
    "max_rel",
    "mean_abs",
    "mean_reference",
    "l2",
    "reference_l2",
    "candidate_l2",
    "bulk_l2",
    "spread",
    "floor",
    "third_reference",
    "third_candidate",
)
_COUNTS = ("size", "mismatched", "nonfinite", "overflowed")
_ROW = np.dtype(
    [
        ("place", np.uint32),
        ("problem", np.uint32),
        ("figure", np.uint32),
        ("rule", np.uint32),
        ("basis", np.uint32),
        ("code", np.uint32),
        ("passed", np.bool_),
        ("index", np.int64),
        *((name, np.int64) for name in _COUNTS),
        *((name, np.float64) for name in _FLOATS),
        ("reference_value", np.float64),
        ("candidate_value", np.float64),
        ("value", np.float64),
        ("limit", np.float64),
    ]
)
_NO_INDEX = -1
# What stands for the basis of figures that are not there.
_NO_FIGURES = ""


class Steps:
    """Reads steps of a run again when a record of one is looked at; the last one is kept."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last: tuple[int, list[Step]] = (-1, [])

    def record(self, number: int, rank: int, order: int) -> Record:
        """One record, by its place in the order of its step."""
        if self._last[0] != number:
            self._last = number, self._run.steps(number)
        records = self._last[1][rank].records
        found = records[order] if order < len(records) else None
        if found is None or found.order != order:
            found = next(record for record in records if record.order == order)
        return found


@dataclass(frozen=True, slots=True)
class Reread(TensorSource):
    """A tensor source that looks for its record in the run again."""

    steps: Steps
    number: int
    rank: int
    order: int

    @property
    def _source(self) -> TensorSource:
        return self.steps.record(self.number, self.rank, self.order).source

    def read(self) -> np.ndarray:
        return self._source.read()

    @property
    def sketch(self) -> Sketch | None:
        return self._source.sketch

    @property
    def sketched(self) -> bool:
        return self._source.sketched

    @property
    def refetchable(self) -> bool:
        return True

    @property
    def identity(self) -> Hashable:
        return self._source.identity


class _Names(dict[Any, int]):
    """Numbers of things that come again and again, in the order in which they came first."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def __missing__(self, thing: Any) -> int:
        self[thing] = number = len(self.known)
        self.known.append(thing)
        return number


@dataclass(frozen=True, slots=True)
class _Block:
    """Diffs of one rank of one step.

    Attributes:
        numbers: of the step, as each run numbers it.
        rank: which of the step's ranks, counted.
        step: the step's number, as the pairs have it.
        rows: what is kept of each diff.
        whole: diffs that do not fit into a row, by their place in the block.
    """

    numbers: Both[int]
    rank: int
    step: int
    rows: np.ndarray
    whole: dict[int, Diff]


class _MadeAnew(Sequence[Diff], ABC):
    """Diffs that are made when they are asked for."""

    @abstractmethod
    def _at(self, place: int) -> Diff:
        """The diff at a place, counted from the first one."""

    @overload
    def __getitem__(self, key: int) -> Diff: ...

    @overload
    def __getitem__(self, key: slice) -> Sequence[Diff]: ...

    def __getitem__(self, key: int | slice) -> Diff | Sequence[Diff]:
        places = range(len(self))[key]  # raises IndexError as sequences do, and counts from the end
        return self._at(places) if isinstance(places, int) else tuple(map(self._at, places))


class FoldedDiffs(_MadeAnew):
    """The diffs of many steps: what is the same in every step is kept once, figures as numbers.

    A diff is made anew whenever it is asked for; if its tensors are looked at, its step is read again.

    Args:
        runs: reference and candidate.
    """

    def __init__(self, runs: Both[Run]) -> None:
        self._steps = runs.map(Steps)
        self._blocks: list[_Block] = []
        self._starts = array("q")
        self._count = 0
        self._places, self._things = _Names(), _Names()
        #: Of pairs that steps have in common, their numbers in `_places`.
        self._planned: dict[int, int] = {}

    def add(self, diffs: Sequence[Diff], numbers: Both[int], rank: int) -> None:
        """Add the diffs of one rank of one step."""
        if not diffs:
            return
        whole = {k: diff for k, diff in enumerate(diffs) if not _fits(diff)}
        rows = [self._row(diff) for diff in diffs]
        self._blocks.append(_Block(numbers, rank, diffs[0].pair.step, np.array(rows, _ROW), whole))
        self._starts.append(self._count)
        self._count += len(diffs)

    @property
    def failed(self) -> Sequence[Diff]:
        """Those that did not pass."""
        places = array("q")
        for start, block in zip(self._starts, self._blocks):
            places.extend((start + np.flatnonzero(~block.rows["passed"])).tolist())
        return _Chosen(self, places)

    def holds(self, column: str) -> bool:
        """Whether any of them has a number in a column of `_FLOATS`."""
        return any(not np.isnan(block.rows[column]).all() for block in self._blocks)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Diff]:
        for block in self._blocks:
            for k, row in enumerate(block.rows.tolist()):
                yield self._diff(block, k, row)

    def _at(self, place: int) -> Diff:
        number = bisect_right(self._starts, place) - 1
        block, k = self._blocks[number], place - self._starts[number]
        return self._diff(block, k, block.rows[k].item())

    def _row(self, diff: Diff) -> tuple[Any, ...]:
        pair, figures = diff.pair, diff.figures
        things, judged = self._things, diff.judgement
        about = (
            self._place_of(pair),
            things[diff.problem],
            things[judged.figure if judged is not None else None],
            things[judged.rule if judged is not None else None],
            things[figures.basis if figures is not None else _NO_FIGURES],
            things[figures.third.code if figures is not None and figures.third is not None else _NO_FIGURES],
            diff.passed,
        )
        judgement = (judged.value, judged.limit) if judged is not None else (math.nan, math.nan)
        if figures is None:
            return (*about, _NO_INDEX, *(0,) * len(_COUNTS), *(math.nan,) * (len(_FLOATS) + 2), *judgement)
        counts = (figures.size, figures.mismatched, figures.nonfinite, figures.overflowed)
        floats = (
            figures.max_abs,
            figures.max_rel,
            figures.mean_abs,
            figures.mean_reference,
            figures.l2,
            figures.reference_l2,
            figures.candidate_l2,
            _or_nan(figures.bulk_l2),
            figures.spread,
            _or_nan(figures.floor),
            *(figures.third.errors if figures.third is not None else (math.nan, math.nan)),
        )
        return (*about, _flat(figures.index, pair.anchor.shape), *counts, *floats, *figures.values, *judgement)

    def _place_of(self, pair: Pair) -> int:
        """The number of what of a pair is the same in every step."""
        # Scales come from the step.
        planned = pair.planned if pair.scales is UNSCALED else None
        place = self._planned.get(planned) if planned is not None else None
        if place is None:
            sides = _place(pair.reference), _place(pair.candidate)
            place = self._places[(*sides, pair.layout, pair.scales, pair.optional)]
            if planned is not None:
                self._planned[planned] = place
        return place

    def _diff(self, block: _Block, k: int, row: tuple[Any, ...]) -> Diff:
        if k in block.whole:
            return block.whole[k]
        place, problem, figure, rule, basis, code, passed, flat, size, mismatched, nonfinite, overflowed, *floats = row
        reference_place, candidate_place, layout, scales, optional = self._places.known[place]
        sides = zip((reference_place, candidate_place), self._steps, block.numbers)
        reference, candidate = (_record(place, steps, number, block.rank) for place, steps, number in sides)
        pair = Pair(block.step, reference, candidate, layout, scales, optional)
        things = self._things.known
        figures = None
        *measured, bulk, spread, floor, third, third_other, one, other, value, limit = floats
        if things[basis] != _NO_FIGURES:
            max_abs, max_rel, mean_abs, mean_reference, l2, reference_l2, candidate_l2 = measured
            index = () if flat == _NO_INDEX else _index(flat, pair.anchor.shape)
            figures = Figures(
                max_abs,
                max_rel,
                mean_abs,
                mean_reference,
                l2,
                reference_l2,
                candidate_l2,
                size,
                index,
                Both(one, other),
                mismatched,
                nonfinite,
                overflowed,
                _or_none(bulk),
                things[basis],
                spread,
                _or_none(floor),
                Third(Both(third, third_other), things[code]) if things[code] != _NO_FIGURES else None,
            )
        judged = None if things[figure] is None else Judgement(things[figure], value, limit, things[rule])
        return Diff(pair, figures, passed, judged, things[problem])


class _Chosen(_MadeAnew):
    """Some of the diffs, in their order."""

    def __init__(self, diffs: FoldedDiffs, places: array[int]) -> None:
        self._diffs, self._places = diffs, places

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, place: int) -> Diff:
        return self._diffs[self._places[place]]


def _place(record: Record | None) -> tuple[Any, ...] | None:
    """What of a record is the same in every step."""
    if record is None:
        return None
    r = record
    return r.layer, r.stage, r.slot, r.dtype, r.shape, r.call, r.order, r.layer_type, r.recomputed


def _record(place: tuple[Any, ...] | None, steps: Steps, number: int, rank: int) -> Record | None:
    """The record at a place in a step."""
    if place is None:
        return None
    layer, stage, slot, dtype, shape, call, order, layer_type, recomputed = place
    source = Reread(steps, number, rank, order)
    return Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, recomputed)


def _fits(diff: Diff) -> bool:
    """Whether a row says all of a diff."""
    pair = diff.pair
    for side in (pair.reference, pair.candidate):
        if side is not None and not side.source.refetchable:
            return False  # a part of a tensor, or several in one: it is in no file
    index = diff.figures.index if diff.figures is not None else ()
    if not index:
        return True
    shape = pair.anchor.shape
    return len(index) == len(shape) and all(i < n for i, n in zip(index, shape))


def _flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    if not index or len(index) != len(shape):
        return _NO_INDEX
    flat = 0
    for i, n in zip(index, shape):
        flat = flat * n + i
    return flat


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for n in reversed(shape):
        flat, i = divmod(flat, n)
        index.append(i)
    return tuple(reversed(index))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
