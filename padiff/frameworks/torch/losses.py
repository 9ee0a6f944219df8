"""PyTorch's loss functions and clipping; see `padiff.frameworks.losses`.

The loss modules call these functions. Losses inside of compiled code are not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional, utils

from padiff.frameworks.losses import ROLES, ClipCall, Function, LossCalls, LossObserver
from padiff.frameworks.torch.modes import aside, building, is_compiling
from padiff.frameworks.torch.tensor_memory import transforming


def on_losses(observer: LossObserver) -> LossCalls:
    backwards = ((torch.Tensor, "backward"), (torch.autograd, "backward"))
    return LossCalls(_functions(), _clips(), _scalers(), backwards, observer, _is_tensor, _learning, _silent, aside)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _learning(tensor: Any) -> bool:
    return bool(tensor.requires_grad)


def _silent() -> bool:
    return is_compiling() or transforming() or building()


def _functions() -> Iterator[Function]:
    reads = {"cross_entropy": _cross_entropy, "linear_cross_entropy": _cross_entropy}
    for name in ROLES:
        if hasattr(functional, name):
            yield Function(functional, name, name, read=reads.get(name, _reduction))


def _reduction(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the reduction that the deprecated arguments ``size_average`` and ``reduce`` select; empty without them."""
    average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if average is None and reduce is None:
        return {}
    if reduce is False:
        return {"reduction": "none"}
    return {"reduction": "sum" if average is False else "mean"}


def _cross_entropy(arguments: dict[str, Any]) -> dict[str, Any]:
    target, logits = arguments.get("target"), arguments.get("input")
    soft = isinstance(target, torch.Tensor) and target.is_floating_point()
    settings = {"soft_label": soft, "use_softmax": True, **_reduction(arguments)}
    if isinstance(logits, torch.Tensor):
        # Classes are the second axis, which is the last one of a matrix.
        settings["axis"] = -1 if logits.dim() <= 2 else 1
    return settings


def _clips() -> Iterator[tuple[Any, str, Callable[[dict[str, Any], Any], ClipCall | None]]]:
    reads = {"clip_grad_norm_": _by_norm, "clip_grads_with_norm_": _with_norm, "clip_grad_value_": _by_value}
    for name, read in reads.items():
        if hasattr(utils, name):
            yield utils, name, read


def _scalers() -> Iterator[tuple[Any, str, Callable[[Any], float]]]:
    for module, name in (
        ("torch.amp" if hasattr(torch.amp, "GradScaler") else "torch.cuda.amp", "GradScaler"),  # before torch 2.3
        ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
    ):
        scaler = getattr(sys.modules.get(module), name, None)
        if scaler is not None and "scale" in vars(scaler):
            yield scaler, "scale", lambda self: float(self.get_scale())


def _by_norm(arguments: dict[str, Any], output: Any) -> ClipCall:
    order = float(arguments["norm_type"])
    kind = "global_norm" if order == 2 else "norm"
    return ClipCall(kind, float(arguments["max_norm"]), order, output)


def _with_norm(arguments: dict[str, Any], output: Any) -> ClipCall:
    # The order of the norm is unknown here: only the caller knows it.
    return ClipCall("global_norm", float(arguments["max_norm"]), None, arguments["total_norm"])


def _by_value(arguments: dict[str, Any], output: Any) -> ClipCall:
    return ClipCall("value", float(arguments["clip_value"]))
