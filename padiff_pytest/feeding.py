"""Conversion of a test's batches to tensors of either framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.auto.arguments import check_call
from padiff.errors import UsageError
from padiff.frameworks import framework_of_tensor
from padiff.model.nested import replace_tensors
from padiff.model.tree import LiveModel

# numpy's default dtype, the only floating dtype that inputs have by accident.
_DEFAULT_OF_NUMPY = "float64"


@dataclass(frozen=True)
class Call:
    """Arguments of one model in one step, and the labels for its loss."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    labels: tuple[Any, ...]


def calls_of(inputs: Any, labels: Any, steps: int, name: str, live: LiveModel) -> list[Call]:
    """Return a model's calls, one for each step.

    Raises:
        UsageError: the model does not accept these inputs.
    """
    converted: dict[int, Any] = {}

    def tensors(value: Any, what: str) -> Any:
        if id(value) not in converted:
            converted[id(value)] = _converted(value, what, live)
        return converted[id(value)]

    calls = []
    for step in range(steps):
        batch = inputs[step] if isinstance(inputs, list) else inputs
        where = f"inputs[{step}]" if isinstance(inputs, list) else "inputs"
        arguments = tensors(batch, where)
        args, kwargs = _arguments(arguments)
        check_call(args, dict(kwargs), name, live)
        of_loss: tuple[Any, ...] = ()
        if labels is not None:
            of_loss = (tensors(labels[step] if isinstance(labels, list) else labels, "labels"),)
        calls.append(Call(args, kwargs, of_loss))
    return calls


def steps_of(inputs: Any, labels: Any, steps: int | None, default: int) -> int:
    """Return the number of steps.

    Raises:
        UsageError: the value is not a number of steps, or differs from the number of batches.
    """
    lists = {what: len(value) for what, value in (("inputs", inputs), ("labels", labels)) if isinstance(value, list)}
    if steps is None:
        steps = next(iter(lists.values()), default)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps has to be a whole number of at least 1, got {steps!r}")
    for what, count in lists.items():
        if count != steps:
            raise UsageError(
                f"{what} is a list of {count}, one for each step, but steps={steps}. Several arguments of one call are "
                "a tuple"
            )
    return steps


def _arguments(value: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(value, Mapping):
        return (), value
    return (value, {}) if isinstance(value, tuple) else ((value,), {})


def _converted(value: Any, what: str, live: LiveModel) -> Any:
    """Convert the arrays and tensors in a nested value to tensors of the model's framework and device."""
    near = next((tensor for _, tensor in live.tensors()), None)
    target = live.framework
    leaves = []

    def is_leaf(item: Any) -> bool:
        return isinstance(item, np.ndarray) or framework_of_tensor(item) is not None

    def tensor(_: str, item: Any) -> Any:
        leaves.append(item)
        source = framework_of_tensor(item)
        if source is target:
            return item
        array = item if source is None else source.tensors.copy(item)
        _check_dtype(array, what, live)
        return target.data.tensor(array, near)

    result = _each(value, is_leaf, tensor)
    if not leaves:
        raise UsageError(
            f"{what}: expected a numpy array or a tensor, a tuple of them (by position) or a mapping (by name); a list "
            f"has a batch for each step. Got {type(value).__module__}.{type(value).__qualname__}"
        )
    return result


def _each(value: Any, is_leaf: Callable[[Any], bool], new: Callable[[str, Any], Any]) -> Any:
    # Mappings of other classes become plain dictionaries, because inputs are plain dictionaries.
    if isinstance(value, Mapping) and not is_leaf(value):
        return {key: replace_tensors(item, str(key), is_leaf, new) for key, item in value.items()}
    return replace_tensors(value, "input", is_leaf, new)


def _check_dtype(array: np.ndarray, what: str, live: LiveModel) -> None:
    if str(array.dtype) != _DEFAULT_OF_NUMPY:
        return
    dtypes = {live.framework.tensors.dtype(tensor) for _, tensor in live.tensors()}
    floating = sorted(dtype for dtype in dtypes if "float" in dtype)
    if floating and _DEFAULT_OF_NUMPY not in floating:
        raise UsageError(
            f"{what}: an array is float64, numpy's default, and the parameters of {live.info.name} are "
            f"{', '.join(floating)}: give array.astype({floating[0]!r})"
        )
