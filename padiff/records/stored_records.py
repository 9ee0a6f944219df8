"""Records of a step that was read from a folder, with descriptions that steps of the same schema share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from padiff.records.lazy_sequence import LazySequence
from padiff.records.memoization import memoize
from padiff.records.parts import Part
from padiff.records.recorded import Record
from padiff.records.sources import TensorSource

_Fact = TypeVar("_Fact")

#: Description of a record: layer, stage, slot, call, layer type, dtype, shape, `recomputed` (all as in `Record`), how
#: many numbers the full tensor has (a complex number counts as two), and its part. A plain tuple of plain values, as
#: the garbage collector then stops tracking it; models with many layers have many of them, and they live long.
Name: TypeAlias = tuple[str, str, str, int, str, str, tuple[int, ...], bool, int, Part | None]


class Names:
    """Descriptions of a step's records: one object for all schemas that have equal descriptions.

    Attributes:
        entries: the description of each record.
        facts: cached results of functions of the records (`StoredRecords.fact`).
    """

    __slots__ = ("__weakref__", "_records", "entries", "facts")

    def __init__(self, entries: list[Name]) -> None:
        self.entries, self.facts = entries, dict[Any, Any]()
        #: The records without values, while they are in use.
        self._records: weakref.ref[_NamedRecords] | None = None

    def records(self) -> Sequence[Record]:
        """Return the records without values; an access to a value raises `ValuesNotLoadedError`."""
        records = None if self._records is None else self._records()
        if records is None:
            records = _NamedRecords(self.entries)
            self._records = weakref.ref(records)
        return records


class ValuesNotLoadedError(Exception):
    """Raised when code reads the values of a record that has a description only."""


class _Nowhere(TensorSource):
    """Source of a record without values; every access raises `ValuesNotLoadedError`."""

    __slots__ = ()

    def read(self) -> np.ndarray:
        raise ValuesNotLoadedError

    def _not_loaded(self) -> Any:
        raise ValuesNotLoadedError

    sketched = identity = property(_not_loaded)


_NOWHERE = _Nowhere()


class _NamedRecords(list[Record]):
    """Records without values, as a list that supports weak references."""

    __slots__ = ("__weakref__",)

    def __init__(self, entries: Iterable[Name]) -> None:
        super().__init__(
            Record(layer, stage, slot, _NOWHERE, dtype, shape, call, order, layer_type, recomputed, part)
            for order, (layer, stage, slot, call, layer_type, dtype, shape, recomputed, _, part) in enumerate(entries)
        )


class Sketches(NamedTuple):
    """Schema of a step's sketches, with an element for each record.

    Attributes:
        rows: row in the step's table of sketches; -1 for a record without a sketch.
        sizes: number of numbers in the tensor.
        transposed: True if the sketch is of the transposed matrix.
        shapes: shape of the tensor.
    """

    rows: np.ndarray
    sizes: np.ndarray
    transposed: np.ndarray
    shapes: list[tuple[int, ...]]


class Tensors(Protocol):
    """Full tensors of a step's records that are stored in one file.

    Attributes:
        there: mask of the records that have such a tensor.
    """

    there: np.ndarray

    def table(self, places: np.ndarray, dtype: np.dtype[Any], size: int) -> np.ndarray | None:
        """Return tensors of one dtype and size as rows of one array, in one read; `None` if each must be read
        separately.
        """


class StoredRecords(LazySequence[Record]):
    """Records of a step, in order.

    Args:
        records: the records; `None` for a record that is created on access.
        structure: schema of the records: names, dtypes, shapes, form of storage, and which records share one tensor.
            Steps whose structure is the same object, or equal tuples of such objects, have the same records at the same
            positions. If the structure has ``names``, steps with the same names have records with equal descriptions,
            in any form of storage.
        make: creates the record at a position.
        sketches: positions of the sketches in the table.
        table: the step's table of sketches; `None` if the step has none.
        tensors: full tensors that can be read together.

    Attributes:
        structure, sketches, table, tensors: the arguments of the same names.
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
        """Return the descriptions of the records: one object for steps whose records have equal descriptions."""
        return getattr(self.structure, "names", self.structure)

    @property
    def without_values(self) -> Sequence[Record]:
        """Return the records for access to their descriptions only; see `without_values`."""
        if self._called is None and isinstance(self.names, Names):
            self._called = self.names.records()
        return self if self._called is None else self._called

    def fact(self, find: Callable[[Sequence[Record]], _Fact]) -> _Fact:
        """Return the result of a function of the records' descriptions; cached for all steps with equal
        descriptions.
        """
        facts: dict[Any, Any] | None = getattr(self.names, "facts", None)
        return find(self) if facts is None else memoize(facts, find, lambda: self.without_values)

    def rows_of(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of the table of sketches."""
        assert self.table is not None
        return np.asarray(self.table[rows])

    def _at(self, place: int) -> Record:
        record = self._made[place]
        if record is None:
            assert self._make is not None
            record = self._made[place] = self._make(place)
        return record

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # another process has no other steps to share the schema with


def without_values(records: Sequence[Record]) -> Sequence[Record]:
    """Return a step's records for access to their descriptions only.

    Steps with equal descriptions share these records, so that none of the step's own records is created. An access to a
    value may raise `ValuesNotLoadedError`.
    """
    return records.without_values if isinstance(records, StoredRecords) else records


def fact_of(records: Sequence[Record], find: Callable[[Sequence[Record]], _Fact]) -> _Fact:
    """Return the result of a function of the records' descriptions; cached for all steps with equal descriptions."""
    return records.fact(find) if isinstance(records, StoredRecords) else find(records)
