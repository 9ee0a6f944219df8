"""Interception of torch's functions and operators while a model's own code runs.

A torch function mode (`torch.overrides`) intercepts the calls; see `padiff.frameworks.torch.functions`. The mode is on
only while the user's code runs, because it disables the fast path of torch's attention, and code compiled meanwhile
would include the mode.

Compiled code stays unchanged: padiff intercepts nothing in a process that has compiled code before, and stops as soon
as a compilation begins.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import overrides
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from padiff.frameworks.api_names import heard_name, parameters_of
from padiff.frameworks.hooking import FunctionListener, HookEntry
from padiff.frameworks.torch.modes import building, call_aside, is_compiling

# A key far below those of recorders' hooks on layers.
_FIRST = -1_000_000
# Tensor attributes that return another view of the tensor -> the common name of the operation.
_ATTRIBUTES = {"T": "transpose", "mT": "transpose", "H": "transpose", "mH": "transpose", "data": "detach"}


class _Mode(TorchFunctionMode):
    def __init__(self, listener: FunctionListener) -> None:
        super().__init__()
        self._listener = listener
        #: `muted`: pass no calls to the listener. `inside`: a function is running; torch has removed the mode from its
        #: stack during the call and puts it back afterwards, so the mode can't be removed meanwhile.
        self.muted = self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.muted or is_compiling():
            return func(*args, **kwargs)
        listener, self.inside = self._listener, True
        try:
            begun = listener.guard.run(self._begins, func, args, kwargs)
            output = func(*args, **kwargs)
            if begun is not None:
                listener.guard.run(call_aside, listener.function_ended, begun, output)
            return output
        finally:
            self.inside = False

    def _begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, parameters = _about(func)
        if name is None or building():
            return None
        return call_aside(self._listener.function_begins, name, parameters, args, kwargs)


class FunctionTracing:
    """An interceptor of functions on the thread that creates it; see `padiff.frameworks.hooking.Hearing`."""

    def __init__(self, listener: FunctionListener) -> None:
        self._mode: _Mode | None = None if _has_compiled() else _Mode(listener)
        self.guard = listener.guard
        #: `_on`: calls go to the listener. `_over`: a compilation has ended the interception for good. `_left`: the
        #: mode is still on the stack although `_on` is False.
        self._on = self._over = self._left = False
        self._foreign: _ForeignCalls | None = None
        #: The number of modes on the stack below this one.
        self._place: int | None = None
        self._thread = threading.get_ident()
        # Not imported here: every compilation imports this module.
        self._compiling = sys.modules.get("torch._dynamo.callback")
        if self._compiling is not None and self._mode is not None:
            self._compiling.callback_handler.register_start_callback(self._stop)

    def listen(self, on: bool) -> None:
        if self._over or self._mode is None or threading.get_ident() != self._thread:
            return
        if on == self._on and not self._left:
            return
        self._on, self._mode.muted = on, not on
        if self._mode.inside:
            self._left = not on  # during a function call, such as a backward: `listen` removes it later
            return
        was_active, self._left = self._left, False
        if not on or was_active:
            self._take_out(self._mode)
        if not on:
            return
        count = len(overrides._get_current_function_mode_stack())
        # At its previous position, because modes entered since (``with torch.device(...)``) exit before this one.
        place = count if self._place is None else min(self._place, count)
        above = [overrides._pop_mode() for _ in range(count - place)]
        overrides._push_mode(self._mode)
        while above:
            overrides._push_mode(above.pop())

    def listen_outside(self, on: bool) -> None:
        self.listen(on)
        if on and self._on and self._foreign is None:
            self._foreign = _ForeignCalls(self)
        elif not on and self._foreign is not None:
            self._foreign.remove()
            self._foreign = None

    def remove(self) -> None:
        if self._foreign is not None:
            self._foreign.remove()
            self._foreign = None
        mode = self._mode
        if mode is not None and threading.get_ident() == self._thread:
            mode.muted = True
            self._take_out(mode)  # whatever `_on` says, as an error may have left it wrong
        if mode is not None and self._compiling is not None:
            with suppress(ValueError):  # torch._dynamo.reset() has removed all callbacks already
                self._compiling.callback_handler.remove_start_callback(self._stop)
        self._mode, self._on, self._left = None, False, False

    def _stop(self, *_: Any) -> None:
        """End the interception because a compilation begins: the mode would change the compiled code."""
        self.guard.run(self._end)

    def _end(self) -> None:
        is_active = self._on or self._left
        if is_active and self._mode is not None and threading.get_ident() == self._thread:
            self._mode.muted = True
            self._take_out(self._mode)
            self._on, self._over = False, True

    def _take_out(self, mode: _Mode) -> None:
        stack = overrides._get_current_function_mode_stack()
        if all(active is not mode for active in stack):
            return
        above = []
        while (last := overrides._pop_mode()) is not mode:
            above.append(last)
        self._place = len(stack) - len(above) - 1
        while above:
            overrides._push_mode(above.pop())


class _ForeignCalls:
    """Global hooks that pause the interception while modules with parameters run outside of the model (a teacher).

    Otherwise the mode would disable the fast path of torch's attention in such a module's eval mode. Modules without
    parameters (losses) are intercepted.
    """

    def __init__(self, hearing: FunctionTracing) -> None:
        self._hearing, self._inside, self._thread = hearing, 0, threading.get_ident()
        run = hearing.guard.run
        self._handles = (
            HookEntry(
                module_hooks._global_forward_pre_hooks, lambda module, _: run(self._begins, module), first=_FIRST
            ),
            HookEntry(
                module_hooks._global_forward_hooks,
                lambda module, *_: run(self._ended, module),
                [module_hooks._global_forward_hooks_always_called],
                first=_FIRST,
            ),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _counts(self, module: torch.nn.Module) -> bool:
        applies = threading.get_ident() == self._thread and not is_compiling()
        return applies and next(module.parameters(), None) is not None

    def _begins(self, module: torch.nn.Module) -> None:
        if self._counts(module):
            self._inside += 1
            self._hearing.listen(False)

    def _ended(self, module: torch.nn.Module) -> None:
        if self._inside and self._counts(module):
            self._inside -= 1
            if not self._inside:
                self._hearing.listen(True)


def _has_compiled() -> bool:
    """Return True if torch.compile has compiled anything in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(frames, "output_codes", None)
    return bool(getattr(codes, "seen", None))


@lru_cache(maxsize=4096)
def _about(func: Callable[..., Any]) -> tuple[str | None, tuple[str, ...]]:
    """Return the common name of a function (`None` if traces leave it out), and the names of its parameters."""
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        return _ATTRIBUTES.get(str(getattr(getattr(func, "__self__", None), "__name__", ""))), ("self",)
    common = heard_name(name)
    if common is None:
        return None, ()
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # written in C
        return common, parameters_of(common)
    return common, tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
