"""The diffs of a step as columns: what steps alike have in common once, and numbers for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.both import Both
from padiff.records.compared import Diff, Pair
from padiff.records.facts import once
from padiff.records.judgement import Figure, Problem, Rule
from padiff.records.on_demand import OnDemand
from padiff.records.recorded import STAGES
from padiff.records.rows import FIGURE_NUMBERS, ROW, RULE_NUMBERS, measured_and_judged, odd_indexes, row_of

_Fact = TypeVar("_Fact")
#: A parameter: its layer and slot.
Key = tuple[str, str]


class Sites:
    """What the pairs of a step are but for their values, in their order: the same object for all steps that are alike.

    Args:
        pairs: those of one of the steps; none of them is kept.

    Attributes:
        layers, slots, stages, calls, types, shapes: of each pair's anchor.
        dtypes: of both sides; `None` where a side is missing.
        anchor_dtypes: of each anchor.
        candidates: layer, slot and layer type of each candidate's record; empty where it is missing.
        complete: where both sides are there.
        places: the places of a stage's pairs; of every stage.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        anchors = [pair.anchor for pair in pairs]
        self.layers = [record.layer for record in anchors]
        self.slots = [record.slot for record in anchors]
        self.stages = [record.stage for record in anchors]
        self.calls = [record.call for record in anchors]
        self.types = [record.layer_type for record in anchors]
        self.shapes = [record.shape for record in anchors]
        references, candidates = [pair.reference for pair in pairs], [pair.candidate for pair in pairs]
        self.dtypes = Both(
            [record.dtype if record is not None else None for record in references],
            [record.dtype if record is not None else None for record in candidates],
        )
        self.anchor_dtypes = [record.dtype for record in anchors]
        self.candidates = [
            (record.layer, record.slot, record.layer_type) if record is not None else _NOTHING for record in candidates
        ]
        self.complete = np.array([pair.complete for pair in pairs], np.bool_)
        stages = np.array([_STAGE[stage] for stage in self.stages], np.int8)
        self.places = {stage: np.flatnonzero(stages == number) for number, stage in enumerate(STAGES)}
        self._facts: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.layers)

    def fact(self, find: Callable[[Sites], _Fact]) -> _Fact:
        """What a function finds out from the sites; it is called once."""
        return once(self._facts, find, self)

    @cached_property
    def keys(self) -> list[Key]:
        """Layer and slot of each pair."""
        return list(zip(self.layers, self.slots))

    def largest_of_layers(self, stage: str, values: np.ndarray) -> np.ndarray:
        """The largest of each pair's layer; NaN where it has none.

        Args:
            values: of the pairs of a stage, in their order; what is NaN counts for nothing.
        """
        found = np.full(self._layer_count, np.nan)
        if len(values):
            order, starts, layers = self._layer_groups[stage]
            found[layers] = np.fmax.reduceat(values[order], starts)
        return np.asarray(found[self.layer_numbers])

    def sums_of_layers(self, stage: str, values: np.ndarray) -> np.ndarray:
        """The sum over each pair's layer, of values of the pairs of a stage."""
        numbers = self.layer_numbers
        return np.asarray(np.bincount(numbers[self.places[stage]], values, self._layer_count)[numbers])

    @cached_property
    def _layer_groups(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each stage, an order of its pairs by layers, where each layer begins in it, and which layers these are."""
        found = {}
        for stage, places in self.places.items():
            numbers = self.layer_numbers[places]
            order = numbers.argsort(kind="stable")
            layers, starts = np.unique(numbers[order], return_index=True)
            found[stage] = order, starts, layers
        return found

    @cached_property
    def layer_numbers(self) -> np.ndarray:
        """A number for each pair's layer."""
        return _numbers(self.layers)

    @cached_property
    def _layer_count(self) -> int:
        """How many layers there are."""
        return int(self.layer_numbers.max(initial=-1)) + 1

    @cached_property
    def key_count(self) -> int:
        """How many layers and slots there are."""
        return int(self.key_numbers.max(initial=-1)) + 1

    @cached_property
    def key_numbers(self) -> np.ndarray:
        """A number for each pair's layer and slot."""
        return _numbers(self.keys)


_NOTHING = ("", "", "")
_STAGE = {stage: number for number, stage in enumerate(STAGES)}


def _numbers(things: Sequence[Any]) -> np.ndarray:
    known: dict[Any, int] = {}
    return np.array([known.setdefault(thing, len(known)) for thing in things], np.intp)


class StepDiffs(OnDemand[Diff]):
    """The diffs of one process in a step, in causal order. A diff is made when it is looked at; numbers are columns.

    Args:
        pairs: what was compared.
        sites: what the pairs are.
        rows: of `ROW`, one for each diff.
        problems: those that there are, by place.
        odd: by place, indexes of worst elements that a row can't hold.

    Attributes:
        pairs, sites, rows, problems, odd: likewise.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        sites: Sites,
        rows: np.ndarray,
        problems: Mapping[int, Problem],
        odd: Mapping[int, tuple[int, ...]],
    ) -> None:
        self.pairs, self.sites, self.rows, self.problems, self.odd = pairs, sites, rows, problems, odd
        self._made: dict[int, Diff] = {}
        self._facts: dict[Any, Any] = {}

    def fact(self, find: Callable[[StepDiffs], _Fact]) -> _Fact:
        """What a function finds out from the diffs; it is called once."""
        return once(self._facts, find, self)

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
            Sites(pairs) if sites is None else sites,
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

    @cached_property
    def measured(self) -> np.ndarray:
        """Which have figures."""
        return np.asarray(self.rows["basis"] != 0)

    @cached_property
    def compared(self) -> np.ndarray:
        """Which are compared, as `Diff.compared` says."""
        return np.asarray(self.sites.complete & (self.measured | ~self.rows["passed"]))

    @cached_property
    def known(self) -> np.ndarray:
        """Which are compared, and have figures."""
        return np.asarray(self.sites.complete & self.measured)

    def known_only(self, places: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Values of some places, NaN where a diff is not compared, or has no figures."""
        return values if self._all_known else np.where(self.known[places], values, np.nan)

    def known_places(self, stage: str) -> np.ndarray:
        """The places of a stage's diffs that are compared, and have figures."""
        places = self.sites.places[stage]
        return places if self._all_known else places[self.known[places]]

    @cached_property
    def _all_known(self) -> bool:
        return bool(self.known.all())

    @cached_property
    def troubled(self) -> np.ndarray:
        """Which have a problem."""
        found = np.zeros(len(self.rows), np.bool_)
        found[list(self.problems)] = True
        return found

    @cached_property
    def relative(self) -> np.ndarray:
        """The relative L2 error of each, as `Figures.rel_l2` says."""
        l2, size = self.rows["l2"], self.rows["reference_l2"]
        with np.errstate(divide="ignore", invalid="ignore"):
            found: np.ndarray = l2 / size
        without = self.measured & ~(size > 0)
        if without.any():
            found[without] = np.where(l2[without] == 0, 0.0, np.inf)
        return found

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
        return StepDiffs(self.pairs, self.sites, rows, self.problems, self.odd)

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
