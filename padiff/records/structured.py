"""The records of a step that was read, and what they are called: the same object for all steps that are alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from padiff.records.facts import once
from padiff.records.on_demand import OnDemand
from padiff.records.parts import Part
from padiff.records.recorded import Record
from padiff.records.sources import TensorSource

_Fact = TypeVar("_Fact")

#: What a record is called, as `Record` has it (layer, stage, slot, call, layer type, dtype, shape, whether it is
#: recomputed), how many numbers it has, of a part the whole (a complex one is two), and which part it is. A plain
#: tuple, which the garbage collector need not look at again and again: they are kept, and of many layers they are many.
Name: TypeAlias = tuple[str, str, str, int, str, str, tuple[int, ...], bool, int, Part | None]


class Names:
    """What the records of a step are called: one object for all structures that say the same of it.

    Attributes:
        entries: one for each record.
        facts: what was found out from the records (`Structured.fact`).
    """

    __slots__ = ("__weakref__", "_records", "entries", "facts")

    def __init__(self, entries: list[Name]) -> None:
        self.entries, self.facts = entries, dict[Any, Any]()
        #: They, as long as somebody has them.
        self._records: weakref.ref[_NamedRecords] | None = None

    def records(self) -> Sequence[Record]:
        """The records, without values: those raise `AskedError`."""
        found = None if self._records is None else self._records()
        if found is None:
            found = _NamedRecords(self.entries)
            self._records = weakref.ref(found)
        return found


class AskedError(Exception):
    """A record that is to be asked what it is called alone was asked for its values, or for what was kept of them."""


class _Nowhere(TensorSource):
    """Stands for values that nobody must ask for."""

    __slots__ = ()

    def read(self) -> np.ndarray:
        raise AskedError

    @property
    def sketched(self) -> bool:
        raise AskedError

    @property
    def identity(self) -> Hashable:
        raise AskedError


_NOWHERE = _Nowhere()


class _NamedRecords(list[Record]):
    """Records without values. (A list that can be referred to weakly.)"""

    __slots__ = ("__weakref__",)

    def __init__(self, entries: Iterable[Name]) -> None:
        super().__init__(
            Record(layer, stage, slot, _NOWHERE, dtype, shape, call, order, layer_type, recomputed, part)
            for order, (layer, stage, slot, call, layer_type, dtype, shape, recomputed, _, part) in enumerate(entries)
        )


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


class Tensors(Protocol):
    """The tensors in full of a step's records that lie in one file.

    Attributes:
        there: of which records; an element for each.
    """

    there: np.ndarray

    def table(self, places: np.ndarray, dtype: np.dtype[Any], size: int) -> np.ndarray | None:
        """Some of them, of one dtype and size, as the rows of a table, in one read; `None` where each is to be read by
        itself.
        """


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
        tensors: those tensors in full that can be read together.

    Attributes:
        structure, sketches, table, tensors: likewise.
    """

    def __init__(
        self,
        records: Iterable[Record | None],
        structure: object,
        make: Callable[[int], Record] | None = None,
        sketches: Sketches | None = None,
        table: np.ndarray | None = None,
        tensors: Tensors | None = None,
    ) -> None:
        self._made, self._make = list(records), make
        self._called: Sequence[Record] | None = None
        self.structure, self.sketches, self.table, self.tensors = structure, sketches, table, tensors

    @property
    def names(self) -> object:
        """What the records are called: the same object for steps whose records are called the same."""
        return getattr(self.structure, "names", self.structure)

    @property
    def called(self) -> Sequence[Record]:
        """See `called`."""
        if self._called is None and isinstance(self.names, Names):
            self._called = self.names.records()
        return self if self._called is None else self._called

    def fact(self, find: Callable[[Sequence[Record]], _Fact]) -> _Fact:
        """What a function finds out from what the records are called (`called`); of steps that call theirs the same it
        is called once.
        """
        facts: dict[Any, Any] | None = getattr(self.names, "facts", None)
        return find(self) if facts is None else once(facts, find, lambda: self.called)

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


def called(records: Sequence[Record]) -> Sequence[Record]:
    """Records of a step, to be asked what they are called and nothing else: where that is known of itself none of the
    step's own is made, and steps alike share them. Their values raise `AskedError`.
    """
    return records.called if isinstance(records, Structured) else records


def fact_of(records: Sequence[Record], find: Callable[[Sequence[Record]], _Fact]) -> _Fact:
    """What a function finds out from what the records of a step are called; of steps alike it is called once."""
    return records.fact(find) if isinstance(records, Structured) else find(records)
