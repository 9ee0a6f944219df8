"""Names of a package that come from modules that are imported when they are asked for: who does not need them starts
sooner.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def names_from(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """The package's ``__getattr__``, given the module of each name: ``__getattr__ = names_from(__name__, {...})``.

    It is to be hidden from type checkers, which would take any name for one of the package's.
    """

    def asked_for(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return asked_for
