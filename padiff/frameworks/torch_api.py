"""Seeing torch's functional calls and tensor methods, by torch's own means for it."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from padiff.frameworks.api_names import common_name
from padiff.frameworks.base import OnCall


class _Mode(TorchFunctionMode):
    """Calls back after each call made from Python. What a call itself calls is not seen: the mode is off meanwhile."""

    def __init__(self, called: OnCall) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = common_name(getattr(func, "__name__", ""))
        if name is not None:
            self._called(name, output)
        return output


class Seeing:
    """The mode, switched on when made and off by `remove`."""

    def __init__(self, called: OnCall) -> None:
        self._mode: _Mode | None = _Mode(called)
        self._mode.__enter__()

    def remove(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
