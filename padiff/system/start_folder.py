"""Working directory at the start of a script, to which recorded file names are relative."""

from __future__ import annotations

import os
from contextvars import ContextVar


def current_folder() -> str:
    """Return the working directory; empty if the directory was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


_AT_IMPORT = current_folder()
_START: ContextVar[str] = ContextVar("padiff_start_folder", default=_AT_IMPORT)


def start_folder() -> str:
    """Return the working directory in which the script began."""
    return _START.get()


def begin_in(folder: str) -> None:
    """Set the start folder of the script."""
    _START.set(folder)
