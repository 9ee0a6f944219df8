"""Hooks on the calls of torch modules, including modules under ``torch.compile``.

A compiled module is recorded from outside, because its sublayers are not called in Python. Hooks on its sublayers do
nothing while torch compiles: otherwise each hook would break the graph and so change the compiled code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from padiff.frameworks.direct_calls import DirectCalls
from padiff.frameworks.hooking import AfterCall, BeforeCall, Handle, Hook, HookEntry
from padiff.frameworks.overrides import Override
from padiff.frameworks.torch.modes import aside, building, is_compiling
from padiff.system.guard import RAISING, Guard


def original(module: Any) -> Any:
    """Return the module inside ``torch.compile``'s wrapper; any other module itself."""
    # Not imported here: the import takes seconds, and is needed only if something was compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def compiled_in_place(module: Any) -> bool:
    """Return True if ``module.compile()`` was called."""
    return vars(module).get("_compiled_call_impl") is not None


def compiling_is_off() -> bool:
    """Return True if what was compiled runs eagerly now: ``torch.compiler.set_stance``, ``TORCH_COMPILE_DISABLE``."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(getattr(dynamo, "_stance", None), "stance", "")
    config = sys.modules.get("torch._dynamo.config")
    return stance == "force_eager" or bool(getattr(config, "disable", False))


def on_calls(module: Any, key: Any, before: BeforeCall, after: AfterCall, guard: Guard = RAISING) -> list[Handle]:
    """Call ``before`` and ``after`` around each call of a module."""
    first, last = _Before(key, before, module, guard), _After(key, after, module, guard)
    if compiled_in_place(module):
        return [Override(module, "_compiled_call_impl", partial(_called, module, first, last), guard)]
    befores = [module._forward_pre_hooks_with_kwargs]
    afters = [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]
    direct = DirectCalls.of_layer(module, first, partial(_ended, last))  # first: if it fails, no hook is left on
    return [
        *direct,
        HookEntry(module._forward_pre_hooks, first, befores, listed=False),
        HookEntry(module._forward_hooks, last, afters, listed=False),
    ]


class _Hook(Hook):
    __slots__ = ()

    def _is_meant(self, module: Any) -> bool:
        # DataParallel creates a replica for each device.
        return id(module) == self._layer or "_is_replica" in vars(module)


class _Before(_Hook):
    __slots__ = ()

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if is_compiling() or self._guard.tripped:
            return
        self.called = True
        try:
            if self._is_meant(module) and not building():
                with aside():
                    self._call(self._key, module, args, kwargs)
        except Exception as error:
            self._guard.catch(error)


class _After(_Hook):
    __slots__ = ()

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or self._guard.tripped:
            return
        # This hook is also called after an exception in forward, without an output.
        failed = output is None and sys.exc_info()[0] is not None
        try:
            if self._is_meant(module) and not building():
                with aside():
                    self._call(self._key, module, output, failed)
        except Exception as error:
            self._guard.catch(error)


def _called(module: Any, before: _Before, after: _After, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module that is compiled in place, with padiff's hooks outside, because its own hooks are compiled too."""
    before(module, args, kwargs)
    try:
        output = compiled(*args, **kwargs)
    except BaseException:
        after(module, args, kwargs, None)
        raise
    after(module, args, kwargs, output)
    return output


def _ended(after: _After, module: Any, output: Any) -> None:
    after(module, (), {}, output)


def compiled_paths(model: Any) -> Iterator[str]:
    """Yield the paths of the compiled modules that have submodules."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing is compiled without it
        return
    for name, module in model.named_modules():
        compiled = original(module) is not module or compiled_in_place(module)
        if compiled and any(True for _ in original(module).children()):
            yield ".".join(part for part in name.split(".") if part != "_orig_mod")
