"""The two frameworks as the probes use them. Nothing is imported before `load` is called."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.errors import UsageError
from padiff.records import Both
from padiff.weights.assign import carry_over


@dataclass(frozen=True, slots=True)
class Side:
    """One framework.

    Attributes:
        name: ``torch`` or ``paddle``.
        module: the imported package.
        names: what a call's text may use, without the inputs.
    """

    name: str
    module: Any
    names: Mapping[str, Any]

    @property
    def version(self) -> str:
        """The installed version, without what the build adds."""
        return str(self.module.__version__).partition("+")[0]

    def tensor(self, array: np.ndarray, trained: bool = False) -> Any:
        """A tensor of its own with the values of an array; ``trained``: a gradient is wanted."""
        if self.name == "torch":
            return self.module.tensor(array).requires_grad_(trained)
        tensor = self.module.to_tensor(array)
        tensor.stop_gradient = not trained
        return tensor

    def parameter(self, array: np.ndarray) -> Any:
        """A parameter with the values of an array."""
        if self.name == "torch":
            return self.module.nn.Parameter(self.module.tensor(array))
        parameter = self.module.create_parameter(list(array.shape), str(array.dtype))
        parameter.set_value(array)
        return parameter

    def fill(self, layer: Any, like: Any) -> Any:
        """Give a layer the weights and buffers of another; without one, drawn weights. Returns a copy of it."""
        if like is not None:
            carry_over(like, layer)
            return layer
        rng = np.random.default_rng(2)
        for parameter in layer.parameters():
            values = rng.normal(scale=0.3, size=tuple(parameter.shape)).astype(self.array(parameter).dtype)
            parameter.data.copy_(self.tensor(values)) if self.name == "torch" else parameter.set_value(values)
        return copy.deepcopy(layer)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, self.module.Tensor)

    def array(self, tensor: Any) -> np.ndarray:
        """A tensor's values; not in float64 yet."""
        return np.array(tensor.detach().numpy())


def load() -> Both[Side]:
    """Import both frameworks.

    Raises:
        UsageError: one is not installed, or can't be imported.
    """
    with warnings.catch_warnings(), _silenced():
        warnings.simplefilter("ignore")  # their own talk while they are imported
        return Both(_loaded("torch", "torch.nn.init"), _loaded("paddle", "paddle.nn.initializer"))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Where paddle is imported now, its library says errors only; it reads the variable while it is loaded."""
    name = "GLOG_minloglevel"
    if name in os.environ:
        yield
        return
    os.environ[name] = "2"
    try:
        yield
    finally:
        del os.environ[name]


def _loaded(name: str, init: str) -> Side:
    try:
        module, functional = importlib.import_module(name), importlib.import_module(f"{name}.nn.functional")
        names = {name: module, "nn": module.nn, "F": functional, "init": importlib.import_module(init)}
    except ImportError as error:
        raise UsageError(
            f"the atlas asks torch and paddle the same, and {name} can't be imported ({error}): "
            f"pip install 'padiff-hooks[{name}]'"
        ) from error
    return Side(name, module, names)


@contextlib.contextmanager
def kept(sides: Both[Side]) -> Iterator[None]:
    """Random states, paddle's device, its counters of names and the filters of warnings are as before at the end."""
    torch, paddle = sides.reference.module, sides.candidate.module
    device, state = paddle.get_device(), _numbers_of_paddle(sides).get_state()
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        paddle.enable_grad(),
        paddle.utils.unique_name.guard(),
    ):
        warnings.simplefilter("ignore")
        if device != "cpu":
            paddle.set_device("cpu")
        try:
            yield
        finally:
            if device != "cpu":
                paddle.set_device(device)
            _numbers_of_paddle(sides).set_state(state)


def seed(sides: Both[Side], number: int) -> None:
    """Begin both's random numbers on the CPU anew; within `kept`. (`manual_seed` and `seed` do so on GPUs, too.)"""
    sides.reference.module.default_generator.manual_seed(number)
    _numbers_of_paddle(sides).manual_seed(number)


def _numbers_of_paddle(sides: Both[Side]) -> Any:
    return sides.candidate.module.framework.core.default_cpu_generator()
