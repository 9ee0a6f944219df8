"""Lines of code that fix a cause, in the syntax of each framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from padiff.compare.declared.fixes import optimizer_fix
from padiff.compare.diagnose.hypotheses.fitting import Fit
from padiff.compare.diagnose.hypotheses.rules import Rule
from padiff.compare.diagnose.hypotheses.wording import number_text

# Settings of the rules, by the names that `optimizer_fix` has for them.
_NAMES = {"initial": "initial_accumulator_value", "weight_decay": "decay.coupled"}
_FORMS = frozenset({"nesterov", "amsgrad", "centered"})
# Differences that no argument mends, and forms that belong to a framework's code and are no arguments.
_UNKNOWN = frozenset({"lost", "rate", "corrected", "first_corrected", "second_corrected", "uncorrected_eps"})
_OWN = _UNKNOWN - {"lost", "rate"} | {"single", "inside", "rate_inside"}


def optimizer(
    framework: str,
    reference: Fit,
    changed: Mapping[str, float],
    another: bool,
    declared: str = "",
    parameters: Sequence[str] = (),
    is_right: Callable[[str, Mapping[str, Any]], bool] = lambda rule, values: True,
) -> str:
    """Return the call that creates the candidate's optimizer with the reference's settings; empty if unknown.

    Args:
        reference: the fit of the reference's updates.
        changed: the settings that differ in the candidate.
        another: True if the candidate uses another rule.
        declared: the rule that the candidate's optimizer declares; empty if unknown.
        parameters: the candidate's names of the parameters to set the values for; empty for all parameters.
        is_right: returns False if a rule with some settings does not compute the reference's updates.
    """
    settings = reference.settings
    if _UNKNOWN & {*changed}:
        return ""
    rule = reference.rule.name
    if rule in ("Adam", "AdamW"):
        # The two apply a weight decay in different forms, and are the same without.
        decides = another or declared not in ("Adam", "AdamW")
        decides = decides or "decoupled" in changed or bool("weight_decay" in changed and settings["weight_decay"])
        rule = ("AdamW" if settings["decoupled"] and settings["weight_decay"] else "Adam") if decides else declared
    names = [name for name in (reference.rule.numbers if another else changed) if name not in _OWN]
    # Epsilon means something else where the framework adds it elsewhere.
    names = [name for name in names if name != "eps" or "inside" not in changed]
    if another:
        names = [name for name in names if settings[name]]
    elif not names or names == ["decoupled"]:
        names = []
        if "decoupled" not in changed:
            return ""
    elif "decoupled" in changed and settings["weight_decay"] and "weight_decay" not in names:
        names.append("weight_decay")
    values = {
        _name(name, reference.rule): bool(value) if name in _FORMS else float(number_text(value))
        for name, value in settings.items()
    }
    listed = [_name(name, reference.rule) for name in names if name != "decoupled"]
    # AdamW has a weight decay by default.
    others = {"decay.decoupled": changed["weight_decay"]} if parameters and _is_new(rule, declared, changed) else {}
    if not is_right(rule, {name: values[name] for name in listed}):
        return ""
    return optimizer_fix(framework, rule, listed, values, parameters, others=others)


def _name(name: str, rule: Rule) -> str:
    return "rho" if name == "alpha" and rule.name == "Adadelta" else _NAMES.get(name, name)


def rate(framework: str) -> str:
    """Return the line that sets a learning rate: empty, as none is known."""
    return ""


def clipping(framework: str, limit: float) -> str:
    """Return the line that clips by the norm of all gradients."""
    lines = {
        "torch": f"torch.nn.utils.clip_grad_norm_(model.parameters(), {number_text(limit)})",
        "paddle": f"grad_clip=paddle.nn.ClipGradByGlobalNorm({number_text(limit)})",
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


def _is_new(rule: str, declared: str, changed: Mapping[str, float]) -> bool:
    """Return True if a weight decay needs AdamW, which the candidate does not declare."""
    return rule == "AdamW" and declared != "AdamW" and "weight_decay" in changed
