"""Hooks on calls and gradients of PyTorch; see `padiff.frameworks.hooking.Hooking`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from padiff.frameworks.hooking import FunctionListener, Handle, HookEntry, OnCall, OnGradient, Replaced, breadth_first
from padiff.frameworks.interception import InterceptedCall, Interception, Listener
from padiff.frameworks.torch.calls import on_calls as on_calls
from padiff.frameworks.torch.function_tracing import FunctionTracing
from padiff.frameworks.torch.functions import FunctionHooks
from padiff.frameworks.torch.losses import on_losses as on_losses
from padiff.frameworks.torch.modes import aside as aside
from padiff.frameworks.torch.regions import on_compilations as on_compilations
from padiff.frameworks.torch.regions import on_regions as on_regions
from padiff.frameworks.torch.tensor_memory import transforming as transforming
from padiff.frameworks.torch.watching import OWN_CLASSES
from padiff.system.guard import RAISING, Guard

RAISES_AS_IT_IS = True
READ = False  # hooks do nothing while torch compiles


def on_outputs(layer: Any, replaced: Replaced) -> Handle:
    return HookEntry(layer._forward_hooks, lambda _, args, output: replaced(args, output), listed=False)


class _BeforeCapture(Listener):
    """Listener of the method that begins a capture."""

    def __init__(self, capture: Callable[[], None], guard: Guard) -> None:
        self._capture, self.guard = capture, guard

    def instead(self, call: InterceptedCall, name: str) -> None:
        """Note that a capture begins; the call itself is left alone."""
        self._capture()


def before_capture(capture: Callable[[], None], guard: Guard = RAISING) -> Handle | None:
    name = "capture_begin"
    if name not in vars(torch.cuda.CUDAGraph):
        return None
    return Interception(torch.cuda.CUDAGraph, name, _BeforeCapture(capture, guard), name)


def on_functions(called: OnCall, third_party: Sequence[str], guard: Guard = RAISING) -> Handle:
    return FunctionHooks(called, guard)


def hear_functions(listener: FunctionListener) -> FunctionTracing:
    return FunctionTracing(listener)


def on_gradient(tensor: Any, gradient: OnGradient) -> Handle | None:
    if not tensor.requires_grad:
        return None
    hooks = gradient_hook(gradient)
    if hooks.register(tensor):
        return _OfGraph(hooks, _KEY)
    existing = tensor._backward_hooks
    if isinstance(existing, _Hooks):  # another recorder's
        return _OfGraph(existing, existing.add(gradient))
    if existing is not None:
        return HookEntry(existing, gradient)
    handle: Handle = tensor.register_hook(gradient)
    return handle


def gradient_hook(gradient: OnGradient) -> _Hooks:
    return _Hooks(gradient)


# Below 0, because torch counts its keys from 0.
_KEY = -1


class _Hooks(dict[int, OnGradient]):
    """A tensor's dictionary of gradient hooks, in place of torch's own dictionary.

    torch refers to the dictionary weakly. Iteration yields only the keys of the user's hooks, so that torch does not
    warn of unsaved hooks when a tensor is saved.
    """

    __slots__ = ("__weakref__", "callback")

    def __init__(self, gradient: OnGradient) -> None:
        super().__init__()
        self.callback: Any = gradient
        self[_KEY] = gradient

    def __iter__(self) -> Iterator[int]:
        return iter([key for key in dict.keys(self) if key >= 0])

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def add(self, gradient: OnGradient) -> int:
        """Add a hook, and return its key."""
        key = min([0, *dict.keys(self)]) - 1
        self[key] = gradient
        return key

    def discard(self, key: int) -> None:
        """Remove a hook and all references to it."""
        self.pop(key, None)
        if key == _KEY:
            self.callback = None

    def register(self, tensor: Any) -> bool:
        """Register this hook on a tensor as `register_hook` does, in half the time; return True on success.

        A tensor that requires no gradient gets no hook, and counts as a success.

        The handles of `register_hook` are slow, because each one increments a counter in their class, which
        invalidates Python's attribute caches.
        """
        node = tensor.grad_fn
        if tensor._backward_hooks is not None or type(tensor) not in OWN_CLASSES or len(self) != 1:
            return not tensor.requires_grad
        if node is not None:
            tensor._backward_hooks = self
            node._register_hook_dict(tensor)
        elif tensor.requires_grad:
            tensor._backward_hooks = self
        return True


class _OfGraph:
    """A handle of a hook on a gradient; for a computed tensor, the hook lives as long as the graph."""

    __slots__ = ("_hooks", "_key")

    def __init__(self, hooks: _Hooks, key: int) -> None:
        self._hooks, self._key = hooks, key

    def remove(self) -> None:
        self._hooks.discard(self._key)


def behind(tensor: Any, most: int) -> Iterator[tuple[Any, int]]:
    return breadth_first(tensor.grad_fn, lambda node: [before for before, _ in node.next_functions], most)


def learning() -> bool:
    return bool(torch.is_grad_enabled())


_backward_now = torch._C._current_graph_task_id


def recomputing() -> bool:
    # The id of the running backward, -1 outside of backward. torch.utils.checkpoint uses the same function.
    return bool(_backward_now() != -1)
