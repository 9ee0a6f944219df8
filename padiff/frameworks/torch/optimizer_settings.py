"""What an optimizer of PyTorch is set to, under the names that paddle's have too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from padiff.frameworks.optimizing import OptimizerGroup, OptimizerSettings

# torch's class -> the common name of its rule. Others (ASGD) mean another rule in each framework.
_RULES = {
    name: common
    for name, common in (
        *((name, name) for name in ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam")),
        *((name, name) for name in ("Rprop", "LBFGS", "Adafactor")),
        ("RMSprop", "RMSProp"),
    )
    if hasattr(torch.optim, name)
}
# What says how something is computed and not what: it changes no result, or is said by another name.
_LEFT_OUT = frozenset(
    ("params", "lr", "foreach", "fused", "capturable", "differentiable", "weight_decay", "decoupled_weight_decay")
)
# Pairs of values that have names of their own.
_PAIRS = {
    "betas": ("beta1", "beta2"),
    "etas": ("eta_minus", "eta_plus"),
    "step_sizes": ("step_min", "step_max"),
}
_DECOUPLED = frozenset({"AdamW", "Adafactor"})


def settings(optimizer: Any) -> OptimizerSettings:
    rule = rule_of(optimizer)
    groups, rates = [], 0
    for group in optimizer.param_groups:
        values = _values(optimizer, group, rule)
        if "lr" in group:
            values |= {"lr": group["lr"], "rate": rates}
            rates += 1
        groups.append(OptimizerGroup(values, group["params"]))
    return OptimizerSettings(rule, groups)


def settings_stamp(optimizer: Any) -> Any:
    return [
        (
            [(name, _stamp(value)) for name, value in group.items() if name not in ("params", "lr")],
            # Lists of plain values: pairs would be as many objects for the garbage collector.
            list(map(id, group["params"])),
            [parameter.requires_grad for parameter in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def _stamp(value: Any) -> Any:
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


def rule_of(optimizer: Any) -> str:
    kind = type(optimizer)
    name = kind.__name__
    if name in _RULES and kind is getattr(torch.optim, name):
        return _RULES[name]
    return f"{kind.__module__}.{kind.__qualname__}"


def _values(optimizer: Any, group: Mapping[str, Any], rule: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Schedulers keep values of their own in the groups; the optimizer's are those that it has defaults for.
    for name in optimizer.defaults:
        if name in _LEFT_OUT or name not in group:
            continue
        value = group[name]
        if name in _PAIRS and len(value) == 2:
            found |= zip(_PAIRS[name], value)
        elif value is not None:
            found[name] = value
    if "weight_decay" in group:
        decoupled = rule in _DECOUPLED or group.get("decoupled_weight_decay")
        found["decay.decoupled" if decoupled else "decay.coupled"] = group["weight_decay"]
    return found
