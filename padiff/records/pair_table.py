"""Pairs of a step whose pairing is reused from an earlier step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from padiff.records.both import Both
from padiff.records.compared import UNSCALED, Pair
from padiff.records.layout import Layout
from padiff.records.lazy_sequence import LazySequence
from padiff.records.memoization import memoize
from padiff.records.pair_schema import PairSchema
from padiff.records.recorded import Record
from padiff.records.stored_records import StoredRecords, without_values

_Fact = TypeVar("_Fact")


@dataclass(eq=False, slots=True)
class PairColumns:
    """The pairs that steps of two schemas share, as columns. (An object per pair would cost much memory for many
    layers.)

    Attributes:
        references, candidates: positions of the two records in their steps; `None` if that side has none.
        layouts, optional, derived: the fields of `Pair`, one element for each pair.
        scaled: True if both sides are divided by their steps' loss scales.
        sites: description of the pairs.
        facts: cached results of functions of the pairs (`PairTable.fact`).
    """

    references: list[int | None]
    candidates: list[int | None]
    layouts: list[Layout]
    scaled: list[bool]
    optional: list[bool]
    derived: list[bool]
    sites: PairSchema
    facts: dict[Any, Any] = field(default_factory=dict)


class PairTable(LazySequence[Pair]):
    """The pairs of a step. Each `Pair` is created on first access.

    Args:
        step: the step's number.
        records: records of both sides.
        scales: loss scale of each side.
        columns: the pairing.
        made: the pairs, if they exist already.

    Attributes:
        records, columns: the arguments of the same names.
        unscaled: True if no pair is divided by a scale.
    """

    def __init__(
        self,
        step: int,
        records: Both[StoredRecords],
        scales: Both[float],
        columns: PairColumns,
        made: Iterable[Pair] = (),
    ) -> None:
        self._step, self.records, self.columns = step, records, columns
        self._scales = UNSCALED if scales == UNSCALED else scales
        self.unscaled = self._scales is UNSCALED or not any(columns.scaled)
        self._made: list[Pair | None] = list(made) or [None] * len(columns.optional)

    @property
    def sites(self) -> PairSchema:
        """Return the description of the pairs."""
        return self.columns.sites

    @property
    def tabled(self) -> bool:
        """Return True if the sketches of both sides are in tables; False for a step that was joined from several
        ranks.
        """
        return all(side.table is not None for side in self.records)

    def fact(self, find: Callable[[PairTable], _Fact]) -> _Fact:
        """Return the result of a function of the pairs that does not read values; cached for all steps with this
        pairing.
        """
        return memoize(self.columns.facts, find, lambda: self)

    @property
    def scales(self) -> list[Both[float]]:
        """Return the divisors of each pair's two sides."""
        return [self._scales_of(scaled) for scaled in self.columns.scaled]

    def _scales_of(self, scaled: bool) -> Both[float]:
        return self._scales if scaled else UNSCALED

    def _at(self, place: int) -> Pair:
        pair = self._made[place]
        if pair is None:
            columns, (a, b) = self.columns, self.records
            reference, candidate = columns.references[place], columns.candidates[place]
            pair = self._made[place] = Pair(
                self._step,
                a[reference] if reference is not None else None,
                b[candidate] if candidate is not None else None,
                columns.layouts[place],
                self._scales_of(columns.scaled[place]),
                columns.optional[place],
                columns.derived[place],
            )
        return pair

    def __len__(self) -> int:
        return len(self._made)


def pair_schema_of(pairs: Sequence[Pair]) -> PairSchema:
    """Return the description of pairs."""
    return pairs.sites if isinstance(pairs, PairTable) else PairSchema.from_pairs(pairs)


def of_called(pairs: PairTable, find: Callable[[Record], _Fact]) -> Iterator[tuple[_Fact | None, _Fact | None]] | None:
    """Return the results of a function for both records of each pair, computed from records without values.

    The function may read a record's description only (`padiff.records.stored_records.without_values`). If both sides
    share their descriptions, the function is called once for both.

    Returns:
        An iterator, or `None` if a side has no shared descriptions, so that its records would have to be read.
    """
    a, b = pairs.records.map(without_values)
    if a is pairs.records.reference or b is pairs.records.candidate:
        return None
    ours = [find(record) for record in a]
    theirs = ours if b is a else [find(record) for record in b]
    places = zip(pairs.columns.references, pairs.columns.candidates)
    return ((None if i is None else ours[i], None if j is None else theirs[j]) for i, j in places)


def layouts_of(pairs: Sequence[Pair]) -> Sequence[Layout]:
    """Return the layouts of pairs."""
    return pairs.columns.layouts if isinstance(pairs, PairTable) else [pair.layout for pair in pairs]


def fact_of_pairs(pairs: Sequence[Pair], find: Callable[[Sequence[Pair]], _Fact]) -> _Fact:
    """Return the result of a function of the pairs that does not read values; cached for steps with the same
    pairing.
    """
    return pairs.fact(find) if isinstance(pairs, PairTable) else find(pairs)


def records_of(pairs: PairTable) -> Both[np.ndarray]:
    """Return the positions of both sides' records in their steps; -1 if a side has none."""
    columns = pairs.columns
    return Both(columns.references, columns.candidates).map(
        lambda side: np.array([-1 if place is None else place for place in side], np.intp)
    )


def sketch_rows(pairs: PairTable) -> Both[np.ndarray]:
    """Return the rows of both sides' sketches in their steps' tables; -1 if a side has none."""

    def rows(side: tuple[np.ndarray, StoredRecords]) -> np.ndarray:
        places, records = side
        assert records.sketches is not None
        numbers, present = np.full(len(places), -1, np.intp), places >= 0
        numbers[present] = records.sketches.rows[places[present]]
        return numbers

    return pairs.fact(records_of).zip(pairs.records).map(rows)
