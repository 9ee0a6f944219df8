"""Records and traces of steps that are alike: what they are is known from the step before, only values are new.

A training does the same in nearly every step. What holds for all of these (names, shapes, which calls there were, the
order of it all) is kept once, as a `Pattern`; a step adds its samples, and the few tensors that are more than samples.
Records are made of it when somebody looks at them: a writer, which puts the same into every step's file, need not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from padiff.records.parts import Part
from padiff.records.recorded import Record, Step
from padiff.records.sources import Sketched, TensorSource
from padiff.records.traces import TracedCall, TracedTensor
from padiff.sketches.samples import Samples

_Thing = TypeVar("_Thing")

#: In the place of a sample's number: there is none.
NO_SAMPLE = -1


class Site(NamedTuple):
    """What a record is, but for its values and its place among the others; as `Record` has it.

    Attributes:
        transposed: whether a sketch of it is of the transposed matrix.
        part: which part of the tensor it is; `None`: all of it.
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
    """What a tensor of a trace is, but for its values."""

    dtype: str
    shape: tuple[int, ...]
    transposed: bool


@dataclass(eq=False, slots=True)
class Pattern:
    """What the records and the trace of steps that are alike are, but for their values: the same object for all.

    Attributes:
        sites: of the records, in their order.
        numbers: each record's sample; `NO_SAMPLE` where it is something else.
        traced: the tensors of the trace.
        traced_numbers: likewise.
        calls: those of the trace.
        like: the pattern before, where nothing is another but the numbers of samples; `None`: more is.
    """

    sites: Sequence[Site]
    numbers: Sequence[int]
    traced: Sequence[TracedSite]
    traced_numbers: Sequence[int]
    calls: Sequence[TracedCall]
    like: Pattern | None = None

    def same_as(self, sites: Sequence[Site], numbers: Sequence[int], traced_numbers: Sequence[int]) -> bool:
        """Whether another step, whose traced tensors are the same, has the same records, and samples in their order."""
        return self.numbers == numbers and self.sites == sites and self.traced_numbers == traced_numbers

    def renumbered(self, numbers: Sequence[int], traced_numbers: Sequence[int]) -> Pattern:
        """The pattern of a step that is like this one but for the numbers of its samples."""
        self.like = None  # or all that ever were would be kept
        return Pattern(self.sites, numbers, self.traced, traced_numbers, self.calls, self)

    def new_numbers(self, other: Pattern) -> dict[int, int] | None:
        """By the numbers of samples here, those there; `None` where what is one here is not one there."""
        pairs = {*zip(self.numbers, other.numbers), *zip(self.traced_numbers, other.traced_numbers)}
        found = dict(pairs)
        return found if len(found) == len(pairs) == len({*found.values()}) else None


class Alike(Sequence[_Thing], Generic[_Thing]):
    """The records, or the traced tensors, of a step that follows a pattern; made when they are looked at.

    Args:
        pattern: what the step is like.
        samples: the step's own.
        others: by their places, the sources of what is more than a sample.
        make: makes one, given its place and its source.

    Attributes:
        pattern, samples, others: likewise.
    """

    __slots__ = ("_made", "_make", "_numbers", "others", "pattern", "samples")

    def __init__(
        self,
        pattern: Pattern,
        samples: Samples,
        numbers: Sequence[int],
        others: Mapping[int, TensorSource],
        make: Callable[[Pattern, int, Samples, int, TensorSource | None], _Thing],
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

    @property
    def arrays(self) -> Iterator[np.ndarray]:
        """The arrays in memory that hold values, but for samples."""
        for source in self.others.values():
            yield from source.arrays

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: Any) -> Any:
        return self._all()[key]

    def __iter__(self) -> Iterator[_Thing]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Alike) else other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._all(),)


def alike(
    pattern: Pattern, samples: Samples, others: Mapping[int, TensorSource], traced: Mapping[int, TensorSource]
) -> tuple[Alike[Record], Alike[TracedTensor]]:
    """The records and the traced tensors of a step that follows a pattern.

    Args:
        others: by the places of records, the sources of what is more than a sample.
        traced: likewise of the traced tensors.
    """
    return (
        Alike(pattern, samples, pattern.numbers, others, _record),
        Alike(pattern, samples, pattern.traced_numbers, traced, _traced),
    )


def sketched(
    samples: Samples,
    number: int,
    dtype: str,
    shape: tuple[int, ...],
    transposed: bool = False,
    part: Part | None = None,
) -> Sketched:
    """The source of a sample of a tensor; of a part of one, it is the whole's with zeros where others' elements are."""
    return Sketched((samples, number), numbers_of(dtype, shape, part), transposed)


def numbers_of(dtype: str, shape: tuple[int, ...], part: Part | None = None) -> int:
    """How many numbers a sketch of a tensor stands for. Real and imaginary parts are numbers of their own."""
    return math.prod(shape if part is None else part.shape) * (2 if dtype.startswith("complex") else 1)


def _record(pattern: Pattern, order: int, samples: Samples, number: int, other: TensorSource | None) -> Record:
    layer, layer_type, stage, slot, dtype, shape, call, _, transposed, part = pattern.sites[order]
    source = sketched(samples, number, dtype, shape, transposed, part) if other is None else other
    return Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, part=part)


def _traced(pattern: Pattern, place: int, samples: Samples, number: int, other: TensorSource | None) -> TracedTensor:
    dtype, shape, transposed = pattern.traced[place]
    if other is None and number != NO_SAMPLE:
        other = sketched(samples, number, dtype, shape, transposed)
    return TracedTensor(other, dtype, shape)


def sources_of(step: Step) -> Iterator[TensorSource]:
    """Where the values of all that a step holds are; some may come more than once."""
    for record in step.records:
        yield record.source
    for tensor in step.trace.tensors:
        if tensor.source is not None:
            yield tensor.source


def make_sketches(step: Step) -> None:
    """Make what is still to be made of a step's sketches, and let the samples go."""
    samples: dict[int, Samples] = {}
    for each in _parts(step):
        if isinstance(each, Alike):
            samples[id(each.samples)] = each.samples
        elif isinstance(each, Sketched) and each.sample is not None:
            samples[id(each.sample[0])] = each.sample[0]
    for some in samples.values():
        some.close()


def arrays_of(step: Step) -> Iterator[np.ndarray]:
    """The arrays in memory that hold a step's values, but for samples; some may come more than once."""
    for each in _parts(step):
        yield from each.arrays


def _parts(step: Step) -> Iterator[Alike[Any] | TensorSource]:
    """What a step's values are made of."""
    if isinstance(step.records, Alike):
        yield step.records
    else:
        yield from (record.source for record in step.records)
    if isinstance(step.trace.tensors, Alike):
        yield step.trace.tensors
    else:
        yield from (tensor.source for tensor in step.trace.tensors if tensor.source is not None)
