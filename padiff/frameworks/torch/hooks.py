"""Seeing calls and gradients of PyTorch; see `padiff.frameworks.hooking.Hooking`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from padiff.frameworks.hooking import FunctionListener, Handle, OnCall, OnGradient, Replaced, breadth_first
from padiff.frameworks.torch.calls import on_calls as on_calls
from padiff.frameworks.torch.functions import Seeing
from padiff.frameworks.torch.hearing import Hearing
from padiff.frameworks.torch.losses import on_losses as on_losses
from padiff.frameworks.torch.memory import transforming as transforming
from padiff.system.guard import RAISING, Guard

RAISES_AS_IT_IS = True
READ = False  # while torch compiles they do nothing


def on_outputs(layer: Any, replaced: Replaced) -> Handle:
    handle: Handle = layer.register_forward_hook(lambda _, args, output: replaced(args, output))
    return handle


def on_functions(called: OnCall, third_party: Sequence[str], guard: Guard = RAISING) -> Handle:
    return Seeing(called, guard)


def hear_functions(listener: FunctionListener) -> Hearing:
    return Hearing(listener)


def on_gradient(tensor: Any, gradient: OnGradient) -> Handle | None:
    if not tensor.requires_grad:
        return None
    hooks = gradient_hook(gradient)
    if hooks.put(tensor):
        return _OfGraph(hooks)
    handle: Handle = tensor.register_hook(gradient)
    return handle


def gradient_hook(gradient: OnGradient) -> _Hooks:
    hooks = _Hooks()
    hooks[_KEY] = gradient
    return hooks


# torch counts its own from 0 on.
_KEY = -1


class _Hooks(dict[int, OnGradient]):
    """As torch's own, which refers to it weakly; but for the order that torch keeps in a list beside it."""

    __slots__ = ("__weakref__",)

    @property
    def callback(self) -> Any:
        return self[_KEY]

    def put(self, tensor: Any) -> bool:
        """What `register_hook` does, in half its time: its handles are counted in an attribute of their class, and so
        all that is known of the class has to be looked up anew for each of them.
        """
        node = tensor.grad_fn
        if node is None or tensor._backward_hooks is not None or type(tensor) is not torch.Tensor or len(self) != 1:
            return not tensor.requires_grad
        tensor._backward_hooks = self
        node._register_hook_dict(tensor)
        return True


class _OfGraph:
    """A hook on the gradient of a tensor that was computed; it goes with the graph."""

    __slots__ = ("_hooks",)

    def __init__(self, hooks: dict[int, OnGradient]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        self._hooks.pop(_KEY, None)


def behind(tensor: Any, most: int) -> Iterator[tuple[Any, int]]:
    return breadth_first(tensor.grad_fn, lambda node: [before for before, _ in node.next_functions], most)


def learning() -> bool:
    return bool(torch.is_grad_enabled())


_backward_now = torch._C._current_graph_task_id


def recomputing() -> bool:
    # The number of the running backward, -1 outside of one. torch.utils.checkpoint itself asks this way.
    return bool(_backward_now() != -1)
