"""Default folder of dumps, and unique names for living models."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from padiff.dump.local import absolute, local_folder

#: Default folder of dumps, below the current folder; see `set_dump_root_path`.
DEFAULT_ROOT = "padiff_dump"

# Context variables, replaced and never edited: each thread has its own values.
_ROOT: ContextVar[str] = ContextVar("padiff_dump_root", default=DEFAULT_ROOT)
_NAMED: ContextVar[tuple[tuple[str, weakref.ref[Any]], ...]] = ContextVar("padiff_names", default=())


def set_dump_root_path(path: str | Path) -> None:
    """Set the default parent folder for dumps of models created from now on."""
    _ROOT.set(str(absolute(local_folder(path, "path"))))


def get_dump_root_path() -> str:
    """Return the default parent folder for dumps of models."""
    return str(Path(_ROOT.get()).absolute())


def claim_name(name: str, owner: Any) -> str:
    """Return the name, with a number appended if a living model has it, so that two models never share a folder."""
    living = tuple((used, ref) for used, ref in _NAMED.get() if ref() is not None)
    names = {used for used, _ in living}
    free, number = name, 1
    while free in names:
        free, number = f"{name}_{number}", number + 1
    _NAMED.set((*living, (free, weakref.ref(owner))))
    return free
