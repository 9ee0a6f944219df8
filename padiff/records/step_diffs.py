"""The diffs of a step as columns: what steps alike have in common once, and numbers for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.block import Block
from padiff.records.compared import Diff, Pair
from padiff.records.facts import once
from padiff.records.judgement import Figure, Problem, Rule
from padiff.records.on_demand import OnDemand
from padiff.records.rows import FIGURE_NUMBERS, ROW, RULE_NUMBERS, measured_and_judged, odd_indexes, row_of
from padiff.records.sites import Key, Sites

_Fact = TypeVar("_Fact")


class StepDiffs(OnDemand[Diff]):
    """The diffs of one process in a step, in causal order. A diff is made when it is looked at; numbers are columns.

    Args:
        pairs: what was compared.
        sites: what the pairs are.
        rows: of `ROW`, one for each diff.
        problems: those that there are, by place.
        odd: by place, indexes of worst elements that a row can't hold.
        block: what was measured of this step, and of others with it. Default: of this one.
        in_block: this step's place there.

    Attributes:
        pairs, sites, rows, problems, odd, block, in_block: likewise.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        sites: Sites,
        rows: np.ndarray,
        problems: Mapping[int, Problem],
        odd: Mapping[int, tuple[int, ...]],
        block: Block | None = None,
        in_block: int = 0,
    ) -> None:
        self.pairs, self.sites, self.rows, self.problems, self.odd = pairs, sites, rows, problems, odd
        self.block = Block(sites, rows[None], (problems,)) if block is None else block
        self.in_block = in_block
        self._made: dict[int, Diff] = {}
        self._facts: dict[Any, Any] = {}

    def fact(self, find: Callable[[StepDiffs], _Fact]) -> _Fact:
        """What a function finds out from the diffs; it is called once."""
        return once(self._facts, find, lambda: self)

    def measured_fact(self, find: Callable[[Block], np.ndarray]) -> np.ndarray:
        """Of what a function finds out from the measured steps, this one's; it is called once for all of them."""
        return np.asarray(self.block.fact(find)[self.in_block])

    @classmethod
    def of(cls, diffs: Sequence[Diff], sites: Sites | None = None) -> StepDiffs:
        """Those of some diffs.

        Args:
            sites: what their pairs are. Default: found out.
        """
        if isinstance(diffs, StepDiffs):
            return diffs
        pairs = [diff.pair for diff in diffs]
        found = cls(
            pairs,
            Sites.of(pairs) if sites is None else sites,
            np.array([row_of(diff) for diff in diffs], ROW),
            {place: diff.problem for place, diff in enumerate(diffs) if diff.problem is not None},
            odd_indexes(dict(enumerate(diffs))),
        )
        found._made.update(enumerate(diffs))
        return found

    @classmethod
    def joined(cls, some: Sequence[StepDiffs]) -> StepDiffs:
        """Those of several processes, one after the other."""
        if len(some) == 1:
            return some[0]
        return cls.of([diff for diffs in some for diff in diffs])

    def split(self, pairs: Sequence[Sequence[Pair]]) -> list[StepDiffs]:
        """Those of each process, given all of their pairs; the opposite of `joined`."""
        if len(pairs) == 1:
            return [self]
        found, diffs = [], list(self)
        for own in pairs:
            found.append(StepDiffs.of(diffs[: len(own)]))
            diffs = diffs[len(own) :]
        return found

    @property
    def measured(self) -> np.ndarray:
        """Which have figures."""
        return np.asarray(self.block.measured[self.in_block])

    @property
    def known(self) -> np.ndarray:
        """Which are compared, and have figures."""
        return np.asarray(self.block.known[self.in_block])

    @property
    def troubled(self) -> np.ndarray:
        """Which have a problem."""
        return np.asarray(self.block.troubled[self.in_block])

    @property
    def relative(self) -> np.ndarray:
        """The relative L2 error of each, as `Figures.rel_l2` says."""
        return np.asarray(self.block.relative[self.in_block])

    @cached_property
    def compared(self) -> np.ndarray:
        """Which are compared, as `Diff.compared` says."""
        return np.asarray(self.sites.complete & (self.measured | ~self.rows["passed"]))

    def known_places(self, stage: str) -> np.ndarray:
        """The places of a stage's diffs that are compared, and have figures."""
        places = self.sites.places[stage]
        return places if self.block.all_known else places[self.known[places]]

    @cached_property
    def passed(self) -> bool:
        """Whether all passed."""
        return bool(self.rows["passed"].all())

    @cached_property
    def number(self) -> int | None:
        """Of the step; `None` where there are no diffs."""
        return self.pairs[0].step if len(self.rows) else None

    def keys_of(self, which: np.ndarray) -> set[Key]:
        """Layers and slots of some."""
        return {self.sites.keys[place] for place in np.flatnonzero(which).tolist()}

    def judged(self, rows: np.ndarray) -> StepDiffs:
        """The same diffs, judged otherwise.

        Args:
            rows: theirs.
        """
        return StepDiffs(self.pairs, self.sites, rows, self.problems, self.odd, self.block, self.in_block)

    def failed(self, judged: Mapping[int, tuple[Figure, float, float, Rule]]) -> StepDiffs:
        """The diffs, where some do not pass: by their places, what was judged, its value, its limit, and the rule."""
        if not judged:
            return self
        rows = self.rows.copy()
        for place, (figure, value, limit, rule) in judged.items():
            rows["passed"][place] = False
            rows["figure"][place], rows["rule"][place] = FIGURE_NUMBERS[figure], RULE_NUMBERS[rule]
            rows["value"][place], rows["limit"][place] = value, limit
        return self.judged(rows)

    def passing(self, places: Sequence[int], passed: bool) -> StepDiffs:
        """The diffs, where some pass, or do not, whatever was judged of them."""
        if not places:
            return self
        rows = self.rows.copy()
        rows["passed"][places] = passed
        return self.judged(rows)

    def replaced(self, diffs: Sequence[Diff]) -> StepDiffs:
        """Other diffs of the same pairs in their place."""
        return StepDiffs.of(diffs, self.sites)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Diff]:
        if len(self._made) < len(self):
            for place, row in enumerate(self.rows.tolist()):
                if place not in self._made:
                    self._made[place] = self._of_row(place, row)
        return iter([self._made[place] for place in range(len(self))])

    def _at(self, place: int) -> Diff:
        found = self._made.get(place)
        if found is None:
            found = self._made[place] = self._of_row(place, self.rows[place].item())
        return found

    def _of_row(self, place: int, row: tuple[Any, ...]) -> Diff:
        figures, passed, judged = measured_and_judged(row, self.sites.shapes[place])
        if place in self.odd and figures is not None:
            figures = replace(figures, index=self.odd[place])
        return Diff(self.pairs[place], figures, passed, judged, self.problems.get(place))
