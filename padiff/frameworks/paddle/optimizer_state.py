"""State of paddle's optimizers, under the names that both frameworks share.

Setting a state replaces the accumulators by new ones, so that undoing puts the old ones back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import paddle
from paddle.regularizer import L1Decay, L2Decay

from padiff.errors import UsageError
from padiff.frameworks.catalog import classes
from padiff.frameworks.hooking import OptimizerGroup, OptimizerSettings, check_rule, check_slots, needed
from padiff.frameworks.paddle import tensors
from padiff.records.traces import (
    MASTER_WEIGHT,
    MOMENTUM,
    MU_PRODUCT,
    OWN,
    STEPS,
    OptimizerState,
    ParameterState,
    rates_of,
)

# paddle's class -> its accumulators that hold a power: name, the base (a setting's name), and the initial exponent.
POWERS = {name: known.powers for name, (_, known) in classes("paddle").items() if known.powers}
_MOST_STEPS = 1 << 24
# The most steps whose roundings `rho_of` repeats one by one; with more steps, RAdam equals Adam.
_MOST_ROUNDED = 1 << 16


def _powers(value: float, most: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the powers of a value with exponents 1 to ``most``, rounded after each multiplication as in paddle."""
    powers: np.ndarray = np.multiply.accumulate(np.full(most, value, dtype), dtype=dtype)
    return powers


def steps_of(kind: str, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    """Return the number of steps, computed from the stored powers.

    If the powers are too small to determine the number, the result is a number of steps with powers that small: the
    bias correction has no effect then.

    Args:
        kind: paddle's class of the optimizer.
        values: the optimizer's settings.
        arrays: the parameter's accumulators.
    """
    steps = 0
    for name, value, ahead in POWERS[kind]:
        beta, power = float(values[value]), arrays[name].reshape(-1)[0]
        smallest = float(np.finfo(power.dtype).tiny)
        if not 0 < beta < 1:
            continue
        if float(power) >= 1:
            return 0
        near = int(math.log(max(float(power), smallest)) / math.log(beta))
        if near >= _MOST_STEPS:
            steps = max(steps, near)
            continue
        powers = _powers(beta, near + near // 50 + 8, power.dtype)
        count = int(np.argmin(np.abs(powers.astype(np.float64) - float(power)))) + 1 - ahead
        if float(power) > 2 * smallest:
            return count
        steps = max(steps, count)
    return steps


def power_of(value: float, count: int, dtype: np.dtype[Any]) -> float:
    """Return the power of a value after ``count`` steps, rounded as in paddle."""
    if count <= 0:
        return 1.0
    return float(_powers(value, count, dtype)[-1]) if count < _MOST_STEPS else value**count


def rho_of(beta: float, count: int) -> float:
    """Return the value that RAdam stores between steps, ``count * beta**count / (1 - beta**count)``, rounded as paddle.

    The rounding matters: float32 is coarse here, and the next step amplifies the error.
    """
    if count > _MOST_ROUNDED:
        return count * beta**count / (1 - beta**count)
    unit, value = np.float32(1), np.float32(beta)
    power, rho = unit, unit
    for _ in range(count):
        power = power * value
        rho = (rho * (value - power) + power) / (unit - power)
    return float(rho)


_CLASSES = classes("paddle")
_OF_LBFGS = ("max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn")
_CLIPS = (
    (paddle.nn.ClipGradByGlobalNorm, "global_norm"),
    (paddle.nn.ClipGradByNorm, "tensor_norm"),
    (paddle.nn.ClipGradByValue, "value"),
)
# Attributes of a scheduler that are state, not settings.
_STATE = frozenset({"last_lr", "last_epoch", "verbose", "num_bad_epochs", "cooldown_counter", "best", "base_lr"})


def settings(optimizer: Any) -> OptimizerSettings:
    """Return the settings of an optimizer of paddle, not of a wrapper."""
    rule, names = rule_of(optimizer)
    groups, clips = [], []
    for number, (group, parameters) in enumerate(grouped(optimizer)):
        values = values_of(optimizer, group, names, rule)
        if optimizer._learning_rate is not None:
            values |= {"lr": float(optimizer.get_lr()) * float(group.get("learning_rate", 1.0)), "rate": number}
        groups += _alike(optimizer, rule, group, values, parameters)
        clips.append(group.get("grad_clip") if "grad_clip" in group else optimizer._grad_clip)
    return OptimizerSettings(rule, groups, {**_clip(clips), **_schedule(optimizer._learning_rate)})


def settings_stamp(optimizer: Any) -> Any:
    attributes = vars(optimizer)
    default = attributes.get("_default_dict") or {}
    return (
        [(name, _stamp(value)) for name, value in default.items()],
        _stamp(attributes.get("_grad_clip")),
        _stamp(attributes.get("regularization")),
        id(attributes.get("_learning_rate")) if not isinstance(attributes.get("_learning_rate"), float) else 0,
        [
            (
                [(name, _stamp(value)) for name, value in group.items() if name != "params"],
                [_of_parameter(parameter) for parameter in parameters],
            )
            for group, parameters in grouped(optimizer)
        ],
    )


def _of_parameter(parameter: Any) -> tuple[Any, ...]:
    # One lookup each, because every due step calls this for hundreds of parameters.
    attributes = parameter.__dict__
    factor = (attributes.get("optimize_attr") or {}).get("learning_rate", 1.0)
    factor = factor if isinstance(factor, float) else _stamp(factor)
    return (
        id(parameter),
        id(attributes.get("regularizer")),
        factor,
        attributes.get("need_clip", True),
        parameter.stop_gradient,
    )


def _stamp(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, paddle.Tensor):
        return id(value), value.inplace_version
    limits = [getattr(value, name, None) for name in ("clip_norm", "max", "min", "_coeff")]
    return id(value), *limits


def rule_of(optimizer: Any) -> tuple[str, Mapping[str, str]]:
    kind = type(optimizer)
    name = kind.__name__
    if name in _CLASSES and kind is getattr(paddle.optimizer, name, None):
        rule, known = _CLASSES[name]
        return rule, known.settings
    return f"{kind.__module__}.{kind.__qualname__}", {}


def grouped(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], Sequence[Any]]]:
    listed = optimizer._parameter_list or []
    if listed and isinstance(listed[0], dict):
        for group in optimizer._param_groups:
            yield group, group["params"]
    else:
        yield {}, listed


