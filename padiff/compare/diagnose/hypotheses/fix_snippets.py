"""Lines of code that fix a cause, in the syntax of each framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPTIMIZERS: dict[str, dict[str, str]] = {
    "torch": {"SGD": "SGD", "RMSProp": "RMSprop", "AdamW": "AdamW"},
    "paddle": {"SGD": "Momentum", "RMSProp": "RMSProp", "AdamW": "AdamW"},
}
_PLACES = {"torch": "torch.optim", "paddle": "paddle.optimizer"}
#: Arguments of optimizers by framework and setting; other settings have no argument.
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
    """Return the call that creates the candidate's optimizer with the reference's settings; empty if unknown.

    Args:
        reference: the `Fit` of the reference's updates.
        changed: the settings that differ in the candidate.
        another: True if the candidate uses another rule.
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
    """Return the line that sets a learning rate: empty, as none is known."""
    return ""


def clipping(framework: str, limit: float) -> str:
    """Return the line that clips by the norm of all gradients."""
    lines = {
        "torch": f"torch.nn.utils.clip_grad_norm_(model.parameters(), {_number(limit)})",
        "paddle": f"grad_clip=paddle.nn.ClipGradByGlobalNorm({_number(limit)})",
    }
    return lines.get(framework, "")


def training(framework: str) -> str:
    """Return the line that makes a parameter trainable."""
    return {"torch": "parameter.requires_grad_(True)", "paddle": "parameter.stop_gradient = False"}.get(framework, "")


def holding(framework: str) -> str:
    """Return the call that creates an optimizer with all parameters."""
    lines = {
        "torch": "torch.optim.<Optimizer>(model.parameters(), ...)",
        "paddle": "paddle.optimizer.<Optimizer>(..., parameters=model.parameters())",
    }
    return lines.get(framework, "")


def zeroing(framework: str) -> str:
    """Return the line that zeroes gradients after a step."""
    return {"torch": "optimizer.zero_grad()", "paddle": "optimizer.clear_grad()"}.get(framework, "")


def _number(value: float) -> str:
    return f"{value:.6g}"
