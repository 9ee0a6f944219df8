"""Diffs of one step as columns: a shared description of the pairs, and numbers for each diff."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.compared import Diff, Pair
from padiff.records.diff_rows import FIGURE_NUMBERS, ROW, RULE_NUMBERS, measured_and_judged, odd_indexes, row_of
from padiff.records.judgement import Figure, Problem, Rule
from padiff.records.lazy_sequence import LazySequence
from padiff.records.memoization import memoize
from padiff.records.pair_schema import Key, PairSchema
from padiff.records.step_batch import StepBatch

_Fact = TypeVar("_Fact")


class StepDiffs(LazySequence[Diff]):
    """Diffs of one process in a step, in causal order. `Diff` objects are created on access; numbers are columns.

    Args:
        pairs: the compared pairs.
        sites: description of the pairs.
        rows: rows of the dtype `ROW`, one for each diff.
        problems: problems by position.
        odd: indexes of worst elements that a row cannot hold, by position.
        block: measurements of this step together with others. Default: of this step alone.
        in_block: position of this step in the block.

    Attributes:
        pairs, sites, rows, problems, odd, block, in_block: the arguments of the same names.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        sites: PairSchema,
        rows: np.ndarray,
        problems: Mapping[int, Problem],
        odd: Mapping[int, tuple[int, ...]],
        block: StepBatch | None = None,
        in_block: int = 0,
    ) -> None:
        self.pairs, self.sites, self.rows, self.problems, self.odd = pairs, sites, rows, problems, odd
        self.block = StepBatch(sites, rows[None], (problems,)) if block is None else block
        self.in_block = in_block
        self._made: dict[int, Diff] = {}
        self._facts: dict[Any, Any] = {}

    def fact(self, find: Callable[[StepDiffs], _Fact]) -> _Fact:
        """Return the result of a function of these diffs; the function is called once and its result is cached."""
        return memoize(self._facts, find, lambda: self)

    def measured_fact(self, find: Callable[[StepBatch], np.ndarray]) -> np.ndarray:
        """Return this step's row of a function's result for the whole block; the result is cached for all steps of
        the block.
        """
        return np.asarray(self.block.fact(find)[self.in_block])

    @classmethod
    def from_diffs(cls, diffs: Sequence[Diff], sites: PairSchema | None = None) -> StepDiffs:
        """Return the columns of a sequence of diffs.

        Args:
            sites: description of their pairs. Default: computed from the pairs.
        """
        if isinstance(diffs, StepDiffs):
            return diffs
        pairs = [diff.pair for diff in diffs]
        columns = cls(
            pairs,
            PairSchema.from_pairs(pairs) if sites is None else sites,
            np.array([row_of(diff) for diff in diffs], ROW),
            {place: diff.problem for place, diff in enumerate(diffs) if diff.problem is not None},
            odd_indexes(dict(enumerate(diffs))),
        )
        columns._made.update(enumerate(diffs))
        return columns

    @classmethod
    def joined(cls, some: Sequence[StepDiffs]) -> StepDiffs:
        """Return the diffs of several processes as one object, in the order of the processes."""
        if len(some) == 1:
            return some[0]
        return cls.from_diffs([diff for diffs in some for diff in diffs])

    def split(self, pairs: Sequence[Sequence[Pair]]) -> list[StepDiffs]:
        """Return the diffs of each process, given the pairs of each: the inverse of `joined`."""
        if len(pairs) == 1:
            return [self]
        processes, diffs = [], list(self)
        for part in pairs:
            processes.append(StepDiffs.from_diffs(diffs[: len(part)]))
            diffs = diffs[len(part) :]
        return processes

    @property
    def measured(self) -> np.ndarray:
        """Return a mask of the diffs that have figures."""
        return np.asarray(self.block.measured[self.in_block])

    @property
    def known(self) -> np.ndarray:
        """Return a mask of the diffs that have both sides and figures."""
        return np.asarray(self.block.known[self.in_block])

    @property
    def troubled(self) -> np.ndarray:
        """Return a mask of the diffs that have a problem."""
        return np.asarray(self.block.troubled[self.in_block])

    @property
    def relative(self) -> np.ndarray:
        """Return the relative L2 error of each diff, as defined by `Figures.rel_l2`."""
        return np.asarray(self.block.relative[self.in_block])

    @cached_property
    def compared(self) -> np.ndarray:
        """Return a mask of the diffs that were compared, as defined by `Diff.compared`."""
        return np.asarray(self.sites.complete & (self.measured | ~self.rows["passed"]))

    def known_places(self, stage: str) -> np.ndarray:
        """Return the positions of a stage's diffs that have both sides and figures."""
        places = self.sites.places[stage]
        return places if self.block.all_known else places[self.known[places]]

    @cached_property
    def passed(self) -> bool:
        """Return True if all diffs passed."""
        return bool(self.rows["passed"].all())

    @cached_property
    def number(self) -> int | None:
        """Return the number of the step; `None` without diffs."""
        return self.pairs[0].step if len(self.rows) else None

    def keys_of(self, which: np.ndarray) -> set[Key]:
        """Return the layers and slots of the diffs that a mask selects."""
        return {self.sites.keys[place] for place in np.flatnonzero(which).tolist()}

    def judged(self, rows: np.ndarray) -> StepDiffs:
        """Return the same diffs with other judgements.

        Args:
            rows: the new row of each diff.
        """
        return StepDiffs(self.pairs, self.sites, rows, self.problems, self.odd, self.block, self.in_block)

    def with_failures(self, judged: Mapping[int, tuple[Figure, float, float, Rule]]) -> StepDiffs:
        """Return the diffs with those at some positions failed.

        Args:
            judged: the judged figure, its value, its limit, and the rule, by position of the diff.
        """
        if not judged:
            return self
        rows = self.rows.copy()
        for place, (figure, value, limit, rule) in judged.items():
            rows["passed"][place] = False
            rows["figure"][place], rows["rule"][place] = FIGURE_NUMBERS[figure], RULE_NUMBERS[rule]
            rows["value"][place], rows["limit"][place] = value, limit
        return self.judged(rows)

    def passing(self, places: Sequence[int], passed: bool) -> StepDiffs:
        """Return the diffs with `passed` set at some positions; the judgements stay."""
        if not places:
            return self
        rows = self.rows.copy()
        rows["passed"][places] = passed
        return self.judged(rows)

    def replaced(self, diffs: Sequence[Diff]) -> StepDiffs:
        """Return other diffs of the same pairs in place of these."""
        return StepDiffs.from_diffs(diffs, self.sites)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Diff]:
        if len(self._made) < len(self):
            for place, row in enumerate(self.rows.tolist()):
                if place not in self._made:
                    self._made[place] = self._of_row(place, row)
        return iter([self._made[place] for place in range(len(self))])

    def _at(self, place: int) -> Diff:
        diff = self._made.get(place)
        if diff is None:
            diff = self._made[place] = self._of_row(place, self.rows[place].item())
        return diff

    def _of_row(self, place: int, row: tuple[Any, ...]) -> Diff:
        figures, passed, judged = measured_and_judged(row, self.sites.shapes[place])
        if place in self.odd and figures is not None:
            figures = replace(figures, index=self.odd[place])
        return Diff(self.pairs[place], figures, passed, judged, self.problems.get(place))
