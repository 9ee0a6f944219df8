"""Evaluation of a call's result: its values, gradients, optimizer steps, or the learning rates of a schedule."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff_atlas.probe import Probe
from padiff_atlas.sides import Side

#: Number of optimizer steps, and number of epochs of a schedule.
STEPS, EPOCHS = 5, 14

# Factors of a gradient's columns: an epsilon shows in tiny gradients only, and is the only effect for zeros.
_SIZES = np.array([1.0, 0.1, 1e-3, 1e-5, 1e-7, 0.0])

# Size of gradients to clip: small, so that a constant added to their norm shows.
_SMALL = 1e-3


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call.

    Attributes:
        outputs: its tensors and numbers, in order, in float64.
        layer: a copy of the `layer` that the text created, before its use; or `None`.
    """

    outputs: tuple[np.ndarray, ...]
    layer: Any = None


def answer(side: Side, probe: Probe, text: str, inputs: Mapping[str, Any], like: Any = None) -> Answer:
    """Run a call.

    Args:
        side: the framework.
        probe: the probe.
        text: the call.
        inputs: arrays and values of the group.
        like: the other framework's layer whose weights this side's `layer` receives; `None` to draw weights.

    Raises:
        Exception: any error of the framework.
    """
    names = dict(side.names)
    trained = []
    for name, value in inputs.items():
        names[name] = value
        if isinstance(value, np.ndarray):
            floating = value.dtype.kind == "f"
            array = value.astype(probe.dtype) if floating else value
            names[name] = side.tensor(array, trained=floating and probe.way == "gradient")
            trained += [names[name]] if floating else []
    if probe.way in ("optimizer", "clip", "schedule"):
        names["parameters"] = _parameters(side, probe.dtype, _SMALL if probe.way == "clip" else 1.0)
    if probe.way == "schedule" and side.name == "torch":
        names["optimizer"] = side.module.optim.SGD(names["parameters"], lr=0.1)
    result = _run(text, names, side, like)
    if probe.way == "gradient":
        outputs = _gradients(side, result, trained)
    elif probe.way == "optimizer":
        outputs = [_updates(side, result, names["parameters"], probe.dtype)]
    elif probe.way == "schedule":
        outputs = [_rates(side, result, names)]
    elif probe.way == "clip":
        outputs = _clipped(side, result, names["parameters"], probe.dtype)
    elif probe.way == "drawn":
        outputs = [_spread(side.array(result))]
    else:
        outputs = list(_outputs(side, result))
    return Answer(tuple(output.astype(np.float64) for output in outputs), names.get("_as_made"))


def _run(text: str, names: dict[str, Any], side: Side, like: Any) -> Any:
    """Run the lines of a call, and return the value of the last one."""
    *statements, last = ast.parse(text).body
    if not isinstance(last, ast.Expr):
        raise ValueError(f"the last line of a call is an expression, got {ast.unparse(last)!r}")
    for statement in statements:
        without = "layer" not in names
        exec(compile(ast.Module([statement], []), "<probe>", "exec"), names)
        if without and "layer" in names:
            names["_as_made"] = side.fill(names["layer"], like)
    return eval(compile(ast.Expression(last.value), "<probe>", "eval"), names)


def _outputs(side: Side, result: Any) -> Iterator[np.ndarray]:
    if isinstance(result, (tuple, list)):
        for item in result:
            yield from _outputs(side, item)
    elif side.is_tensor(result):
        yield side.array(result)
    elif result is not None:
        yield np.asarray(result)


def _gradients(side: Side, result: Any, trained: list[Any]) -> list[np.ndarray]:
    """Return the gradients of the sum of the first output."""
    while isinstance(result, (tuple, list)):
        result = result[0]
    result.sum().backward()
    return [side.array(tensor.grad) for tensor in trained if tensor.grad is not None]


def _parameters(side: Side, dtype: str, size: float) -> list[Any]:
    """Return a matrix and a vector, with gradients."""
    rng = np.random.default_rng(1)
    parameters = [side.parameter(rng.normal(size=shape).astype(dtype)) for shape in ((4, 6), (6,))]
    _give_gradients(side, parameters, 0, dtype, size)
    return parameters


def _give_gradients(side: Side, parameters: list[Any], step: int, dtype: str, size: float = 1.0) -> None:
    rng = np.random.default_rng(10 + step)
    loss = sum(
        (parameter * side.tensor((size * rng.normal(size=tuple(parameter.shape)) * _SIZES).astype(dtype))).sum()
        for parameter in parameters
    )
    loss.backward()  # type: ignore[union-attr]


def _updates(side: Side, optimizer: Any, parameters: list[Any], dtype: str) -> np.ndarray:
    """Return the changes that an optimizer makes to the parameters, step by step."""
    updates = []
    for step in range(STEPS):
        before = [side.array(parameter) for parameter in parameters]
        if step:  # the parameters have gradients for the first step
            _give_gradients(side, parameters, step, dtype)
        optimizer.step()
        optimizer.zero_grad() if side.name == "torch" else optimizer.clear_grad()
        updates += [(side.array(now) - then).ravel() for now, then in zip(parameters, before)]
    return np.concatenate(updates)


def _rates(side: Side, scheduler: Any, names: Mapping[str, Any]) -> np.ndarray:
    """Return the effective learning rates of an optimizer, epoch by epoch."""
    module, parameters = side.module, names["parameters"]
    if side.name == "torch":
        optimizer = names["optimizer"]
    else:
        optimizer = module.optimizer.SGD(scheduler, parameters=parameters)
    losses, rates = names["losses"], []
    for epoch in range(EPOCHS):
        rate = optimizer.param_groups[0]["lr"] if side.name == "torch" else optimizer.get_lr()
        rates.append(float(rate))
        optimizer.step()
        scheduler.step(*([losses[epoch]] if "Plateau" in type(scheduler).__name__ else []))
    return np.array(rates)


def _clipped(side: Side, result: Any, parameters: list[Any], dtype: str) -> list[np.ndarray]:
    """Return the gradients after clipping; a clip object of paddle's is called on them."""
    if callable(result):
        return [side.array(gradient) for _, gradient in result([(p, p.grad) for p in parameters])]
    return [side.array(parameter.grad) for parameter in parameters]


def _spread(values: np.ndarray) -> np.ndarray:
    """Return the standard deviation and the 99 % quantile of the absolute values.

    These two numbers together distinguish a uniform distribution from a normal one.
    """
    values = values.astype(np.float64).ravel()
    return np.array([values.std(), np.quantile(np.abs(values), 0.99)])
