"""Handling of standard output and standard error that can't show some text, or are closed."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def show_anything() -> None:
    """Make standard output and error print characters outside of their encoding as codes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up_output(error: BaseException | None = None) -> None:
    """Redirect standard output to the null device, so that buffered text does not fail again at exit.

    Args:
        error: the error that ended the command. With an error, standard output is redirected only if flushing fails.
    """
    if error is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            return
    with contextlib.suppress(OSError):
        place, nothing = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, place)
        os.close(nothing)
