"""A pair of values: one for the reference, one for the candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from padiff.records.frozen import fast_frozen_init

T = TypeVar("T", covariant=True)
S = TypeVar("S")
U = TypeVar("U")


@fast_frozen_init
@dataclass(frozen=True, slots=True)
class Both(Generic[T]):
    """A value of the reference and a value of the candidate; iteration yields the reference's first.

    Example:
        ``paths = Both("runs/torch", "runs/paddle"); runs = paths.map(open_run); runs.reference.numbers()``.
    """

    reference: T
    candidate: T

    def map(self, f: Callable[[T], U]) -> Both[U]:
        """Return the results of a function called with each side."""
        return Both(f(self.reference), f(self.candidate))

    def zip(self, other: Both[U]) -> Both[tuple[T, U]]:
        """Return each side as a tuple with the same side of another pair."""
        return Both((self.reference, other.reference), (self.candidate, other.candidate))

    def swapped(self, when: bool = True) -> Both[T]:
        """Return the pair with its sides exchanged; the pair itself if `when` is False."""
        return Both(self.candidate, self.reference) if when else self

    def __iter__(self) -> Iterator[T]:
        return iter((self.reference, self.candidate))


def unzipped(pairs: Iterable[Both[S]]) -> Both[list[S]]:
    """Return a pair of lists from many pairs: all values of the reference, all values of the candidate."""
    pairs = list(pairs)
    return Both([pair.reference for pair in pairs], [pair.candidate for pair in pairs])


#: Names of the two sides.
SIDES = Both("reference", "candidate")
