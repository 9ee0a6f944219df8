"""Cleanup after a fork: a forked process has copies of all objects, but none of the threads."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """An object that belongs to the process that created it."""

    def leave_in_fork(self) -> None:
        """Disable this copy, in a fork. Locks must not be used: threads that do not exist here may hold them."""


# Weak references, so that dropped objects are freed.
_owned: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_fork_cleanup(one: ForkAware) -> None:
    """Register an object whose copies are disabled in forks of this process."""
    _owned.add(one)


def _in_fork() -> None:
    for owned in list(_owned):
        with contextlib.suppress(Exception):
            owned.leave_in_fork()
    _owned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)
