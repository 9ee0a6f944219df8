"""Cheap checks, in every step, that tensors and layers have not changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from padiff.system.guard import reraise_from_signal_handler


class Watch(Protocol):
    """A check that objects are still in the state that `note` recorded."""

    def note(self, unchanged: bool = False) -> bool:
        """Record the current state; return True if the state can be read.

        Args:
            unchanged: True if the caller knows that the state equals the last recorded one, though `same` returned
                False.
        """

    def same(self) -> bool:
        """Return True if the state is unchanged; `False` if it can't be read or was never recorded."""


# Number of tensors or layers to check at a time, one property after the other. With many more, the first ones would
# have left the processor's cache, and the many results would trigger the garbage collector.
_AT_ONCE = 200


def in_turn(many: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the items in chunks of at most 200."""
    return [many[start : start + _AT_ONCE] for start in range(0, len(many), _AT_ONCE)]


class Each:
    """A watch that combines several watches."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

    def note(self, unchanged: bool = False) -> bool:
        noted = [watch.note(unchanged) for watch in self._watches]  # note all of them, even after one has failed
        return all(noted)

    def same(self) -> bool:
        return all(watch.same() for watch in self._watches)


class Compared:
    """A watch that compares the value of a function.

    Args:
        now: returns the current state as a comparable value; an exception means that the state can't be read.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._noted: Any = None

    def note(self, unchanged: bool = False) -> bool:
        try:
            self._noted = self._now()
        except Exception as error:  # unknown kinds of tensors or layers may raise anything
            reraise_from_signal_handler(error)
            self._noted = None
        return self._noted is not None

    def same(self) -> bool:
        try:
            return self._noted is not None and bool(self._noted == self._now())
        except Exception as error:  # as in `note`
            reraise_from_signal_handler(error)
            return False


def compared(now: Callable[[Sequence[Any]], Any], many: Sequence[Any]) -> Each:
    """Return a watch that compares the value of ``now`` for many objects, in chunks."""
    return Each([Compared(partial(now, chunk)) for chunk in in_turn(many)])
