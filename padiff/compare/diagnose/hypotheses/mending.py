"""The lines that mend a cause, as each framework writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPTIMIZERS: dict[str, dict[str, str]] = {
    "torch": {"SGD": "SGD", "RMSProp": "RMSprop", "AdamW": "AdamW"},
    "paddle": {"SGD": "Momentum", "RMSProp": "RMSProp", "AdamW": "AdamW"},
}
_PLACES = {"torch": "torch.optim", "paddle": "paddle.optimizer"}
#: Arguments by framework and setting; what is not here has no argument.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "torch": {
        "momentum": "momentum={momentum}",
        "dampening": "dampening={dampening}",
        "beta1": "betas=({beta1}, {beta2})",
        "beta2": "betas=({beta1}, {beta2})",
        "eps": "eps={eps}",
        "alpha": "alpha={alpha}",
        "weight_decay": "weight_decay={weight_decay}",
        "nesterov": "nesterov={nesterov}",
        "amsgrad": "amsgrad={amsgrad}",
        "centered": "centered={centered}",
        "initial": "initial_accumulator_value={initial}",
    },
    "paddle": {
        "momentum": "momentum={momentum}",
        "beta1": "beta1={beta1}",
        "beta2": "beta2={beta2}",
        "eps": "epsilon={eps}",
        "alpha": "rho={alpha}",
        "weight_decay": "weight_decay={weight_decay}",
        "nesterov": "use_nesterov={nesterov}",
        "amsgrad": "amsgrad={amsgrad}",
        "centered": "centered={centered}",
        "initial": "initial_accumulator_value={initial}",
    },
}
_FORMS = frozenset({"nesterov", "amsgrad", "centered"})


def optimizer(framework: str, reference: Any, changed: Mapping[str, float], another: bool) -> str:
    """The call that gives the candidate's optimizer the reference's settings; empty where none is known.

    Args:
        reference: the `Fit` of the reference's updates.
        changed: the settings that are other in the candidate.
        another: whether it is another rule.
    """
    place, arguments = _PLACES.get(framework), _ARGUMENTS.get(framework, {})
    if place is None or "lost" in changed or "rate" in changed:
        return ""
    settings = reference.settings
    name = reference.rule.name
    if name in ("Adam", "AdamW"):
        name = "AdamW" if settings["decoupled"] and settings["weight_decay"] else "Adam"
    shown: list[str] = []
    for setting in settings if another else changed:
        if setting not in arguments or (another and not settings[setting]):
            continue
        values = {k: bool(v) if k in _FORMS else _number(v) for k, v in settings.items()}
        text = arguments[setting].format(**values)
        shown += [text] if text not in shown else []
    if not shown and not another and "decoupled" not in changed:
        return ""
    return f"{place}.{_OPTIMIZERS[framework].get(name, name)}({', '.join(['...', *shown])})"


def rate(framework: str) -> str:
    """The line that gives an optimizer another learning rate."""
    return ""


def clipping(framework: str, limit: float) -> str:
    """The line that clips by the norm of all gradients."""
    lines = {
        "torch": f"torch.nn.utils.clip_grad_norm_(model.parameters(), {_number(limit)})",
        "paddle": f"grad_clip=paddle.nn.ClipGradByGlobalNorm({_number(limit)})",
    }
    return lines.get(framework, "")


def training(framework: str) -> str:
    """The line that lets a parameter train."""
    return {"torch": "parameter.requires_grad_(True)", "paddle": "parameter.stop_gradient = False"}.get(framework, "")


def holding(framework: str) -> str:
    """The argument that gives an optimizer all parameters."""
    lines = {
        "torch": "torch.optim.<Optimizer>(model.parameters(), ...)",
        "paddle": "paddle.optimizer.<Optimizer>(..., parameters=model.parameters())",
    }
    return lines.get(framework, "")


def zeroing(framework: str) -> str:
    """The line that zeroes gradients after a step."""
    return {"torch": "optimizer.zero_grad()", "paddle": "optimizer.clear_grad()"}.get(framework, "")


def _number(value: float) -> str:
    return f"{value:.6g}"
