"""Where dumps go that no path was given for, and names that no two living models share."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from padiff.dump.local import absolute, local_folder

#: The folder for dumps until `set_dump_root_path` says otherwise, below the current folder.
DEFAULT_ROOT = "padiff_dump"

# Context variables, replaced and never edited: what one thread sets, another does not see.
_ROOT: ContextVar[str] = ContextVar("padiff_dump_root", default=DEFAULT_ROOT)
_NAMED: ContextVar[tuple[tuple[str, weakref.ref[Any]], ...]] = ContextVar("padiff_names", default=())


def set_dump_root_path(path: str | Path) -> None:
    """Set the folder below which models made from now on dump by default."""
    _ROOT.set(str(absolute(local_folder(path, "path"))))


def get_dump_root_path() -> str:
    """The folder below which models dump by default."""
    return str(Path(_ROOT.get()).absolute())


def claim_name(name: str, owner: Any) -> str:
    """The name, with a number behind it if a living model has it already: two models never share a folder."""
    living = tuple((taken, ref) for taken, ref in _NAMED.get() if ref() is not None)
    names = {taken for taken, _ in living}
    free, number = name, 1
    while free in names:
        free, number = f"{name}_{number}", number + 1
    _NAMED.set((*living, (free, weakref.ref(owner))))
    return free
