"""What a fork of the process must not go on with: it has copies of all objects, and none of the threads."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Owned(Protocol):
    """What belongs to the process that made it."""

    def leave_in_fork(self) -> None:
        """Called in a fork: leave everything to the parent. Locks may be held by threads that are not here."""


# Weak: what is dropped is freed.
_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def own(one: Owned) -> None:
    """Say that forks of this process have to leave something alone."""
    _owned.add(one)


def _in_fork() -> None:
    for one in list(_owned):
        with contextlib.suppress(Exception):
            one.leave_in_fork()
    _owned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)
