"""The pairs of a step that is paired as one before was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from padiff.records.both import Both
from padiff.records.compared import UNSCALED, Pair
from padiff.records.facts import once
from padiff.records.layout import Layout
from padiff.records.on_demand import OnDemand
from padiff.records.recorded import Record
from padiff.records.sites import Sites
from padiff.records.structured import Structured, called

_Fact = TypeVar("_Fact")


@dataclass(eq=False, slots=True)
class PairColumns:
    """Pairs of two structures, but for the step that they are of. (Not a value for each: of many layers they are many,
    and are kept.)

    Attributes:
        references, candidates: places of the two records in their steps; `None` where that side has none.
        layouts, optional: as `Pair` has them.
        scaled: whether both sides are divided by their steps' loss scales.
        sites: what they are.
        facts: what was found out from the pairs of one step.
    """

    references: list[int | None]
    candidates: list[int | None]
    layouts: list[Layout]
    scaled: list[bool]
    optional: list[bool]
    sites: Sites
    facts: dict[Any, Any] = field(default_factory=dict)


class PlannedPairs(OnDemand[Pair]):
    """The pairs of a step. A pair is made when it is looked at.

    Args:
        step: the step's number.
        records: of both sides.
        scales: what each side's loss was scaled by.
        columns: what is paired like.
        made: the pairs, where they are made already.

    Attributes:
        records, columns: likewise.
        unscaled: whether no pair is divided by a scale.
    """

    def __init__(
        self,
        step: int,
        records: Both[Structured],
        scales: Both[float],
        columns: PairColumns,
        made: Iterable[Pair] = (),
    ) -> None:
        self._step, self.records, self.columns = step, records, columns
        self._scales = UNSCALED if scales == UNSCALED else scales
        self.unscaled = self._scales is UNSCALED or not any(columns.scaled)
        self._made: list[Pair | None] = list(made) or [None] * len(columns.optional)

    @property
    def sites(self) -> Sites:
        """What they are."""
        return self.columns.sites

    @property
    def tabled(self) -> bool:
        """Whether the sketches of both sides lie in tables; not where steps were put together of several."""
        return all(side.table is not None for side in self.records)

    def fact(self, find: Callable[[PlannedPairs], _Fact]) -> _Fact:
        """What a function finds out from the pairs, but for their values; of steps alike it is called once."""
        return once(self.columns.facts, find, lambda: self)

    @property
    def scales(self) -> list[Both[float]]:
        """What both sides of each are divided by."""
        return [self._scales_of(scaled) for scaled in self.columns.scaled]

    def _scales_of(self, scaled: bool) -> Both[float]:
        return self._scales if scaled else UNSCALED

    def _at(self, place: int) -> Pair:
        found = self._made[place]
        if found is None:
            own, (a, b) = self.columns, self.records
            one, other = own.references[place], own.candidates[place]
            found = self._made[place] = Pair(
                self._step,
                a[one] if one is not None else None,
                b[other] if other is not None else None,
                own.layouts[place],
                self._scales_of(own.scaled[place]),
                own.optional[place],
            )
        return found

    def __len__(self) -> int:
        return len(self._made)


def sites_of(pairs: Sequence[Pair]) -> Sites:
    """What pairs are."""
    return pairs.sites if isinstance(pairs, PlannedPairs) else Sites.of(pairs)


def of_called(
    pairs: PlannedPairs, find: Callable[[Record], _Fact]
) -> Iterator[tuple[_Fact | None, _Fact | None]] | None:
    """What a function finds out from both records of each pair, which it is to ask what they are called and nothing
    else (`padiff.records.structured.called`); `None` where records have to be looked at for that. Of records that both
    sides call the same it finds it out once.
    """
    a, b = pairs.records.map(called)
    if a is pairs.records.reference or b is pairs.records.candidate:
        return None
    ours = [find(record) for record in a]
    theirs = ours if b is a else [find(record) for record in b]
    places = zip(pairs.columns.references, pairs.columns.candidates)
    return ((None if one is None else ours[one], None if other is None else theirs[other]) for one, other in places)


def layouts_of(pairs: Sequence[Pair]) -> Sequence[Layout]:
    """The layouts of pairs."""
    return pairs.columns.layouts if isinstance(pairs, PlannedPairs) else [pair.layout for pair in pairs]


def fact_of_pairs(pairs: Sequence[Pair], find: Callable[[Sequence[Pair]], _Fact]) -> _Fact:
    """What a function finds out from pairs, but for their values; of steps alike it is called once."""
    return pairs.fact(find) if isinstance(pairs, PlannedPairs) else find(pairs)


def records_of(pairs: PlannedPairs) -> Both[np.ndarray]:
    """The places of planned pairs' records in their steps; -1: a side has none."""
    own = pairs.columns
    return Both(own.references, own.candidates).map(
        lambda side: np.array([-1 if place is None else place for place in side], np.intp)
    )


def sketch_rows(pairs: PlannedPairs) -> Both[np.ndarray]:
    """Where the sketches of planned pairs are in their steps' tables, where there are tables; -1: a side has none."""

    def rows(side: tuple[np.ndarray, Structured]) -> np.ndarray:
        places, records = side
        assert records.sketches is not None
        found, there = np.full(len(places), -1, np.intp), places >= 0
        found[there] = records.sketches.rows[places[there]]
        return found

    return pairs.fact(records_of).zip(pairs.records).map(rows)
