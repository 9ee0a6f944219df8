"""Writers that nobody closes: what they have queued is written when the interpreter ends."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from pathlib import Path
from typing import Protocol

from padiff.errors import WriterError

#: Seconds that the end of the interpreter waits, for all of them together.
AT_EXIT = 60.0


class Ending(Protocol):
    """A writer, as far as its end is concerned."""

    path: Path

    def end(self, seconds: float) -> None:
        """Write what is queued, for so many seconds at most."""


# Weak: a writer that is dropped is freed, with what it had queued.
_unclosed: weakref.WeakSet[Ending] = weakref.WeakSet()
_registered: list[bool] = []


def end_at_exit(writer: Ending) -> None:
    """Have a writer that is never closed end with the interpreter."""
    _unclosed.add(writer)
    if not _registered:
        # Not when this is imported: what the frameworks undo at the end, they undo after us.
        _registered.append(True)
        atexit.register(_end_all)


def is_closed(writer: Ending) -> None:
    """Say that nothing has to be done at the end."""
    _unclosed.discard(writer)


def _end_all() -> None:
    until = time.monotonic() + AT_EXIT
    for writer in list(_unclosed):
        told = (
            f"padiff: the recorder of {writer.path} was never closed (leave its `with`, or call close()). What it had "
            "recorded was written now, and the run is not marked as finished"
        )
        try:
            writer.end(max(0.1, until - time.monotonic()))
        except WriterError as error:
            told += f"; but {error}"
        print(told, file=sys.stderr)  # no warning: as an error it would come too late to be seen by anybody
