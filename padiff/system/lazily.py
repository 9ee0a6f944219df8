"""Lazy import of a package's public names, so that importing the package is fast."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


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
