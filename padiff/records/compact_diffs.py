"""Compact storage of the diffs of many steps."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from padiff.records.both import Both, LazySequence
from padiff.records.compared import Diff, Pair, Problem
from padiff.records.pair_table import PairSchema, PairTable, stage_numbers
from padiff.records.recorded import Record, Run, Step
from padiff.records.report_data import Table
from padiff.records.sources import TensorSource
from padiff.records.step_diffs import StepDiffs, measured_and_judged
from padiff.sketches.sketch import Sketch

# Index of the stage in the tuple that `_place` returns.
_STAGE = 1


class Steps:
    """Reader of a run's steps that reads a step again when one of its records is accessed, and caches the last step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last: tuple[int, list[Step]] = (-1, [])

    def record(self, number: int, rank: int, order: int) -> Record:
        """Return one record, by its position in the order of its step."""
        if self._last[0] != number:
            self._last = number, self._run.steps(number)
        records = self._last[1][rank].records
        candidate = records[order] if order < len(records) else None
        if candidate is None or candidate.order != order:
            candidate = next(record for record in records if record.order == order)
        return candidate


@dataclass(frozen=True, slots=True)
class Reread(TensorSource):
    """A tensor source that reads its record from the run again at each access."""

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
    """Numbers of hashable values, in order of first occurrence; `known[number]` is the value of a number."""

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
        numbers: the number of the step in each run.
        rank: position of the rank among the step's ranks.
        step: the step's number in the pairs.
        places: number of each pair's step-independent description (`_about`).
        rows: the row of each diff, of the dtype `padiff.records.step_diffs.ROW`.
        problems: problems by position in the block.
        whole: diffs that do not fit into a row, by position in the block.
    """

    numbers: Both[int]
    rank: int
    step: int
    places: np.ndarray
    rows: np.ndarray
    problems: Mapping[int, Problem]
    whole: Mapping[int, Diff]


class CompactDiffs(LazySequence[Diff]):
    """Diffs of many steps, stored compactly: pair descriptions that repeat in every step once, figures as numbers.

    A diff is created anew at each access; its step is read again when its tensors are accessed.

    Args:
        runs: reference and candidate.
    """

    def __init__(self, runs: Both[Run]) -> None:
        self._steps = runs.map(Steps)
        self._blocks: list[_Block] = []
        self._starts = array("q")
        self._count = 0
        self._places = _Names()
        #: For pairs that steps share: their numbers in `_places`, and the positions of pairs that no file holds.
        self._planned: dict[PairSchema, tuple[np.ndarray, list[int]]] = {}
        #: Problems of steps, shared by steps with equal ones: most steps have the same.
        self._problems: dict[tuple[tuple[int, Problem], ...], Mapping[int, Problem]] = {}

    def add(self, diffs: Sequence[Diff], numbers: Both[int], rank: int) -> None:
        """Add the diffs of one rank of one step."""
        step = StepDiffs.from_diffs(diffs)
        if step.number is None:
            return
        places, lost = self._about(step)
        misfits = {place: step[place] for place in {*lost, *step.odd}}
        problems = self._problems.setdefault(tuple(step.problems.items()), step.problems)
        self._blocks.append(_Block(numbers, rank, step.number, places, step.rows, problems, misfits))
        self._starts.append(self._count)
        self._count += len(step)

    def _about(self, step: StepDiffs) -> tuple[np.ndarray, list[int]]:
        """Return the numbers of the pairs' step-independent descriptions, and the positions of pairs that no file
        holds.
        """
        pairs = step.pairs
        # Scales depend on the step.
        alike = isinstance(pairs, PairTable) and pairs.unscaled
        numbered = self._planned.get(step.sites) if alike else None
        if numbered is None:
            lost = [place for place, pair in enumerate(pairs) if not _is_in_files(pair)]
            numbered = np.array([self._places[_about(pair)] for pair in pairs], np.uint32), lost
            if alike:
                self._planned[step.sites] = numbered
        return numbered

    @property
    def failed(self) -> Sequence[Diff]:
        """Return the diffs that did not pass."""
        places = array("q")
        for start, block in zip(self._starts, self._blocks):
            places.extend((start + np.flatnonzero(~block.rows["passed"])).tolist())
        return _Chosen(self, places)

    def holds(self, column: str) -> bool:
        """Return True if any diff has a number in a column of `padiff.records.step_diffs.FLOATS`."""
        return any(not np.isnan(block.rows[column]).all() for block in self._blocks)

    @property
    def tables(self) -> Iterator[Table]:
        """Yield the diffs as tables, one for each rank of each step."""
        about = self._places.known
        stages = stage_numbers((reference or candidate)[_STAGE] for reference, candidate, *_ in about)
        complete = np.array([bool(reference and candidate) for reference, candidate, *_ in about], np.bool_)
        for start, block in zip(self._starts, self._blocks):
            yield Table(
                stages[block.places], complete[block.places], block.rows, partial(self._from, start), block.step
            )

    def _from(self, start: int, place: int) -> Diff:
        return self[start + place]

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

    def _diff(self, block: _Block, k: int, row: tuple[Any, ...]) -> Diff:
        if k in block.whole:
            return block.whole[k]
        reference_place, candidate_place, layout, scales, *marks = self._places.known[block.places[k]]
        sides = zip((reference_place, candidate_place), self._steps, block.numbers)
        reference, candidate = (_record(place, steps, number, block.rank) for place, steps, number in sides)
        pair = Pair(block.step, reference, candidate, layout, scales, *marks)
        figures, passed, judged = measured_and_judged(row, pair.anchor.shape)
        return Diff(pair, figures, passed, judged, block.problems.get(k))


class _Chosen(LazySequence[Diff]):
    """A subset of the diffs, in their order."""

    def __init__(self, diffs: CompactDiffs, places: array[int]) -> None:
        self._diffs, self._places = diffs, places

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, place: int) -> Diff:
        return self._diffs[self._places[place]]


def _place(r: Record) -> tuple[Any, ...]:
    """Return the parts of a record's description that are the same in every step."""
    return r.layer, r.stage, r.slot, r.dtype, r.shape, r.call, r.order, r.layer_type, r.recomputed


def _record(place: tuple[Any, ...] | None, steps: Steps, number: int, rank: int) -> Record | None:
    """Return a record of a step, from its description, if any; its values are read again at each access."""
    if place is None:
        return None
    layer, stage, slot, dtype, shape, call, order, layer_type, recomputed = place
    source = Reread(steps, number, rank, order)
    return Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, recomputed)


def _about(pair: Pair) -> tuple[Any, ...]:
    """Return the parts of a pair's description that are the same in every step."""
    sides = [None if side is None else _place(side) for side in pair.sides]
    return (*sides, pair.layout, pair.scales, pair.optional, pair.derived)


def _is_in_files(pair: Pair) -> bool:
    """Return True if both sides can be read again; parts of tensors and joined tensors are in no file."""
    return all(side is None or side.source.refetchable for side in (pair.reference, pair.candidate))
