"""Standard output and errors: what they can't show, and what they can't take any more."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def show_anything() -> None:
    """From now on what a terminal's encoding can't show is printed as codes, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up_output(error: BaseException | None = None) -> None:
    """Standard output can't be written to: leave what is buffered for it, which would fail again at the end."""
    if error is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            return
    with contextlib.suppress(OSError):
        place, nothing = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, place)
        os.close(nothing)
