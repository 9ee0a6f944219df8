"""Import of public names on first access, and the working directory at the start: all that `import padiff` needs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar


def names_from(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package: ``__getattr__ = names_from(__name__, {...})``.

    Hide the assignment from type checkers, which would otherwise accept any name.

    Args:
        package: name of the package.
        modules: module of each name.
    """

    def asked_for(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return asked_for


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