def values_of(optimizer: Any, group: Mapping[str, Any], names: Mapping[str, str], rule: str) -> dict[str, Any]:
    attributes, default = vars(optimizer), getattr(optimizer, "_default_dict", {})
    values = {}
    for name, common in names.items():
        # After a step, the optimizer's own attributes have the values of its last group.
        value = group.get(name, default.get(name, attributes.get(f"_{name}", attributes.get(name))))
        if value is not None:
            values[common] = value
    if attributes.get("_amsgrad"):
        values["amsgrad"] = True
    if rule == "Rprop":
        # paddle keeps each pair in a list of its own.
        pairs = (np.ravel(attributes.get(name, ())).tolist() for name in ("_etas", "_learning_rate_range"))
        values |= zip(("eta_minus", "eta_plus", "step_min", "step_max"), chain.from_iterable(pairs))
    if rule == "LBFGS":
        values |= {name: attributes[name] for name in _OF_LBFGS if attributes.get(name) is not None}
    if not names and rule not in ("SGD", "Rprop", "LBFGS"):  # a user's own class
        values |= {name: value for name, value in default.items() if isinstance(value, (bool, int, float, str))}
    return values


def _alike(
    optimizer: Any, rule: str, group: Mapping[str, Any], values: Mapping[str, Any], parameters: Sequence[Any]
) -> list[OptimizerGroup]:
    """Split the parameters of a group into groups with the same settings."""
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[Any]]] = {}
    for parameter in parameters:
        settings = {**_decay(optimizer, rule, group, parameter), **_carried(optimizer, parameter)}
        groups.setdefault(tuple(sorted(settings.items())), (settings, []))[1].append(parameter)
    return [OptimizerGroup({**values, **settings}, members) for settings, members in groups.values()]


