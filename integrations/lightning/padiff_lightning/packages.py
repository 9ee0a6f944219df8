"""Lightning's two packages, ``pytorch-lightning`` and ``lightning``: which are here, and which of them are in use.

They hold the same code twice, so each has a `Trainer`, a `Callback` and a `TensorBoardLogger` of its own, and takes
those of the other for strangers. Both may be installed, and loaded; importing one takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

#: Their modules; the one that more people have comes first.
PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def loaded() -> list[ModuleType]:
    """The packages that this process has imported."""
    return [sys.modules[name] for name in PACKAGES if sys.modules.get(name) is not None]


def installed() -> list[str]:
    """Those of `PACKAGES` that can be imported.

    Raises:
        ImportError: none.
    """
    names = [name for name in PACKAGES if _is_installed(name.partition(".")[0])]
    if not names:
        raise ModuleNotFoundError("Lightning is not installed: pip install 'pytorch-lightning>=2.2'", name=PACKAGES[0])
    return names


def in_use() -> list[ModuleType]:
    """The packages that a Trainer may come from: those loaded; where none is, all that are installed, imported now.

    Raises:
        ImportError: none is installed.
    """
    return loaded() or [importlib.import_module(name) for name in installed()]


def one() -> ModuleType:
    """A package to use, where any will do: one that is loaded, else the first that is installed, imported now.

    Raises:
        ImportError: none is installed.
    """
    return (loaded() or [importlib.import_module(installed()[0])])[0]


def classes(modules: list[ModuleType], room: str, name: str) -> tuple[type[Any], ...]:
    """The class of one name of each package, such as ``callbacks``, ``Callback``."""
    return tuple(getattr(importlib.import_module(f"{module.__name__}.{room}"), name) for module in modules)


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A folder that happens to have that name can be imported too, and has no file of its own.
    return spec is not None and spec.origin is not None
