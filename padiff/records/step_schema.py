"""Records and traces of steps that share a schema: stored once, each step stores only its values."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from padiff.records.both import LazySequence, memoize
from padiff.records.recorded import Part, Record, Step
from padiff.records.sources import Sketched, TensorSource
from padiff.records.traces import TracedCall, TracedTensor
from padiff.sketches.samples import Samples

_Thing = TypeVar("_Thing")

#: Sample number of a tensor that has no sample.
NO_SAMPLE = -1


class Site(NamedTuple):
    """Description of a record without its values and its position; the fields are those of `Record`.

    Attributes:
        transposed: True if a sketch of the tensor is a sketch of the transposed matrix.
        part: the part of the tensor that is recorded; `None`: all of it.
    """

    layer: str
    layer_type: str
    stage: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    call: int
    training: bool
    transposed: bool
    part: Part | None = None


class TracedSite(NamedTuple):
    """Description of a traced tensor without its values."""

    dtype: str
    shape: tuple[int, ...]
    transposed: bool


@dataclass(eq=False, slots=True)
class StepSchema:
    """Schema of the records and the trace of steps that differ in values only: one object for all of these steps.

    Attributes:
        sites: descriptions of the records, in order.
        numbers: number of each record's sample; `NO_SAMPLE` for a record that is stored as something else.
        traced: descriptions of the traced tensors, in order.
        traced_numbers: number of each traced tensor's sample; `NO_SAMPLE` for a tensor without one.
        calls: the traced calls.
    """

    sites: Sequence[Site]
    numbers: Sequence[int]
    traced: Sequence[TracedSite]
    traced_numbers: Sequence[int]
    calls: Sequence[TracedCall]

    def same_as(self, sites: Sequence[Site], numbers: Sequence[int], traced_numbers: Sequence[int]) -> bool:
        """Return True if a step has the same records, and its samples in the same order.

        The caller has checked that the traced tensors are the same.
        """
        return self.numbers == numbers and self.sites == sites and self.traced_numbers == traced_numbers


class LazyRecords(Sequence[_Thing], Generic[_Thing]):
    """The records, or the traced tensors, of a step that follows a pattern; created on first access.

    Args:
        pattern: the schema of the step.
        samples: the samples of the step.
        numbers: number of each element's sample.
        others: sources of the elements that are stored as more than a sample, by position.
        make: creates one element from the pattern, its position, the samples, its sample number, and its source.

    Attributes:
        pattern, samples, others: the arguments of the same names.
    """

    __slots__ = ("_made", "_make", "_numbers", "others", "pattern", "samples")

    def __init__(
        self,
        pattern: StepSchema,
        samples: Samples,
        numbers: Sequence[int],
        others: Mapping[int, TensorSource],
        make: Callable[[StepSchema, int, Samples, int, TensorSource | None], _Thing],
    ) -> None:
        self.pattern, self.samples, self.others = pattern, samples, others
        self._numbers, self._make = numbers, make
        self._made: tuple[_Thing, ...] | None = None

    def _all(self) -> tuple[_Thing, ...]:
        if self._made is None:
            make, pattern, samples, others = self._make, self.pattern, self.samples, self.others
            self._made = tuple(
                [make(pattern, place, samples, number, others.get(place)) for place, number in enumerate(self._numbers)]
            )
        return self._made

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: Any) -> Any:
        return self._all()[key]

    def __iter__(self) -> Iterator[_Thing]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, LazyRecords) else other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._all(),)


def lazy_records(
    pattern: StepSchema, samples: Samples, others: Mapping[int, TensorSource], traced: Mapping[int, TensorSource]
) -> tuple[LazyRecords[Record], LazyRecords[TracedTensor]]:
    """Return the records and the traced tensors of a step that follows a pattern.

    Args:
        others: sources of records that are stored as more than a sample, by position.
        traced: sources of traced tensors that are stored as more than a sample, by position.
    """
    return (
        LazyRecords(pattern, samples, pattern.numbers, others, _record),
        LazyRecords(pattern, samples, pattern.traced_numbers, traced, _traced),
    )


def sketched(
    samples: Samples,
    number: int,
    dtype: str,
    shape: tuple[int, ...],
    transposed: bool = False,
    part: Part | None = None,
) -> Sketched:
    """Return the source of a tensor that is stored as a sample.

    The sample of a part is a sample of the whole tensor with zeros in place of the elements of other processes.
    """
    return Sketched((samples, number), numbers_of(dtype, shape, part), transposed)


def numbers_of(dtype: str, shape: tuple[int, ...], part: Part | None = None) -> int:
    """Return how many numbers a sketch of a tensor stands for; real and imaginary parts count separately."""
    return math.prod(shape if part is None else part.shape) * (2 if dtype.startswith("complex") else 1)


def _record(pattern: StepSchema, order: int, samples: Samples, number: int, full: TensorSource | None) -> Record:
    layer, layer_type, stage, slot, dtype, shape, call, _, transposed, part = pattern.sites[order]
    source = sketched(samples, number, dtype, shape, transposed, part) if full is None else full
    return Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, part=part)


def _traced(pattern: StepSchema, place: int, samples: Samples, number: int, full: TensorSource | None) -> TracedTensor:
    dtype, shape, transposed = pattern.traced[place]
    if full is None and number != NO_SAMPLE:
        full = sketched(samples, number, dtype, shape, transposed)
    return TracedTensor(full, dtype, shape)


def sources_of(step: Step) -> Iterator[TensorSource]:
    """Yield the sources of all records and traced tensors of a step; a source may come more than once."""
    for record in step.records:
        yield record.source
    for tensor in step.trace.tensors:
        if tensor.source is not None:
            yield tensor.source


def make_sketches(step: Step) -> None:
    """Compute the sketches of a step that are still due, and release its samples."""
    samples: dict[int, Samples] = {}
    for each in _parts(step):
        if isinstance(each, LazyRecords):
            samples[id(each.samples)] = each.samples
        elif isinstance(each, Sketched) and each.sample is not None:
            samples[id(each.sample[0])] = each.sample[0]
    for sample in samples.values():
        sample.close()


def _parts(step: Step) -> Iterator[LazyRecords[Any] | TensorSource]:
    """Yield the sequences and sources that hold a step's values."""
    if isinstance(step.records, LazyRecords):
        yield step.records
    else:
        yield from (record.source for record in step.records)
    if isinstance(step.trace.tensors, LazyRecords):
        yield step.trace.tensors
    else:
        yield from (tensor.source for tensor in step.trace.tensors if tensor.source is not None)


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

    Attributes:
        structure, sketches, table: the arguments of the same names.
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
        self._called: Sequence[Record] | None = None
        self.structure, self.sketches, self.table = structure, sketches, table

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
