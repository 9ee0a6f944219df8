"""Matches between units, collected during the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from padiff.align.matching.parameter_units import Unit
from padiff.records import Both


@dataclass(frozen=True)
class Match(Both[tuple[Unit, ...]]):
    """Units that correspond to each other: one on each side, or one and the several units that are its parts, in
    order.
    """

    confidence: float
    reason: str
    evidence: tuple[str, ...] = ()
    rivals: tuple[Unit, ...] = ()
    #: True if the shapes differ; such units are paired by kind, so that the difference is shown at its place.
    unlike: bool = False
    #: True for a recurrent cell's input and state matrices matched with gates that hold both matrices side by side.
    beside: bool = False


class Matches:
    """The matches so far; the last ones can be undone."""

    def __init__(self) -> None:
        self._found: list[Match] = []
        self._done: Both[set[Unit]] = Both(set(), set())

    def __iter__(self) -> Iterator[Match]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, match: Match) -> None:
        self._found.append(match)
        for done, units in zip(self._done, match):
            done.update(units)

    def since(self, length: int) -> Sequence[Match]:
        return self._found[length:]

    def cap(self, length: int, confidence: float) -> None:
        """Limit the confidence of all matches after the first `length`."""
        for k in range(length, len(self._found)):
            match = self._found[k]
            if match.confidence > confidence:
                self._found[k] = replace(match, confidence=confidence)

    def take_back(self, length: int) -> None:
        """Undo all matches after the first `length`."""
        for match in self._found[length:]:
            for done, units in zip(self._done, match):
                done.difference_update(units)
        del self._found[length:]

    def left_of(self, units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Return the units that have no partner yet."""
        return Both(*([unit for unit in side if unit not in done] for side, done in zip(units, self._done)))
