"""State of PyTorch's optimizers, under the names that both frameworks share.

Reading copies the tensors. Setting replaces them by new tensors, so that undoing puts the old tensors back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from padiff.errors import UsageError
from padiff.frameworks.catalog import classes
from padiff.frameworks.hooking import OptimizerGroup, OptimizerSettings, check_rule, check_slots, needed
from padiff.frameworks.torch import tensors
from padiff.records.traces import MU_PRODUCT, OWN, STEPS, OptimizerState, ParameterState, rates_of

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


# Common name of the rule -> torch's name of a tensor of its state -> the common name.
_TENSORS = {rule: known.tensors for rule, known in classes("torch").values() if known.tensors is not None}
_NUMBERS = {"step": STEPS, "mu_product": MU_PRODUCT}


def has_state(optimizers: Sequence[Any]) -> bool:
    return any(
        not _untouched(rule_of(each), entry) and any(map(torch.is_tensor, entry.values()))
        for each in optimizers
        for entry in each.state.values()
    )


def state(optimizers: Sequence[Any], names: Mapping[int, str]) -> OptimizerState:
    """Return the state of one optimizer, which may be a wrapper of several inner ``optimizers``."""
    rule = _rule(optimizers)
    states: dict[str, ParameterState] = {}
    for optimizer in optimizers:
        for parameter, group in _grouped(optimizer):
            name = names.get(id(parameter))
            entry = optimizer.state.get(parameter)
            if name is not None and entry and not _untouched(rule, entry):
                states[name] = _of_parameter(rule, group, entry, parameter)
    return OptimizerState(rule, states, rates_of(_rates(optimizers, names)))


def _rule(optimizers: Sequence[Any]) -> str:
    rules = {rule_of(optimizer) for optimizer in optimizers}
    if len(rules) != 1:
        raise UsageError(
            f"the state of an optimizer that hands its work to several ({', '.join(sorted(rules)) or 'none'}) "
            "can't be described: give these, one by one"
        )
    return next(iter(rules))


def _grouped(optimizer: Any) -> Iterable[tuple[Any, Mapping[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, group


def _rates(optimizers: Sequence[Any], names: Mapping[int, str]) -> Iterable[tuple[str, float]]:
    for optimizer in optimizers:
        for parameter, group in _grouped(optimizer):
            if id(parameter) in names and "lr" in group:
                yield names[id(parameter)], float(group["lr"])


def _untouched(rule: str, state: Mapping[str, Any]) -> bool:
    """Return True for the state of a parameter that was never stepped: Adagrad creates it in advance."""
    return rule == "Adagrad" and float(state.get("step", 1)) == 0


def _of_parameter(rule: str, group: Mapping[str, Any], state: Mapping[str, Any], parameter: Any) -> ParameterState:
    common = _TENSORS.get(rule)
    arrays: dict[str, np.ndarray] = {}
    numbers: dict[str, float] = {}
    for name, value in state.items():
        if common is not None and name in common:
            if value is not None:
                arrays[common[name]] = tensors.copy(value)
        elif common is not None and name in _NUMBERS:
            numbers[_NUMBERS[name]] = float(value)
        elif common is None and isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim:
            arrays[OWN + name] = tensors.copy(value)
        elif common is None and isinstance(value, (int, float, torch.Tensor)) and _single(value):
            numbers[OWN + name] = float(value)
        elif common is None and value is not None:
            raise UsageError(f"{rule} holds {name!r} of a parameter, which is neither a number nor of its shape")
    return ParameterState(arrays, numbers)


def _single(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() == 1


def set_state(optimizers: Sequence[Any], names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
    rule = _rule(optimizers)
    check_rule(new.rule, rule)
    entries: list[tuple[Any, Any, dict[str, Any]]] = []
    for optimizer in optimizers:
        for parameter, group in _grouped(optimizer):
            if id(parameter) in names:
                entries.append((optimizer, parameter, _held(rule, group, parameter, names[id(parameter)], new)))
    rates = _new_rates(optimizers, names, new)
    before = [(optimizer, parameter, optimizer.state.get(parameter)) for optimizer, parameter, _ in entries]
    rates_before = [(group, group["lr"], _copied(group["lr"])) for group, _ in rates]

    def undo() -> None:
        for optimizer, parameter, entry in before:
            _put(optimizer, parameter, entry)
        for group, rate, value in rates_before:
            if isinstance(rate, torch.Tensor):
                rate.copy_(value)
            group["lr"] = rate

    try:
        for optimizer, parameter, entry in entries:
            _put(optimizer, parameter, entry)
        for group, rate in rates:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
    except BaseException:
        undo()
        raise
    return undo


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _put(optimizer: Any, parameter: Any, state: dict[str, Any] | None) -> None:
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


def _new_rates(
    optimizers: Sequence[Any], names: Mapping[int, str], new: OptimizerState
) -> list[tuple[dict[str, Any], float]]:
    rates = []
    for opt in optimizers:
        for number, group in enumerate(opt.param_groups):
            sites = [names[id(p)] for p in group["params"] if id(p) in names]
            values = {rate for rate in map(new.rate, sites) if rate is not None}
            if len(values) > 1:
                raise UsageError(
                    f"group {number} of {type(opt).__name__} has one learning rate, but its parameters were stepped at "
                    f"{', '.join(f'{value:g}' for value in sorted(values))}: give it the groups that the other has"
                )
            if values and "lr" in group:
                rates.append((group, values.pop()))
    return rates


def _held(rule: str, group: Mapping[str, Any], parameter: Any, site: str, new: OptimizerState) -> dict[str, Any]:
    """Return the new entry of ``optimizer.state`` for a parameter; an initial one if ``new`` omits the parameter."""
    common_names = _TENSORS.get(rule, {})
    state = new.parameters.get(site)
    if state is None:
        return _fresh(rule, group, parameter)
    slots = _wanted(rule, group)
    check_slots(rule, site, state, slots, tuple(parameter.shape))
    back = {common: name for name, common in common_names.items()}
    entry: dict[str, Any] = {}
    if rule not in _TENSORS:
        for name, array in state.tensors.items():
            entry[name.removeprefix(OWN)] = _like(parameter, array)
        entry |= {name.removeprefix(OWN): value for name, value in state.numbers.items()}
        return entry
    if rule != "SGD":
        entry["step"] = _number(_steps(group, site, state), group, parameter)
    if rule == "NAdam":
        if MU_PRODUCT not in state.numbers:
            raise UsageError(f"{site}: the state of NAdam has no product of momenta ({MU_PRODUCT})")
        entry["mu_product"] = _number(state.numbers[MU_PRODUCT], group, parameter)
    entry |= {back[name]: _like(parameter, state.tensors[name]) for name in slots or ()}
    return entry


def _wanted(rule: str, group: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the common names of the tensors that a rule needs under a group's settings; `None` for an unknown rule."""
    return needed(_TENSORS[rule].values(), group) if rule in _TENSORS else None


def _steps(group: Mapping[str, Any], site: str, state: ParameterState) -> float:
    if STEPS in state.numbers:
        return state.numbers[STEPS]
    if group.get("lr_decay"):
        raise UsageError(f"{site}: the state has no count of steps, which lr_decay needs")
    return 1.0  # no effect on this rule: torch stores a count, the other framework may have none


def _fresh(rule: str, group: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    if rule != "Adagrad":
        return {}
    start = group.get("initial_accumulator_value", 0.0)
    return {"step": _number(0.0, group, parameter), "sum": torch.full_like(parameter.detach(), start)}


def _number(value: float, group: Mapping[str, Any], parameter: Any) -> torch.Tensor:
    on_device = group.get("capturable") or group.get("fused")
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group.get("fused") else torch.float32
    return torch.tensor(float(value), dtype=dtype, device=parameter.device if on_device else "cpu")


def _like(parameter: Any, array: np.ndarray) -> torch.Tensor:
    tensor: torch.Tensor = tensors.like(parameter.detach(), array)
    return tensor
