"""Hooks on calls and gradients of paddle; see `padiff.frameworks.hooking.Hooking`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import paddle

from padiff.frameworks.direct_calls import DirectCalls
from padiff.frameworks.hooking import (
    AfterCall,
    BeforeCall,
    FunctionListener,
    Handle,
    Hook,
    HookEntry,
    OnCall,
    OnGradient,
    Replaced,
    breadth_first,
)
from padiff.frameworks.paddle.function_tracing import FunctionTracing
from padiff.frameworks.paddle.functions import FunctionHooks
from padiff.frameworks.paddle.losses import on_losses as on_losses
from padiff.system.guard import RAISING, Guard

RAISES_AS_IT_IS = False  # paddle raises an OSError for any exception
READ = True  # by to_static
# Layers of paddle 3.0 and 3.1 call the listed hooks only, and none after an exception in forward.
_LISTED = not hasattr(paddle.nn.Layer(), "_forward_post_hooks_always_called")


def before_capture(capture: Callable[[], None], guard: Guard = RAISING) -> Handle | None:
    return None


class _Before(Hook):
    __slots__ = ()

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # While to_static builds its graph, tensors have no values, and reading them crashes paddle.
        if not paddle.in_dynamic_mode() or self._guard.tripped:
            return
        self.called = True
        try:
            if id(layer) == self._layer:
                self._call(self._key, layer, args, kwargs)
        except Exception as error:
            self._guard.catch(error)


class _After(Hook):
    __slots__ = ("_unbuilt",)

    def __init__(self, key: Any, call: AfterCall, layer: Any, guard: Guard) -> None:
        super().__init__(key, call, layer, guard)
        # paddle never marks a layer without hooks and without anything to build as built.
        self._unbuilt = type(layer)._build_once is paddle.nn.Layer._build_once and not layer._built

    def __call__(self, layer: Any, _: Any, output: Any) -> None:
        if self._unbuilt and len(layer._forward_pre_hooks) == len(layer._forward_post_hooks) == 1:
            vars(layer)["_built"] = False
        if not paddle.in_dynamic_mode() or self._guard.tripped:
            return
        # This hook is also called after an exception in forward, without an output.
        failed = output is None and sys.exc_info()[0] is not None
        try:
            if id(layer) == self._layer:
                self._call(self._key, layer, output, failed)
        except Exception as error:
            self._guard.catch(error)


def on_compilations() -> None:
    return None  # to_static gives no graph that can be run again


def on_regions(layers: Iterable[tuple[str, Any]], inside: Callable[[], str], guard: Guard) -> None:
    return None


def on_calls(layer: Any, key: Any, before: BeforeCall, after: AfterCall, guard: Guard = RAISING) -> list[Handle]:
    befores = [layer._forward_pre_hooks_with_kwargs_flag]
    always = getattr(layer, "_forward_post_hooks_always_called", None)
    afters = [] if always is None else [always]
    first, last = _Before(key, before, layer, guard), _After(key, after, layer, guard)
    direct = DirectCalls.of_layer(layer, first, partial(_ended, last))  # first: if it fails, no hook is left on
    return [
        *direct,
        HookEntry(layer._forward_pre_hooks, first, befores, listed=False),
        HookEntry(layer._forward_post_hooks, last, afters, listed=_LISTED),
    ]


def _ended(after: _After, layer: Any, output: Any) -> None:
    after(layer, (), output)


def aside() -> AbstractContextManager[Any]:
    return nullcontext()  # paddle has no dispatch modes


def on_outputs(layer: Any, replaced: Replaced) -> Handle:
    return HookEntry(layer._forward_post_hooks, lambda _, args, output: replaced(args, output), listed=_LISTED)


def on_functions(called: OnCall, third_party: Sequence[str], guard: Guard = RAISING) -> Handle:
    return FunctionHooks(called, third_party, guard)


def hear_functions(listener: FunctionListener) -> FunctionTracing:
    return FunctionTracing(listener)


def on_gradient(tensor: Any, gradient: OnGradient) -> Handle | None:
    handle: Handle | None = None if tensor.stop_gradient else tensor.register_hook(gradient)
    return handle


def gradient_hook(gradient: OnGradient) -> None:
    return None  # paddle creates a new object for each hook


def behind(tensor: Any, most: int) -> Iterator[tuple[Any, int]]:
    return breadth_first(tensor.grad_fn, lambda node: node.next_functions, most)


def transforming() -> bool:
    return False


def learning() -> bool:
    return bool(paddle.is_grad_enabled())


def recomputing() -> bool:
    # paddle has no flag of a running backward; its recompute calls forward from a PyLayer's backward.
    if "paddle.distributed.fleet.recompute.recompute" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("backward", "unpack") and code.co_filename.endswith("recompute.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
