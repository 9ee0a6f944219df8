"""Detection of Lightning's two packages, ``pytorch-lightning`` and ``lightning``, installed and in use.

Both packages hold the same code. Each has a separate `Trainer`, `Callback` and `TensorBoardLogger`, and rejects those
of the other package. Both may be installed and loaded; importing one takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

#: The packages' modules; the more common one comes first.
PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def loaded() -> list[ModuleType]:
    """Return the packages that this process has imported."""
    return [sys.modules[name] for name in PACKAGES if sys.modules.get(name) is not None]


def installed() -> list[str]:
    """Return the names of the `PACKAGES` that can be imported.

    Raises:
        ImportError: no package is installed.
    """
    names = [name for name in PACKAGES if _is_installed(name.partition(".")[0])]
    if not names:
        raise ModuleNotFoundError("Lightning is not installed: pip install 'pytorch-lightning>=2.2'", name=PACKAGES[0])
    return names


def in_use() -> list[ModuleType]:
    """Return the packages that a Trainer may come from: the loaded ones, or else all installed ones, after an import.

    Raises:
        ImportError: no package is installed.
    """
    return loaded() or [importlib.import_module(name) for name in installed()]


def one() -> ModuleType:
    """Return any usable package: a loaded one, or else the first installed one, after an import.

    Raises:
        ImportError: no package is installed.
    """
    return (loaded() or [importlib.import_module(installed()[0])])[0]


def classes(modules: list[ModuleType], room: str, name: str) -> tuple[type[Any], ...]:
    """Return the class of the same name from each package.

    Args:
        modules: the packages.
        room: module of the class, such as ``callbacks``.
        name: name of the class, such as ``Callback``.
    """
    return tuple(getattr(importlib.import_module(f"{module.__name__}.{room}"), name) for module in modules)


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # Any folder of that name can be imported, too, as a namespace package, which has no file.
    return spec is not None and spec.origin is not None
