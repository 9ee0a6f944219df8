"""Where the commands write: the console, and the files of reports."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.segment import Segment

from padiff.dump.files import aside
from padiff.errors import UsageError
from padiff.records import printable
from padiff.system.colours import coloured

# Seconds after which the time left is estimated.
_STEADY = 1.0
# Columns of a table that is written into a file or a pipe.
_WIDE = 160


class _Console(Console):
    """Writes nothing to a terminal but text and its own colours."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control:
                text = printable(segment.text, lines=True)
                segment = segment if text == segment.text else Segment(text, segment.style)
            yield segment


def console_for(stderr: bool = False) -> Console:
    """A console that prints names as they are: square brackets are no markup there, and ``:cat:`` is no picture.

    Colours are for terminals (`padiff.system.colours`). Elsewhere no line is broken, and tables are wide.
    """
    stream = sys.stderr if stderr else sys.stdout
    terminal, colours = stream.isatty(), coloured(stream)
    return _Console(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
        # Of colours that are forced into a file nothing else of a terminal follows.
        force_terminal=terminal or colours,
        force_interactive=terminal,
        color_system="auto" if colours else None,
        no_color=not colours,
        width=None if terminal or "COLUMNS" in os.environ else _WIDE,
    )


class Progress:
    """Says on a terminal how far something is; to be used in a ``with``, and called with what is done."""

    def __init__(self, console: Console, what: str) -> None:
        self._what = what
        self._status = console.status(what)
        self._shown = console.is_interactive  # elsewhere it would be what moves a cursor

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self._shown:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, done: float, total: int) -> None:
        """``done`` steps of ``total``; a part of a step counts."""
        self._status.update(progress_text(self._what, done, total, time.monotonic() - self._began))


def progress_text(what: str, done: float, total: int, seconds: float) -> str:
    """How far something is after so many seconds, and how long the rest will take at that speed."""
    share = min(done / total, 1.0) if total else 1.0
    text = f"{what}: {share:.0%}, step {min(int(done) + 1, total)} of {total}"
    # Before that, what was done says little of what is to be done.
    if 0 < share < 1 and seconds >= _STEADY:
        text += f", about {_duration(seconds * (1 - share) / share)} left"
    return text


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def check_out(out: str | None) -> None:
    """Make sure, before long work, that a report could be written there.

    Raises:
        UsageError: its folder is not there, or it is a folder itself.
    """
    if not out or out == "-":
        return
    path = Path(out).resolve()
    if path.is_dir():
        raise UsageError(f"cannot write {out}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {path.parent}")


def write_out(out: str, text: str | Iterable[str]) -> None:
    """Write a report: into a file, which is whole or as it was before, or to standard output (``-``).

    Args:
        text: the report, or its parts one after the other.

    Raises:
        UsageError: it can't be written.
    """
    parts = [text] if isinstance(text, str) else text
    if out == "-":
        sys.stdout.writelines(parts)
        sys.stdout.write("\n")
        return
    path = Path(out)
    try:
        if path.exists() and not path.is_file():  # a pipe, /dev/null: nothing to be replaced
            _write(path, parts)
        else:
            with aside(path) as partial:
                _write(partial, parts)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error


def _write(path: Path, parts: Iterable[str]) -> None:
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:  # names of files may be no text
        file.writelines(parts)
