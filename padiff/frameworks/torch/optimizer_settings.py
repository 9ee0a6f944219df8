"""Settings of PyTorch's optimizers, under the names that both frameworks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from padiff.frameworks.optimizer_catalog import classes
from padiff.frameworks.optimizing import OptimizerGroup, OptimizerSettings

# torch's class -> the common name of its rule. Classes such as ASGD are absent: the frameworks' rules differ.
_RULES = {name: rule for name, (rule, _) in classes("torch").items() if hasattr(torch.optim, name)}
# Arguments that are omitted, because they change no result or are reported under another name.
_LEFT_OUT = frozenset(
    ("params", "lr", "foreach", "fused", "capturable", "differentiable", "weight_decay", "decoupled_weight_decay")
)
# Arguments that are pairs -> the names of their items.
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
            # Lists of plain values, because pairs would be that many objects for the garbage collector.
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
    values: dict[str, Any] = {}
    # Groups also hold values of schedulers; the optimizer has defaults for its own.
    for name in optimizer.defaults:
        if name in _LEFT_OUT or name not in group:
            continue
        value = group[name]
        if name in _PAIRS and len(value) == 2:
            values |= zip(_PAIRS[name], value)
        elif value is not None:
            values[name] = value
    if "weight_decay" in group:
        decoupled = rule in _DECOUPLED or group.get("decoupled_weight_decay")
        values["decay.decoupled" if decoupled else "decay.coupled"] = group["weight_decay"]
    return values
