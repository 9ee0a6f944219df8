"""What an optimizer of paddle holds between two steps, under the names that torch's have too.

Accumulators are replaced by new ones: undoing is to put the old ones back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from padiff.errors import UsageError
from padiff.frameworks.optimizer_state import check_rule, check_slots, needed
from padiff.frameworks.paddle import tensors
from padiff.frameworks.paddle.optimizer_settings import carried_factor, grouped, rule_of, values_of
from padiff.frameworks.paddle.step_counts import POWERS, power_of, rho_of, steps_of
from padiff.records.optimizer_state import (
    FIRST_MOMENT,
    GRADIENT_AVERAGE,
    INFINITY_NORM,
    MASTER_WEIGHT,
    MAX_SECOND_MOMENT,
    MOMENTUM,
    MU_PRODUCT,
    OWN,
    PREVIOUS_GRADIENT,
    SECOND_MOMENT,
    SQUARE_AVERAGE,
    SQUARE_SUM,
    STEP_SIZE,
    STEPS,
    UPDATE_AVERAGE,
    OptimizerState,
    ParameterState,
    rates_of,
)

_MOMENTS = {"moment1": FIRST_MOMENT, "moment2": SECOND_MOMENT}
_ADAM = {**_MOMENTS, "moment2_max": MAX_SECOND_MOMENT}
# paddle's class -> its name of an accumulator -> the common name.
_TENSORS: dict[str, dict[str, str]] = {
    "SGD": {},
    "Momentum": {"velocity": MOMENTUM},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdam": _MOMENTS,
    "RAdam": _MOMENTS,
    "Lamb": _MOMENTS,
    "Adamax": {"moment": FIRST_MOMENT, "inf_norm": INFINITY_NORM},
    "Adagrad": {"moment": SQUARE_SUM},
    "Adadelta": {"_avg_squared_grad": SQUARE_AVERAGE, "_avg_squared_update": UPDATE_AVERAGE},
    "RMSProp": {"mean_square": SQUARE_AVERAGE, "momentum": MOMENTUM, "mean_grad": GRADIENT_AVERAGE},
    "Rprop": {"prevs": PREVIOUS_GRADIENT, "learning_rates": STEP_SIZE},
}
# NAdam's momenta grow by this power of its decay.
_NADAM_BASE = 0.96


@dataclass(frozen=True)
class _Held:
    """A parameter in an optimizer's group, with what its accumulators are called after."""

    optimizer: Any
    group: Mapping[str, Any]
    parameter: Any

    @property
    def values(self) -> Mapping[str, Any]:
        """What the group is set to, by the common names."""
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
        """What the optimizer's learning rate is multiplied by."""
        ratio = getattr(self.optimizer, "_lr_ratio", None)
        return carried_factor(self.parameter) * (float(ratio(self.parameter)) if ratio is not None else 1.0)


def _held(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, _Held]]:
    for group, parameters in grouped(optimizer):
        for parameter in parameters:
            if id(parameter) in names:
                yield names[id(parameter)], _Held(optimizer, group, parameter)


def state(optimizer: Any, names: Mapping[int, str]) -> OptimizerState:
    rule, _ = rule_of(optimizer)
    held = list(_held(optimizer, names))
    found = {site: _state_of(one) for site, one in held if one.accumulators}
    # One that was made, and never used, says nothing.
    found = {site: state for site, state in found.items() if state.numbers.get(STEPS) != 0}
    return OptimizerState(rule, found, rates_of((site, one.rate) for site, one in held))


