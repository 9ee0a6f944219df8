"""Callbacks that run once a module is imported, without importing the module."""

from __future__ import annotations

import sys

# Imports nothing that Python has not imported by its start: each process below `padiff run` imports this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    OnImport = Callable[[ModuleType], None]


class AfterImport:
    """Import hook that calls a function once a module is imported; at once if the module is imported already.

    Args:
        waiting: functions by the names of their modules. Each is called once, with the module.
    """

    def __init__(self, waiting: Mapping[str, OnImport]) -> None:
        self._waiting: dict[str, OnImport] = {}
        sys.meta_path.insert(0, self)
        self.add(waiting)

    def add(self, waiting: Mapping[str, OnImport]) -> None:
        """Add functions. One that removes the hook keeps the others from being called."""
        self._waiting.update(waiting)
        for name in waiting:
            module = sys.modules.get(name)
            if name in self._waiting and module is not None and not _is_proxy(module):
                self._waiting.pop(name)(module)

    def remove(self) -> None:
        """Remove the hook; modules imported later cause no callback."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._waiting)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Loader that runs another loader, sets that one as the module's loader, and calls back with the module.

    A spec may also be looked up only to see if there is such a module: the callback then goes on waiting.
    """

    def __init__(self, loader: Any, waiting: dict[str, OnImport]) -> None:
        self._loader, self._waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        imported = self._waiting.pop(module.__name__, None)
        if imported is not None and not _is_proxy(module):
            imported(module)


def _is_proxy(module: ModuleType) -> bool:
    """Return True for a module of `paddle.enable_compat`, which puts paddle's modules under names of torch's."""
    return type(module).__module__.startswith("paddle.")
