"""The records of a step that was read, and what they are called: the same object for all steps that are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from padiff.records.facts import once
from padiff.records.on_demand import OnDemand
from padiff.records.recorded import Record

_Fact = TypeVar("_Fact")


class Sketches(NamedTuple):
    """The sketches of a step's records, as far as steps alike have them in common; an element for each record.

    Attributes:
        rows: where it is in the step's table; -1 of what is no sketch.
        sizes: how many numbers the tensor has.
        transposed: whether the sketch is of the transposed matrix.
        shapes: the tensor's.
    """

    rows: np.ndarray
    sizes: np.ndarray
    transposed: np.ndarray
    shapes: list[tuple[int, ...]]


class Structured(OnDemand[Record]):
    """Records of a step, in their order.

    Args:
        records: they; `None` where one is made when it is looked at.
        structure: what they are but for their values: names, dtypes, shapes, how each is kept, and which of them are
            one tensor. Steps whose structure is the same object, or equal tuples of such objects, have the same records
            in the same places. Where it has ``names``, steps of the same ones have records that are called the same,
            however they are kept.
        make: makes a record, given its place.
        sketches: where those are that lie in the step's table.
        table: the step's sketches. None: it has none in common.

    Attributes:
        structure, sketches, table: likewise.
    """

    def __init__(
        self,
        records: Iterable[Record | None],
        structure: object,
        make: Callable[[int], Record] | None = None,
        sketches: Sketches | None = None,
        table: np.ndarray | None = None,
    ) -> None:
        self._made, self._make = list(records), make
        self.structure, self.sketches, self.table = structure, sketches, table

    @property
    def names(self) -> object:
        """What the records are called: the same object for steps whose records are called the same."""
        return getattr(self.structure, "names", self.structure)

    def fact(self, find: Callable[[Structured], _Fact]) -> _Fact:
        """What a function finds out from what the records are called; of steps that call theirs the same it is called
        once.
        """
        facts: dict[Any, Any] | None = getattr(self.names, "facts", None)
        return find(self) if facts is None else once(facts, find, self)

    def rows_of(self, rows: np.ndarray) -> np.ndarray:
        """Some rows of the table of sketches."""
        assert self.table is not None
        return np.asarray(self.table[rows])

    def _at(self, place: int) -> Record:
        found = self._made[place]
        if found is None:
            assert self._make is not None
            found = self._made[place] = self._make(place)
        return found

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # in another process nothing else is of this structure


def fact_of(records: Sequence[Record], find: Callable[[Sequence[Record]], _Fact]) -> _Fact:
    """What a function finds out from what the records of a step are called; of steps alike it is called once."""
    return records.fact(find) if isinstance(records, Structured) else find(records)
