"""Hearing torch's functions and operators while a model's own code runs.

A mode of torch's own (`torch.overrides`) hears them, however they are reached; see `padiff.frameworks.torch.functions`.
It is on only while code of the user's runs: where it is on, torch's attention leaves out its fast path, and what is
compiled would be compiled for it.

What is compiled is left alone: in a process that has compiled something nothing is heard, and once something
begins to be compiled, nothing more.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from padiff.frameworks.api_names import heard_name, parameters_of
from padiff.frameworks.hooking import FunctionListener

# Attributes that give a tensor that is another view of it.
_ATTRIBUTES = {"T": "transpose", "mT": "transpose", "H": "transpose", "mH": "transpose", "data": "detach"}


class _Mode(TorchFunctionMode):
    def __init__(self, listener: FunctionListener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name, parameters = _about(func)
        begun = self._listener.function_begins(name, parameters, args, kwargs) if name is not None else None
        output = func(*args, **kwargs)
        if begun is not None:
            self._listener.function_ended(begun, output)
        return output


class Hearing:
    """Hears functions for a listener on the thread that makes it; see `padiff.frameworks.hooking.Hooking`."""

    def __init__(self, listener: FunctionListener) -> None:
        self._mode: _Mode | None = None if _has_compiled() else _Mode(listener)
        #: Whether it listens, and whether it will not any more.
        self._on = self._over = False
        #: How many modes were on before this one.
        self._place: int | None = None
        self._thread = threading.get_ident()
        # Not imported here: nothing is compiled without it.
        self._compiling = sys.modules.get("torch._dynamo.callback")
        if self._compiling is not None and self._mode is not None:
            self._compiling.callback_handler.register_start_callback(self._stop)

    def listen(self, on: bool) -> None:
        if on == self._on or self._over or self._mode is None or threading.get_ident() != self._thread:
            return
        self._on = on
        if not on:
            self._take_out(self._mode)
            return
        there = len(overrides._get_current_function_mode_stack())
        # Where it was: other modes (``with torch.device(...)``) that were begun since end before it does.
        place = there if self._place is None else min(self._place, there)
        above = [overrides._pop_mode() for _ in range(there - place)]
        overrides._push_mode(self._mode)
        while above:
            overrides._push_mode(above.pop())

    def remove(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None and self._compiling is not None:
            self._compiling.callback_handler.remove_start_callback(self._stop)
        if mode is not None and self._on and threading.get_ident() == self._thread:
            self._take_out(mode)
        self._on = False

    def _stop(self, *_: Any) -> None:
        """Something begins to be compiled: with the mode, it would be compiled another way."""
        if self._on and self._mode is not None and threading.get_ident() == self._thread:
            self._take_out(self._mode)
            self._on, self._over = False, True

    def _take_out(self, mode: _Mode) -> None:
        stack = overrides._get_current_function_mode_stack()
        if all(one is not mode for one in stack):
            return
        above = []
        while (last := overrides._pop_mode()) is not mode:
            above.append(last)
        self._place = len(stack) - len(above) - 1
        while above:
            overrides._push_mode(above.pop())


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(frames, "output_codes", None)
    return bool(getattr(codes, "seen", None))


@lru_cache(maxsize=4096)
def _about(func: Callable[..., Any]) -> tuple[str | None, tuple[str, ...]]:
    """The common name of a function, `None` where it is of no interest; and the names of its parameters."""
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        return _ATTRIBUTES.get(str(getattr(getattr(func, "__self__", None), "__name__", ""))), ("self",)
    common = heard_name(name)
    if common is None:
        return None, ()
    try:
        found = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # written in C
        return common, parameters_of(common)
    return common, tuple(p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
