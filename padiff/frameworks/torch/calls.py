"""Seeing the calls of torch modules, those under ``torch.compile`` too.

What a compiled module computes inside never comes by in Python: it is recorded from outside. Hooks inside keep still
while torch compiles: else the graph would break at each of them, and the compiled code would be another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from padiff.frameworks.hooking import AfterCall, BeforeCall, Handle, Hook, Override
from padiff.system.guard import RAISING, Guard


def original(module: Any) -> Any:
    """The module inside ``torch.compile``'s wrapper; any other module itself."""
    # Never imported here: that takes seconds, and where nothing is compiled nobody needs it.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def compiled_in_place(module: Any) -> bool:
    """Whether ``module.compile()`` was called."""
    return vars(module).get("_compiled_call_impl") is not None


def on_calls(module: Any, key: Any, before: BeforeCall, after: AfterCall, guard: Guard = RAISING) -> list[Handle]:
    """Call ``before`` and ``after`` around each call of a module."""
    hooks = _Before(key, before, guard), _After(key, after, guard)
    return [_hook_around(module, *hooks)] if compiled_in_place(module) else [_Hooked(module, *hooks)]


class _Before(Hook):
    __slots__ = ()

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._guard.tripped:
            return
        try:
            self._call(self._key, module, args, kwargs)
        except Exception as error:
            self._guard.catch(error)


class _After(Hook):
    __slots__ = ()

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._guard.tripped:
            return
        # Always called, after an exception in forward too, with no output then.
        failed = output is None and sys.exc_info()[0] is not None
        try:
            self._call(self._key, module, output, failed)
        except Exception as error:
            self._guard.catch(error)


class _Hooked:
    """Hooks on a module, as ``register_forward_hook`` sets them, but under a key that is the same from step to step.

    Each registered hook has a new number, which torch.compile looks at: it would compile anew for each recorded step,
    and after some give up compiling.
    """

    _BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    _AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

    def __init__(self, module: Any, before: Hook, after: Hook) -> None:
        self._module = module
        self._key = -1  # torch counts its own from 0 on
        while self._key in module._forward_hooks:  # another recorder's
            self._key -= 1
        for names, hook in ((self._BEFORE, before), (self._AFTER, after)):
            for name in names:
                getattr(module, name)[self._key] = hook if name == names[0] else True

    def remove(self) -> None:
        for name in (*self._BEFORE, *self._AFTER):
            getattr(self._module, name).pop(self._key, None)


def _hook_around(module: Any, before: _Before, after: _After) -> Handle:
    """See the calls of a module that is compiled in place, whose own hooks are compiled with it."""
    compiled = vars(module)["_compiled_call_impl"]

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside of another compiled module
            return compiled(*args, **kwargs)
        before(module, args, kwargs)
        try:
            output = compiled(*args, **kwargs)
        except BaseException:
            after(module, args, kwargs, None)
            raise
        after(module, args, kwargs, output)
        return output

    return Override(module, "_compiled_call_impl", call)


def compiled_paths(model: Any) -> Iterator[str]:
    """Paths of the compiled modules that have others inside."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing is compiled without it
        return
    for name, module in model.named_modules():
        compiled = original(module) is not module or compiled_in_place(module)
        if compiled and any(True for _ in original(module).children()):
            yield ".".join(part for part in name.split(".") if part != "_orig_mod")
