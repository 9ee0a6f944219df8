"""Perturbations for repeated steps: changes by units in the last place, or float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.judge.limits import MOST_UNITS, ROUNDING
from padiff.model.live_model import LiveModel

#: Number of perturbed repetitions of a step: half of them change by one unit in the last place, half by `MOST_UNITS`,
#: so that values cross a kink (ReLU, max pooling) as with larger noise. Chosen: the largest error of so many runs is
#: seldom small by chance, even for a tensor of one element.
RUNS = 8
#: Seed of the random signs.
SEED = 20240229

# Integer type to read a floating-point number's bits as, by its size in bytes.
_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Perturbation:
    """The perturbation of one repetition.

    Attributes:
        run: index of the repetition, from 0.
        units: size of the change in units in the last place; 0 for no change.
        dtype: dtype that defines the unit.
        exact: True to run in float64 without a change.
    """

    run: int = 0
    units: int = 0
    dtype: str = "float32"
    exact: bool = False

    def moved(self, array: np.ndarray, *place: int) -> np.ndarray:
        """Return the array with each number changed up or down by the units; zeros and non-finite numbers stay.

        Args:
            place: numbers that identify the array; the random signs derive from them.
        """
        if not is_floating(array):
            return array
        if self.exact:
            return array.astype(np.float64)
        return _moved(array, self.units, self.dtype, np.random.default_rng([SEED, self.run, *place]))


#: No perturbation.
AS_IT_IS = Perturbation()


def moves(runs: int, dtype: str, exact: bool) -> list[Perturbation]:
    """Return the perturbations that measure a step's floors."""
    perturbed = [Perturbation(run, 1 if run % 2 == 0 else MOST_UNITS, dtype) for run in range(runs)]
    return [*perturbed, Perturbation(runs, exact=True)] if exact else perturbed


def is_floating(array: np.ndarray) -> bool:
    """Return True if the array has a floating-point dtype with a known unit in the last place."""
    return array.dtype.name in ROUNDING


def move_weights(model: LiveModel, move: Perturbation) -> Callable[[], None]:
    """Perturb all parameters and buffers of a model.

    Returns:
        A function that restores the buffers which the model computes itself. No transfer overwrites these buffers, so
        that they would stay perturbed in the next step.
    """
    tensors, layers = model.framework.tensors, model.framework.layers
    computed = {
        id(tensor)
        for node in model.nodes
        for slot, tensor, _ in layers.parameters(node.layer)
        if slot in layers.computed(node.layer)
    }
    before: list[tuple[Any, np.ndarray]] = []
    for number, (_, tensor) in enumerate(model.tensors()):
        if not move.exact and tensors.dtype(tensor) in ROUNDING:
            array = tensors.copy(tensor)
            if id(tensor) in computed:
                before.append((tensor, array))
            tensors.write(tensor, move.moved(array, 0, number))

    def restore() -> None:
        for tensor, array in before:
            tensors.write(tensor, array)

    return restore


def _moved(array: np.ndarray, units: int, dtype: str, random: Any) -> np.ndarray:
    # Units of the dtype of the computation: smaller changes would vanish when values are rounded to it.
    dtype_name = array.dtype.name
    bits = round(np.log2(max(ROUNDING[dtype] / ROUNDING[dtype_name], 1.0)))
    kind: Any = _INTEGERS[array.dtype.itemsize]
    flat = np.ascontiguousarray(array).reshape(-1)
    integers = flat.view(kind)
    by = kind(min(units << bits, np.iinfo(kind).max >> 2))
    signs = random.integers(0, 2, flat.size, dtype=np.int8).astype(kind) * kind(2) - kind(1)
    magnitude = integers & np.iinfo(kind).max
    with np.errstate(over="ignore", invalid="ignore"):
        moved = (integers + signs * by).view(array.dtype)
        fits = np.isfinite(flat) & (magnitude > by) & np.isfinite(moved)
    return np.where(fits, moved, flat).reshape(array.shape)


#: Names a run's move of its weights: number, units and dtype. `padiff golden record` sets it.
MOVE_VARIABLE = "PADIFF_GOLDEN_MOVE"


def move_as_asked(model: Any) -> None:
    """Move a model's weights as the environment variable asks; nothing without it."""
    text = os.environ.get(MOVE_VARIABLE)
    if text:
        run, units, dtype = text.split()
        move_weights(LiveModel.from_model(model), Perturbation(int(run), int(units), dtype))
