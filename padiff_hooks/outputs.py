"""Output of the commands: the console, progress, and report files."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.segment import Segment

from padiff.dump.format import aside
from padiff.errors import UsageError
from padiff.records import printable
from padiff.system.terminal import coloured

# Seconds after which the remaining time is estimated.
_STEADY = 1.0
# Width of tables in a file or a pipe, in columns.
_WIDE = 160


class _Console(Console):
    """Console that writes only printable text and its own colours; control sequences in names are escaped."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control:
                text = printable(segment.text, lines=True)
                segment = segment if text == segment.text else Segment(text, segment.style)
            yield segment


def console_for(stderr: bool = False) -> Console:
    """Return a console that prints names as they are, without markup in square brackets or emoji such as ``:cat:``.

    Colours are used on terminals (`padiff.system.terminal`). In files and pipes, lines are not broken and tables are
    wide.
    """
    stream = sys.stderr if stderr else sys.stdout
    terminal, colours = stream.isatty(), coloured(stream)
    return _Console(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
        # Colours forced into a file need force_terminal, and must not make the console interactive.
        force_terminal=terminal or colours,
        force_interactive=terminal,
        color_system="auto" if colours else None,
        no_color=not colours,
        width=None if terminal or "COLUMNS" in os.environ else _WIDE,
    )


class Progress:
    """Progress line on a terminal: a context manager that is called with the number of finished steps.

    Args:
        console: console to write to.
        what: name of the work.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._what = what
        self._status = console.status(what)
        self._shown = console.is_interactive  # files and pipes would get cursor movements

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self._shown:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, done: float, total: int) -> None:
        """Show that `done` of `total` steps are finished; `done` may include a fraction of a step."""
        self._status.update(progress_text(self._what, done, total, time.monotonic() - self._began))


def progress_text(what: str, done: float, total: int, seconds: float) -> str:
    """Return the finished share of the work, and an estimate of the remaining time at the speed so far."""
    share = min(done / total, 1.0) if total else 1.0
    text = f"{what}: {share:.0%}, step {min(int(done) + 1, total)} of {total}"
    # An earlier estimate would be unreliable.
    if 0 < share < 1 and seconds >= _STEADY:
        text += f", about {duration_text(seconds * (1 - share) / share)} left"
    return text


def duration_text(seconds: float) -> str:
    """Return a duration in words."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def check_out(out: str | None) -> None:
    """Check before long work that a report can be written to a path.

    Raises:
        UsageError: the path is a folder, or its folder does not exist.
    """
    if not out or out == "-":
        return
    path = Path(out).resolve()
    if path.is_dir():
        raise UsageError(f"cannot write {out}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {path.parent}")


def write_out(out: str, text: str | Iterable[str]) -> None:
    """Write a report atomically to a file, or to standard output (``-``).

    Args:
        out: path of the file, or ``-``.
        text: the report, or its parts in order.

    Raises:
        UsageError: the report can't be written.
    """
    parts = [text] if isinstance(text, str) else text
    if out == "-":
        sys.stdout.writelines(parts)
        sys.stdout.write("\n")
        return
    path = Path(out)
    try:
        if path.exists() and not path.is_file():  # a pipe or /dev/null can't be replaced
            _write(path, parts)
        else:
            with aside(path) as partial:
                _write(partial, parts)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error


def _write(path: Path, parts: Iterable[str]) -> None:
    with open(
        path, "w", encoding="utf-8", errors="backslashreplace"
    ) as file:  # file names in a report may not be valid text
        file.writelines(parts)
