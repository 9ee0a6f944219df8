"""Snapshot of a model, its optimizers and the random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from padiff.model.live_model import LiveModel
from padiff.records import TensorSource


class StateSnapshot:
    """Snapshot of the user's state that a replay modifies; `give_back` restores it.

    Args:
        model: the candidate.
    """

    def __init__(self, model: LiveModel) -> None:
        tensors = model.framework.tensors
        self._model = model
        self._values = [(tensor, tensors.copy(tensor)) for _, tensor in model.tensors()]
        self._modes = [(node.layer, node.layer.training) for node in model.nodes]
        self._random = drawn_now(model)
        #: Functions that restore the optimizers.
        self.undo: list[Callable[[], None]] = []

    def give_back(self) -> None:
        """Restore model, optimizers, modes and random states, and clear gradients."""
        framework = self._model.framework
        for tensor, values in self._values:
            framework.tensors.write(tensor, values)
        for restore in reversed(self.undo):
            restore()
        self.undo.clear()
        for layer, mode in self._modes:
            layer.training = mode
        draw_again(self._model, self._random)
        framework.layers.clear_gradients(self._model.model)


def drawn_now(model: LiveModel) -> Any:
    """Return the states of the random generators of the framework, Python and numpy."""
    return model.framework.randomness.state(), random.getstate(), np.random.get_state()


def draw_again(model: LiveModel, drawn: Any) -> None:
    """Set the random generators to states that `drawn_now` returned."""
    state, python, numpy = drawn
    model.framework.randomness.restore(state)
    random.setstate(python)
    np.random.set_state(numpy)


def draw_like(model: LiveModel, seeds: Mapping[str, TensorSource]) -> None:
    """Set the random generators to the reference's recorded states, for those that exist here.

    Damaged states are ignored: wrong random numbers are the only effect.
    """
    arrays = {name: source.read() for name, source in seeds.items()}
    randomness = model.framework.randomness
    randomness.restore(randomness.of_arrays(arrays))
    python, numpy = arrays.get("python"), arrays.get("numpy")
    version = random.getstate()[0]
    if python is not None and python.shape == (625,) and python.dtype == np.uint32 and python[-1] <= 624:
        random.setstate((version, tuple(int(word) for word in python), None))
    if numpy is not None and numpy.shape == (625,) and numpy.dtype == np.uint32 and numpy[-1] <= 624:
        np.random.set_state(("MT19937", numpy[:-1].astype(np.uint32), int(numpy[-1]), 0, 0.0))
