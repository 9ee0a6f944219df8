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

RAISES_AS_IT_IS = True


def on_outputs(layer: Any, replaced: Replaced) -> Handle:
    handle: Handle = layer.register_forward_hook(lambda _, args, output: replaced(args, output))
    return handle


def on_functions(called: OnCall, third_party: Sequence[str]) -> Handle:
    return Seeing(called)


def hear_functions(listener: FunctionListener) -> Hearing:
    return Hearing(listener)


def on_gradient(tensor: Any, gradient: OnGradient) -> Handle | None:
    handle: Handle | None = tensor.register_hook(gradient) if tensor.requires_grad else None
    return handle


def behind(tensor: Any, most: int) -> Iterator[tuple[Any, int]]:
    return breadth_first(tensor.grad_fn, lambda node: [before for before, _ in node.next_functions], most)


def learning() -> bool:
    return bool(torch.is_grad_enabled())


def recomputing() -> bool:
    # The number of the running backward, -1 outside of one. torch.utils.checkpoint itself asks this way.
    return bool(torch._C._current_graph_task_id() != -1)
