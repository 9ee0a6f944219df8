"""Where the commands write: the console."""

from __future__ import annotations

import sys

from rich.console import Console


def console_for(stderr: bool = False) -> Console:
    """A console that prints names as they are: square brackets are no markup there, and ``:cat:`` is no picture."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