def _carried(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """Return a single parameter's learning-rate factor and exclusion from clipping, as far as they are not default, and
    the arguments of its `ParamAttr` that have an effect.
    """
    settings: dict[str, Any] = {}
    factor: Any = carried_factor(parameter)
    ratio = getattr(optimizer, "_lr_ratio", None)
    if isinstance(optimizer._param_groups[0], dict):
        factor = 1.0  # the learning rate already includes the factor of the group
    else:  # a group replaces both
        own = {"learning_rate": factor != 1 and ratio is None, "regularizer": parameter.regularizer is not None}
        if any(own.values()):
            settings["param_attr"] = ", ".join(name for name, is_set in own.items() if is_set)
    if ratio is not None:
        factor = factor * ratio(parameter)
    if isinstance(factor, (int, float)) and factor != 1:
        settings["lr_factor"] = float(factor)
    if getattr(parameter, "need_clip", True) is False:
        settings["clipped"] = False
    return settings


def carried_factor(parameter: Any) -> Any:
    """Return the factor of a parameter's learning rate; in an optimizer with groups, this is the group's factor."""
    return (getattr(parameter, "optimize_attr", None) or {}).get("learning_rate", 1.0)


def _decay(optimizer: Any, rule: str, group: Mapping[str, Any], parameter: Any) -> dict[str, float]:
    """Return a parameter's weight decay, by kind: ``decay.coupled``, ``.decoupled``, ``.l1`` or ``.own``."""
    default = getattr(optimizer, "_default_dict", {})
    parameter_regularizer = getattr(parameter, "regularizer", None)
    regularizer = parameter_regularizer if parameter_regularizer is not None else optimizer.regularization
    decay: dict[str, float] = {}
    if rule == "AdamW":
        predicate = optimizer._apply_decay_param_fun
        decays = predicate is None or predicate(parameter.name)
        decay["decay.decoupled"] = _number(group.get("weight_decay", default.get("weight_decay"))) if decays else 0.0
    elif rule == "Lamb":
        without: Callable[[Any], bool] | None = group.get(
            "exclude_from_weight_decay_fn", default.get("exclude_from_weight_decay_fn")
        )
        coefficient = _number(group.get("lamb_weight_decay", default.get("lamb_weight_decay")))
        decay["decay.decoupled"] = 0.0 if without is not None and without(parameter) else coefficient
    elif type(optimizer) is paddle.optimizer.Momentum and parameter_regularizer is None and regularizer is None:
        # Momentum stores an L2 decay separately, and adds it inside of its own update.
        decay["decay.coupled"] = _number(group.get("regularization_coeff", default.get("regularization_coeff", 0.0)))
        return decay
    if regularizer is None:
        return decay or {"decay.coupled": 0.0}
    if isinstance(regularizer, (int, float)):
        decay["decay.coupled"] = float(regularizer)
    elif isinstance(regularizer, (L1Decay, L2Decay)):
        decay["decay.l1" if isinstance(regularizer, L1Decay) else "decay.coupled"] = _number(regularizer._coeff)
    else:
        decay["decay.own"] = 1.0  # a user's own class: its effect is unknown
    return decay


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value or 0.0)


def _clip(clips: Sequence[Any]) -> dict[str, Any]:
    """Return the settings of gradient clipping; empty if the groups clip differently."""
    first = clips[0] if clips else None
    if any(clip is not first for clip in clips):
        return {}
    if first is None:
        return {"clip.kind": "none"}
    kind = next((name for cls, name in _CLIPS if type(first) is cls), None)
    if kind is None:
        return {"clip.kind": f"{type(first).__module__}.{type(first).__qualname__}"}
    if kind == "value":
        settings = {"clip.kind": kind, "clip.limit": float(first.max)}
        return settings if first.min == -first.max else {**settings, "clip.lowest": float(first.min)}
    settings = {"clip.kind": kind, "clip.limit": float(first.clip_norm), "clip.norm_type": 2.0}
    # Each group is clipped by its own norm.
    return {**settings, "clip.by_group": True} if kind == "global_norm" and len(clips) > 1 else settings


