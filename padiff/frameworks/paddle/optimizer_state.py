"""State of paddle's optimizers, under the names that both frameworks share.

Setting a state replaces the accumulators by new ones, so that undoing puts the old ones back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from padiff.errors import UsageError
from padiff.frameworks.optimizer_catalog import classes
from padiff.frameworks.paddle import tensors
from padiff.frameworks.paddle.optimizer_settings import carried_factor, grouped, rule_of, values_of
from padiff.frameworks.paddle.step_counts import POWERS, power_of, rho_of, steps_of
from padiff.frameworks.state_checks import check_rule, check_slots, needed
from padiff.records.parameter_states import (
    MASTER_WEIGHT,
    MOMENTUM,
    MU_PRODUCT,
    OWN,
    STEPS,
    OptimizerState,
    ParameterState,
    rates_of,
)

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
