"""The two frameworks for the probes. Only `load` imports them."""

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
        names: names that the text of a call can use, without the inputs.
    """

    name: str
    module: Any
    names: Mapping[str, Any]

    @property
    def version(self) -> str:
        """Return the installed version, without the local build suffix."""
        return str(self.module.__version__).partition("+")[0]

    def tensor(self, array: np.ndarray, trained: bool = False) -> Any:
        """Return a new tensor with the values of an array; ``trained``: True to track its gradient."""
        if self.name == "torch":
            return self.module.tensor(array).requires_grad_(trained)
        tensor = self.module.to_tensor(array)
        tensor.stop_gradient = not trained
        return tensor

    def parameter(self, array: np.ndarray) -> Any:
        """Return a new parameter with the values of an array."""
        if self.name == "torch":
            return self.module.nn.Parameter(self.module.tensor(array))
        parameter = self.module.create_parameter(list(array.shape), str(array.dtype))
        parameter.set_value(array)
        return parameter

    def fill(self, layer: Any, like: Any) -> Any:
        """Set a layer's weights and buffers to those of `like`, or without `like` its weights to drawn values.

        Returns:
            A copy of the layer with the drawn weights; or with `like`, the layer itself.
        """
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
        """Return a tensor's values in the tensor's dtype."""
        return np.array(tensor.detach().numpy())


def load() -> Both[Side]:
    """Import both frameworks.

    Raises:
        UsageError: a framework is not installed, or can't be imported.
    """
    with warnings.catch_warnings(), _silenced():
        warnings.simplefilter("ignore")  # warnings of the frameworks' imports
        return Both(_loaded("torch", "torch.nn.init"), _loaded("paddle", "paddle.nn.initializer"))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Limit the log of paddle's library to errors during its import, when it reads this environment variable."""
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
    """Restore random states, paddle's device, its counters of names and the warning filters at the end of the block."""
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
    """Seed both CPU generators; call this inside `kept`. (`manual_seed` and `seed` would seed GPUs, too.)"""
    sides.reference.module.default_generator.manual_seed(number)
    _numbers_of_paddle(sides).manual_seed(number)


def _numbers_of_paddle(sides: Both[Side]) -> Any:
    return sides.candidate.module.framework.core.default_cpu_generator()
