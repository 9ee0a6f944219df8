"""Seeing whether something is what it was, in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from padiff.system.guard import reraise_from_signal_handler


class Watch(Protocol):
    """Sees whether something is what it was when that was noted."""

    def note(self, unchanged: bool = False) -> bool:
        """Note what it is now; whether that can be said.

        Args:
            unchanged: it is known to be what was noted last, though `same` could not say so.
        """

    def same(self) -> bool:
        """Whether it is still that; `False` where it can't be said, or nothing was noted."""


# Tensors and layers that are looked at at a time, one thing after the other: of many more the first ones have left the
# processor's cache, and so many answers would call the garbage collector.
_AT_ONCE = 200


def in_turn(many: Sequence[Any]) -> list[Sequence[Any]]:
    """Some at a time."""
    return [many[start : start + _AT_ONCE] for start in range(0, len(many), _AT_ONCE)]


class Each:
    """Watches several as one."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

    def note(self, unchanged: bool = False) -> bool:
        noted = [watch.note(unchanged) for watch in self._watches]  # each of them, whatever is said of the others
        return all(noted)

    def same(self) -> bool:
        return all(watch.same() for watch in self._watches)


class Compared:
    """Compares values that say what it is.

    Args:
        now: gives them; what it raises means that it can't be said.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._noted: Any = None

    def note(self, unchanged: bool = False) -> bool:
        try:
            self._noted = self._now()
        except Exception as error:  # whatever kind of tensor or layer that is
            reraise_from_signal_handler(error)
            self._noted = None
        return self._noted is not None

    def same(self) -> bool:
        try:
            return self._noted is not None and bool(self._noted == self._now())
        except Exception as error:  # likewise
            reraise_from_signal_handler(error)
            return False


def compared(now: Callable[[Sequence[Any]], Any], many: Sequence[Any]) -> Each:
    """Compares what is said of many, some at a time."""
    return Each([Compared(partial(now, some)) for some in in_turn(many)])
