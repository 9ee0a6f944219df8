"""paddle's loss functions and clipping; see `padiff.frameworks.losses`.

paddle's loss layers call these functions, except ``MSELoss``, which computes the loss in its own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.nn import functional

from padiff.frameworks.losses import ROLES, ClipCall, Function, LossCalls, LossObserver


def on_losses(observer: LossObserver) -> LossCalls:
    backwards = ((paddle.Tensor, "backward"), (paddle.autograd, "backward"))
    return LossCalls(_functions(), _clips(), _scalers(), backwards, observer, _is_tensor, _learning, _silent)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, paddle.Tensor)


def _learning(tensor: Any) -> bool:
    return not tensor.stop_gradient


def _silent() -> bool:
    return not paddle.in_dynamic_mode()


# paddle's name of a loss function -> the common name, if they differ.
_NAMES = {
    "multi_label_margin_loss": "multilabel_margin_loss",
    "multi_label_soft_margin_loss": "multilabel_soft_margin_loss",
}


def _functions() -> Iterator[Function]:
    reads: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "cross_entropy": _cross_entropy,
        "smooth_l1_loss": _smooth_l1,
        "ctc_loss": lambda arguments: {
            "roles": ("logits", *ROLES["ctc_loss"][1:])
        },  # paddle applies the softmax itself
    }
    for name in (*ROLES, *_NAMES):
        if hasattr(functional, name):
            yield Function(functional, name, _NAMES.get(name, name), read=reads.get(name))
    with_softmax = {"reduction": "none", "label_smoothing": 0.0}
    yield Function(functional, "softmax_with_cross_entropy", "cross_entropy", with_softmax, _cross_entropy)
    yield Function(functional, "square_error_cost", "mse_loss", {"reduction": "none"})
    yield Function(paddle.nn.MSELoss, "forward", "mse_loss", read=lambda a: {"reduction": a["self"].reduction})


def _cross_entropy(arguments: dict[str, Any]) -> dict[str, Any]:
    logits = arguments.get("input", arguments.get("logits"))
    labels = arguments.get("label", arguments.get("target"))
    softmax = bool(arguments.get("use_softmax", True))
    settings: dict[str, Any] = {"use_softmax": softmax}
    if not softmax:
        settings["roles"] = ("probabilities", "labels")
    if logits is not None and labels is not None:
        # With smoothing, labels of the logits' shape are soft labels, whatever `soft_label` is.
        smoothed = bool(arguments.get("label_smoothing")) and logits.shape == labels.shape
        settings["soft_label"] = bool(arguments.get("soft_label")) or smoothed
        axis = int(arguments["axis"])
        settings["axis"] = -1 if axis in (-1, logits.ndim - 1) else axis % logits.ndim
    return settings


def _smooth_l1(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the function's common name and threshold: paddle's smooth L1 loss is the Huber loss by default."""
    delta = float(arguments["delta"])
    if arguments.get("is_huber", True):
        return {"function": "huber_loss", "delta": delta}
    arguments.pop("delta")
    return {"function": "smooth_l1_loss", "beta": delta}


def _clips() -> Iterator[tuple[Any, str, Callable[[dict[str, Any], Any], ClipCall | None]]]:
    reads = {"clip_grad_norm_": _by_norm, "clip_grad_value_": _by_value}
    for name, read in reads.items():
        if hasattr(paddle.nn.utils, name):
            yield paddle.nn.utils, name, read


def _scalers() -> Iterator[tuple[Any, str, Callable[[Any], float]]]:
    # GradScaler.scale calls this method of its base class.
    yield paddle.amp.AmpScaler, "scale", _scale


def _scale(scaler: Any) -> float:
    return float(scaler._scale.item()) if scaler.is_enable() else 1.0


def _by_norm(arguments: dict[str, Any], output: Any) -> ClipCall:
    order = float(arguments["norm_type"])
    kind = "global_norm" if order == 2 else "norm"
    return ClipCall(kind, float(arguments["max_norm"]), order, output)


def _by_value(arguments: dict[str, Any], output: Any) -> ClipCall:
    return ClipCall("value", float(arguments["clip_value"]))