def _schedule(rate: Any) -> dict[str, Any]:
    if not isinstance(rate, paddle.optimizer.lr.LRScheduler):
        return {}
    settings: dict[str, Any] = {"schedule": type(rate).__name__}
    for name, value in vars(rate).items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if (
            name not in _STATE
            and not name.startswith("_")
            and all(isinstance(x, (bool, int, float, str)) for x in items)
        ):
            settings[f"schedule.{name}"] = value
    return settings


# paddle's class -> its name of an accumulator -> the common name.
_TENSORS = {name: known.tensors for name, (_, known) in classes("paddle").items() if known.tensors is not None}
# The base of the decay in NAdam's momentum schedule.
_NADAM_BASE = 0.96


@dataclass(frozen=True)
class _Held:
    """A parameter with its optimizer and the optimizer's group."""

    optimizer: Any
    group: Mapping[str, Any]
    parameter: Any

    @property
    def values(self) -> Mapping[str, Any]:
        """The group's settings, by common names."""
        rule, names = rule_of(self.optimizer)
        return values_of(self.optimizer, self.group, names, rule)

    @property
    def accumulators(self) -> dict[str, Any]:
        master = self.optimizer._master_weights.get(self.parameter.name)
        owner = self.parameter.name if master is None else master.name
        prefix = f"{self.optimizer._name}_" if self.optimizer._name is not None else ""
        return {
            name.removeprefix(prefix): tensors[owner]
            for name, tensors in self.optimizer._accumulators.items()
            if owner in tensors
        }

    @property
    def rate(self) -> float:
        return float(self.optimizer.get_lr()) * self.factor

    @property
    def factor(self) -> float:
        """The factor by which the optimizer's learning rate is multiplied for this parameter."""
        ratio = getattr(self.optimizer, "_lr_ratio", None)
        return carried_factor(self.parameter) * (float(ratio(self.parameter)) if ratio is not None else 1.0)


def _held(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, _Held]]:
    for group, parameters in grouped(optimizer):
        for parameter in parameters:
            if id(parameter) in names:
                yield names[id(parameter)], _Held(optimizer, group, parameter)


def state(optimizer: Any, names: Mapping[int, str]) -> OptimizerState:
    rule, _ = rule_of(optimizer)
    entries = list(_held(optimizer, names))
    states = {site: _state_of(entry) for site, entry in entries if entry.accumulators}
    # Omit states that were created but never used.
    states = {site: state for site, state in states.items() if state.numbers.get(STEPS) != 0}
    return OptimizerState(rule, states, rates_of((site, entry.rate) for site, entry in entries))


def _state_of(target: _Held) -> ParameterState:
    kind, accumulators = type(target.optimizer).__name__, target.accumulators
    arrays = {name: tensors.copy(tensor) for name, tensor in accumulators.items()}
    master = target.optimizer._master_weights.get(target.parameter.name)
    slots = {} if master is None else {MASTER_WEIGHT: tensors.copy(master)}
    if not _is_known(target.optimizer):
        shape = tuple(target.parameter.shape)
        slots |= {OWN + name: array for name, array in arrays.items() if array.shape == shape}
        numbers = {OWN + n: float(a.reshape(())) for n, a in arrays.items() if a.shape != shape and a.size == 1}
        return ParameterState(slots, numbers)
    common_names = _wanted(target)
    slots |= {
        common: arrays[name] for name, common in _TENSORS[kind].items() if common in common_names and name in arrays
    }
    if kind == "RMSProp" and MOMENTUM in slots:
        slots[MOMENTUM] = _per_rate(slots[MOMENTUM], target.rate)
    numbers = {}
    if kind in POWERS:
        numbers[STEPS] = float(steps_of(kind, target.values, arrays))
    if kind == "NAdam":
        numbers[MU_PRODUCT] = float(arrays["mu_product"].flat[0])
    return ParameterState(slots, numbers)


