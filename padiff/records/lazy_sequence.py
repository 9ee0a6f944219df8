"""Sequences whose elements are created on access."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TypeVar, overload

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
