"""Exit flush: writers that were not closed write their queued steps when the interpreter ends."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from typing import Protocol

from padiff.dump.remote_path import AnyPath
from padiff.errors import WriterError

#: Seconds that the interpreter waits at its end for all writers together.
AT_EXIT = 60.0


class Writer(Protocol):
    """A writer that can be flushed at exit."""

    @property
    def path(self) -> AnyPath: ...

    def write_remaining(self, seconds: float) -> None:
        """Write the queued steps, for ``seconds`` at most."""


# Weak references, so that a dropped writer is freed with its queue.
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
_registered: list[bool] = []


def register(writer: Writer) -> None:
    """Register a writer to be flushed at exit."""
    _writers.add(writer)
    if not _registered:
        # Registered late, not on import: exit functions run in reverse order, so padiff's run before the frameworks'.
        _registered.append(True)
        atexit.register(_flush_all)


def unregister(writer: Writer) -> None:
    """Remove a closed writer from those flushed at exit."""
    _writers.discard(writer)


def _flush_all() -> None:
    until = time.monotonic() + AT_EXIT
    for writer in list(_writers):
        message = (
            f"padiff: the recorder of {writer.path} was never closed (leave its `with`, or call close()). What it had "
            "recorded was written now, and the run is not marked as finished"
        )
        try:
            writer.write_remaining(max(0.1, until - time.monotonic()))
        except WriterError as error:
            message += f"; but {error}"
        print(message, file=sys.stderr)  # no warning: turned into an error, it would be lost this late