def _per_rate(buffer: np.ndarray, rate: float) -> np.ndarray:
    """Divide RMSProp's momentum buffer by the learning rate, which paddle includes in the buffer and torch does not.

    Raises:
        UsageError: the learning rate is 0, and the buffer is not.
    """
    if not buffer.any():
        return buffer
    if rate == 0:
        raise UsageError("the momentum of paddle's RMSProp has the learning rate as a factor, and can't be known at 0")
    return (buffer.astype(np.float64) / rate).astype(buffer.dtype)


def _is_known(optimizer: Any) -> bool:
    return type(optimizer).__name__ in _TENSORS and "." not in rule_of(optimizer)[0]


def _wanted(target: _Held) -> frozenset[str]:
    """Return the common names of the tensors that the optimizer needs under the group's settings."""
    return needed(_TENSORS[type(target.optimizer).__name__].values(), target.values)


# -- setting -------------------------------------------------------------------------------------------------------


def set_state(optimizer: Any, names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
    check_rule(new.rule, rule_of(optimizer)[0])
    entries = list(_held(optimizer, names))
    rates = {site: new.rate(site) for site, _ in entries}
    for site, entry in entries:
        if site in new.parameters:
            state = new.parameters[site]
            check_slots(
                new.rule, site, state, _wanted(entry) if _is_known(optimizer) else None, tuple(entry.parameter.shape)
            )
            if type(optimizer) is paddle.optimizer.NAdam and MU_PRODUCT not in state.numbers:
                raise UsageError(f"{site}: the state of NAdam has no product of momenta ({MU_PRODUCT})")
    if getattr(optimizer, "_use_multi_tensor", None) and any(entry.accumulators for _, entry in entries):
        raise UsageError("an optimizer with use_multi_tensor=True takes a state before its first step only")
    undo = _Undo(optimizer, entries)
    try:
        _set_rates(optimizer, entries, rates)
        for _, entry in entries:
            _drop(entry)
        _create([entry for site, entry in entries if site in new.parameters])
        for site, entry in entries:
            if site in new.parameters:
                _write(site, entry, new.parameters[site])
    except BaseException:
        undo()
        raise
    return undo


class _Undo:
    """A snapshot of the optimizer's state; calling the object restores it."""

    def __init__(self, optimizer: Any, held: Sequence[tuple[str, _Held]]) -> None:
        self._optimizer = optimizer
        self._accumulators = {name: dict(tensors) for name, tensors in optimizer._accumulators.items()}
        self._masters = dict(optimizer._master_weights)
        self._made = set(optimizer._already_create_accumulator)
        self._waiting = dict(optimizer._accumulators_holder)
        self._rate = optimizer._learning_rate
        self._last = getattr(optimizer._learning_rate, "last_lr", None)
        self._factors = [
            (where, where.get("learning_rate"))
            for _, entry in held
            for where in (entry.group, getattr(entry.parameter, "optimize_attr", None))
            if isinstance(where, dict)
        ]

    def __call__(self) -> None:
        optimizer = self._optimizer
        optimizer._accumulators.clear()
        optimizer._accumulators.update(self._accumulators)
        for current, saved in (
            (optimizer._master_weights, self._masters),
            (optimizer._accumulators_holder, self._waiting),
        ):
            current.clear()
            current.update(saved)
        optimizer._already_create_accumulator.clear()
        optimizer._already_create_accumulator.update(self._made)
        if self._last is not None:
            self._rate.last_lr = self._last
        else:
            optimizer.set_lr(self._rate)
        for where, factor in self._factors:
            if factor is None:
                where.pop("learning_rate", None)
            else:
                where["learning_rate"] = factor


def _drop(target: _Held) -> None:
    optimizer, name = target.optimizer, target.parameter.name
    master = optimizer._master_weights.pop(name, None)
    for tensors_of in optimizer._accumulators.values():
        tensors_of.pop(name if master is None else master.name, None)
    optimizer._already_create_accumulator.discard(name)


def _create(targets: Sequence[_Held]) -> None:
    """Create the accumulators by paddle's own method, as paddle does in its first step."""
    if not targets:
        return
    optimizer = targets[0].optimizer
    optimizer._accumulators_holder.clear()  # discard a state that was loaded before and not used yet
    block = paddle.base.framework.default_main_program().global_block()
    groups: dict[int, tuple[Mapping[str, Any], list[Any]]] = {}
    for entry in targets:
        groups.setdefault(id(entry.group), (entry.group, []))[1].append(entry.parameter)
    with paddle.no_grad():
        for group, parameters in groups.values():
            optimizer._create_accumulators(block, {**group, "params": parameters} if group else parameters)


def _write(site: str, target: _Held, state: ParameterState) -> None:
    kind, accumulators = type(target.optimizer).__name__, target.accumulators
    new: dict[str, np.ndarray] = {}
    if _is_known(target.optimizer):
        new = {name: state.tensors[common] for name, common in _TENSORS[kind].items() if common in state.tensors}
        if kind == "RMSProp" and "momentum" in new:
            new["momentum"] = new["momentum"] * np.asarray(target.rate, new["momentum"].dtype)
        new |= _counters(target, state, accumulators)
    else:
        new = {name.removeprefix(OWN): array for name, array in state.tensors.items() if name != MASTER_WEIGHT}
        for name, number in state.numbers.items():
            tensor = accumulators[name.removeprefix(OWN)]
            new[name.removeprefix(OWN)] = np.full(tuple(tensor.shape), number)
    for name, array in new.items():
        if name not in accumulators:
            raise UsageError(f"{site}: {kind} holds no {name!r} of it")
        tensors.write(accumulators[name], array)
    master = target.optimizer._master_weights.get(target.parameter.name)
    if master is not None and MASTER_WEIGHT in state.tensors:
        tensors.write(master, state.tensors[MASTER_WEIGHT])


def _counters(target: _Held, state: ParameterState, accumulators: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the accumulators that depend on the count of steps, as arrays."""
    kind, values = type(target.optimizer).__name__, target.values
    steps = round(state.numbers.get(STEPS, 0))

    def dtype_of(name: str) -> np.dtype[Any]:
        return np.dtype(np.float64 if tensors.dtype(accumulators[name]) == "float64" else np.float32)

    def full(name: str, value: float) -> np.ndarray:
        return np.full(tuple(accumulators[name].shape), value, dtype_of(name))

    arrays = {}
    for name, value, ahead in POWERS.get(kind, ()):
        arrays[name] = full(name, power_of(float(values[value]), steps + ahead, dtype_of(name)))
    if kind == "NAdam":
        arrays["momentum_decay_pow"] = full("momentum_decay_pow", power_of(_NADAM_BASE, steps, np.dtype(np.float32)))
        arrays["mu_product"] = full("mu_product", state.numbers[MU_PRODUCT])
    if kind == "RAdam":
        arrays["rho"] = full("rho", rho_of(float(values["beta2"]), steps))
    return arrays


# -- learning rates ------------------------------------------------------------------------------------------------

_SAME_RATE = 1e-6  # relative; the rounding of a product in float32


def _set_rates(optimizer: Any, entries: Sequence[tuple[str, _Held]], rates: Mapping[str, float | None]) -> None:
    """Set the optimizer's learning rate, and the factors of those parameters whose rate would still be different."""
    targets = [(entry, rate) for site, entry in entries for rate in [rates[site]] if rate is not None]
    if not targets or optimizer._learning_rate is None:
        return
    bases = [rate / entry.factor for entry, rate in targets if entry.factor]
    base = next((value for value in bases if value), 0.0)
    if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
        optimizer._learning_rate.last_lr = base
    else:
        optimizer.set_lr(base)
    for entry, rate in targets:
        if abs(base * entry.factor - rate) <= _SAME_RATE * abs(rate):
            continue
        parameter_factor = carried_factor(entry.parameter)
        if not base or not entry.factor:
            raise UsageError(f"{entry.parameter.name} can't be given the learning rate {rate:g}: its factor is 0")
        factor = rate / (base * (entry.factor / parameter_factor))
        entry.parameter.optimize_attr["learning_rate"] = factor
        if isinstance(entry.group, dict) and entry.group:
            entry.group["learning_rate"] = factor
