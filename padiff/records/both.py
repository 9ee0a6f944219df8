"""Values that everything stands on: pairs of values, sequences made on access."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T", covariant=True)
S = TypeVar("S")
U = TypeVar("U")


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


_Thing = TypeVar("_Thing")


class LazySequence(Sequence[_Thing], ABC):
    """A sequence whose elements are created on access; equal to any other sequence with equal elements."""

    @abstractmethod
    def _at(self, place: int) -> _Thing:
        """Return the element at a position, counted from 0."""

    @overload
    def __getitem__(self, key: int) -> _Thing: ...

    @overload
    def __getitem__(self, key: slice) -> Sequence[_Thing]: ...

    def __getitem__(self, key: int | slice) -> _Thing | Sequence[_Thing]:
        places = range(len(self))[key]  # raises IndexError, and resolves negative indexes
        return self._at(places) if isinstance(places, int) else tuple(map(self._at, places))

    def __iter__(self) -> Iterator[_Thing]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


class ChainedSequence(LazySequence[_Thing]):
    """Several sequences chained into one; their elements are not accessed before this sequence's are."""

    def __init__(self, parts: Iterable[Sequence[_Thing]]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(map(len, self._parts)))

    def _at(self, place: int) -> _Thing:
        number = bisect_right(self._ends, place)
        part = self._parts[number]
        return part[place - self._ends[number] + len(part)]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[_Thing]:
        return chain.from_iterable(self._parts)


_Fact = TypeVar("_Fact")


def memoize(facts: dict[Any, Any], find: Callable[[_Thing], _Fact], given: Callable[[], _Thing]) -> _Fact:
    """Return `find(given())`, computed once and cached in `facts` under the function `find`."""
    if find not in facts:
        facts[find] = find(given())
    return facts[find]  # type: ignore[no-any-return]