def _state_of(held: _Held) -> ParameterState:
    kind, accumulators = type(held.optimizer).__name__, held.accumulators
    arrays = {name: tensors.copy(tensor) for name, tensor in accumulators.items()}
    master = held.optimizer._master_weights.get(held.parameter.name)
    found = {} if master is None else {MASTER_WEIGHT: tensors.copy(master)}
    if not _is_known(held.optimizer):
        shape = tuple(held.parameter.shape)
        found |= {OWN + name: array for name, array in arrays.items() if array.shape == shape}
        numbers = {OWN + n: float(a.reshape(())) for n, a in arrays.items() if a.shape != shape and a.size == 1}
        return ParameterState(found, numbers)
    wanted = _wanted(held)
    found |= {common: arrays[name] for name, common in _TENSORS[kind].items() if common in wanted and name in arrays}
    if kind == "RMSProp" and MOMENTUM in found:
        found[MOMENTUM] = _per_rate(found[MOMENTUM], held.rate)
    numbers = {}
    if kind in POWERS:
        numbers[STEPS] = float(steps_of(kind, held.values, arrays))
    if kind == "NAdam":
        numbers[MU_PRODUCT] = float(arrays["mu_product"].flat[0])
    return ParameterState(found, numbers)


def _per_rate(buffer: np.ndarray, rate: float) -> np.ndarray:
    """paddle's RMSProp has the learning rate in its buffer, torch's multiplies by it in each step."""
    if not buffer.any():
        return buffer
    if rate == 0:
        raise UsageError("the momentum of paddle's RMSProp has the learning rate as a factor, and can't be known at 0")
    return (buffer.astype(np.float64) / rate).astype(buffer.dtype)


def _is_known(optimizer: Any) -> bool:
    return type(optimizer).__name__ in _TENSORS and "." not in rule_of(optimizer)[0]


def _wanted(held: _Held) -> frozenset[str]:
    """The tensors that the optimizer needs as it is set, by their common names."""
    return needed(_TENSORS[type(held.optimizer).__name__].values(), held.values)


# -- setting -------------------------------------------------------------------------------------------------------


def set_state(optimizer: Any, names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
    check_rule(new.rule, rule_of(optimizer)[0])
    held = list(_held(optimizer, names))
    rates = {site: new.rate(site) for site, _ in held}
    for site, one in held:
        if site in new.parameters:
            given = new.parameters[site]
            check_slots(
                new.rule, site, given, _wanted(one) if _is_known(optimizer) else None, tuple(one.parameter.shape)
            )
            if type(optimizer) is paddle.optimizer.NAdam and MU_PRODUCT not in given.numbers:
                raise UsageError(f"{site}: the state of NAdam has no product of momenta ({MU_PRODUCT})")
    if getattr(optimizer, "_use_multi_tensor", None) and any(one.accumulators for _, one in held):
        raise UsageError("an optimizer with use_multi_tensor=True takes a state before its first step only")
    undo = _Undo(optimizer, held)
    try:
        _set_rates(optimizer, held, rates)
        for _, one in held:
            _drop(one)
        _create([one for site, one in held if site in new.parameters])
        for site, one in held:
            if site in new.parameters:
                _write(site, one, new.parameters[site])
    except BaseException:
        undo()
        raise
    return undo


class _Undo:
    """Puts an optimizer back as it was when this was made."""

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
            for _, one in held
            for where in (one.group, getattr(one.parameter, "optimize_attr", None))
            if isinstance(where, dict)
        ]

    def __call__(self) -> None:
        optimizer = self._optimizer
        optimizer._accumulators.clear()
        optimizer._accumulators.update(self._accumulators)
        for held, kept in (
            (optimizer._master_weights, self._masters),
            (optimizer._accumulators_holder, self._waiting),
        ):
            held.clear()
            held.update(kept)
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


def _drop(held: _Held) -> None:
    optimizer, name = held.optimizer, held.parameter.name
    master = optimizer._master_weights.pop(name, None)
    for tensors_of in optimizer._accumulators.values():
        tensors_of.pop(name if master is None else master.name, None)
    optimizer._already_create_accumulator.discard(name)


