"""The working directory in which a script began: files are named by it, wherever the script goes later."""

from __future__ import annotations

import os
from contextvars import ContextVar


def current_folder() -> str:
    """Return the working directory; empty if it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


_AT_IMPORT = current_folder()
_START: ContextVar[str] = ContextVar("padiff_start_folder", default=_AT_IMPORT)


def start_folder() -> str:
    """Return the working directory in which the script began."""
    return _START.get()


def begin_here() -> None:
    """Take the working directory as that in which a script begins."""
    _START.set(current_folder())
