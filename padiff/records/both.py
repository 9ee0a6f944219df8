"""Both sides of a comparison in one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from padiff.records.frozen import quickly_made

T = TypeVar("T", covariant=True)
S = TypeVar("S")
U = TypeVar("U")


@quickly_made
@dataclass(frozen=True, slots=True)
class Both(Generic[T]):
    """What there is of the reference and of the candidate; iterating gives the reference's first.

    Example:
        ``paths = Both("runs/torch", "runs/paddle"); runs = paths.map(open_run); runs.reference.numbers()``.
    """

    reference: T
    candidate: T

    def map(self, f: Callable[[T], U]) -> Both[U]:
        """What a function makes of either side."""
        return Both(f(self.reference), f(self.candidate))

    def zip(self, other: Both[U]) -> Both[tuple[T, U]]:
        """Each side with the other value's same side."""
        return Both((self.reference, other.reference), (self.candidate, other.candidate))

    def swapped(self, when: bool = True) -> Both[T]:
        """The candidate's in the reference's place, and the other way round."""
        return Both(self.candidate, self.reference) if when else self

    def __iter__(self) -> Iterator[T]:
        return iter((self.reference, self.candidate))


def unzipped(pairs: Iterable[Both[S]]) -> Both[list[S]]:
    """Of many pairs, what stands on either side."""
    pairs = list(pairs)
    return Both([pair.reference for pair in pairs], [pair.candidate for pair in pairs])


#: What the two sides are called.
SIDES = Both("reference", "candidate")