def _create(held: Sequence[_Held]) -> None:
    """Have paddle make the accumulators, as its first step would."""
    if not held:
        return
    optimizer = held[0].optimizer
    optimizer._accumulators_holder.clear()  # a state that was given before, and not used yet
    block = paddle.base.framework.default_main_program().global_block()
    groups: dict[int, tuple[Mapping[str, Any], list[Any]]] = {}
    for one in held:
        groups.setdefault(id(one.group), (one.group, []))[1].append(one.parameter)
    with paddle.no_grad():
        for group, parameters in groups.values():
            optimizer._create_accumulators(block, {**group, "params": parameters} if group else parameters)


def _write(site: str, held: _Held, given: ParameterState) -> None:
    kind, there = type(held.optimizer).__name__, held.accumulators
    new: dict[str, np.ndarray] = {}
    if _is_known(held.optimizer):
        new = {name: given.tensors[common] for name, common in _TENSORS[kind].items() if common in given.tensors}
        if kind == "RMSProp" and "momentum" in new:
            new["momentum"] = new["momentum"] * np.asarray(held.rate, new["momentum"].dtype)
        new |= _counters(held, given, there)
    else:
        new = {name.removeprefix(OWN): array for name, array in given.tensors.items() if name != MASTER_WEIGHT}
        for name, number in given.numbers.items():
            tensor = there[name.removeprefix(OWN)]
            new[name.removeprefix(OWN)] = np.full(tuple(tensor.shape), number)
    for name, array in new.items():
        if name not in there:
            raise UsageError(f"{site}: {kind} holds no {name!r} of it")
        tensors.write(there[name], array)
    master = held.optimizer._master_weights.get(held.parameter.name)
    if master is not None and MASTER_WEIGHT in given.tensors:
        tensors.write(master, given.tensors[MASTER_WEIGHT])


def _counters(held: _Held, given: ParameterState, there: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What stands for the count of steps."""
    kind, values = type(held.optimizer).__name__, held.values
    steps = round(given.numbers.get(STEPS, 0))

    def dtype_of(name: str) -> np.dtype[Any]:
        return np.dtype(np.float64 if tensors.dtype(there[name]) == "float64" else np.float32)

    def full(name: str, value: float) -> np.ndarray:
        return np.full(tuple(there[name].shape), value, dtype_of(name))

    found = {}
    for name, value, ahead in POWERS.get(kind, ()):
        found[name] = full(name, power_of(float(values[value]), steps + ahead, dtype_of(name)))
    if kind == "NAdam":
        found["momentum_decay_pow"] = full("momentum_decay_pow", power_of(_NADAM_BASE, steps, np.dtype(np.float32)))
        found["mu_product"] = full("mu_product", given.numbers[MU_PRODUCT])
    if kind == "RAdam":
        found["rho"] = full("rho", rho_of(float(values["beta2"]), steps))
    return found


# -- learning rates ------------------------------------------------------------------------------------------------

_SAME_RATE = 1e-6  # float32's rounding of a product


def _set_rates(optimizer: Any, held: Sequence[tuple[str, _Held]], rates: Mapping[str, float | None]) -> None:
    """The optimizer's own rate is set, and factors stay, where that gives all rates; else the factors are set, too."""
    given = [(one, rate) for site, one in held for rate in [rates[site]] if rate is not None]
    if not given or optimizer._learning_rate is None:
        return
    bases = [rate / one.factor for one, rate in given if one.factor]
    base = next((value for value in bases if value), 0.0)
    if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
        optimizer._learning_rate.last_lr = base
    else:
        optimizer.set_lr(base)
    for one, rate in given:
        if abs(base * one.factor - rate) <= _SAME_RATE * abs(rate):
            continue
        own = carried_factor(one.parameter)
        if not base or not one.factor:
            raise UsageError(f"{one.parameter.name} can't be given the learning rate {rate:g}: its factor is 0")
        factor = rate / (base * (one.factor / own))
        one.parameter.optimize_attr["learning_rate"] = factor
        if isinstance(one.group, dict) and one.group:
            one.group["learning_rate"] = factor
