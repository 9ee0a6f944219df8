"""Exit flush: what writers that nobody closed have queued is written when the interpreter ends."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from typing import Protocol

from padiff.dump.remote_path import AnyPath
from padiff.errors import WriterError

#: Seconds that the end of the interpreter waits, for all of them together.
AT_EXIT = 60.0


class Writer(Protocol):
    """A writer, as far as its end is concerned."""

    @property
    def path(self) -> AnyPath: ...

    def end(self, seconds: float) -> None:
        """Write what is queued, for so many seconds at most."""


# Weak: a writer that is dropped is freed, with what it had queued.
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
_registered: list[bool] = []


def register(writer: Writer) -> None:
    """Have a writer flushed at exit, unless it is closed before."""
    _writers.add(writer)
    if not _registered:
        # Not when this is imported: what the frameworks undo at the end, they undo after us.
        _registered.append(True)
        atexit.register(_flush_all)


def unregister(writer: Writer) -> None:
    """A writer is closed: nothing of it is to be flushed."""
    _writers.discard(writer)


def _flush_all() -> None:
    until = time.monotonic() + AT_EXIT
    for writer in list(_writers):
        message = (
            f"padiff: the recorder of {writer.path} was never closed (leave its `with`, or call close()). What it had "
            "recorded was written now, and the run is not marked as finished"
        )
        try:
            writer.end(max(0.1, until - time.monotonic()))
        except WriterError as error:
            message += f"; but {error}"
        print(message, file=sys.stderr)  # no warning: as an error it would come too late to be seen by anybody
