"""Moving numbers by units in the last place, and a step done in float64: how a packed step is done once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.judge.limits import MOST_UNITS, ROUNDING
from padiff.model.live_model import LiveModel

#: How often a step is run again, moved: half of them by one unit in the last place, half by `MOST_UNITS`, which shows
#: what becomes of values that go over a kink (ReLU, max pooling) where noise is larger. Chosen: the largest of so many
#: is seldom small by chance, also of a tensor of one element.
RUNS = 8
#: Of the random signs.
SEED = 20240229

# Bits of a floating-point number but its sign, by bytes; and the integer that they are read as.
_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Move:
    """How one of the runs is moved.

    Attributes:
        run: which one, counted from 0.
        units: by how many units in the last place; 0: not at all.
        dtype: of whose last places.
        exact: whether it is done in float64 instead.
    """

    run: int = 0
    units: int = 0
    dtype: str = "float32"
    exact: bool = False

    def moved(self, array: np.ndarray, *place: int) -> np.ndarray:
        """An array, each of its numbers up or down by the units; what is zero, or not finite, stays.

        Args:
            place: numbers that tell this array from others: of them come its signs.
        """
        if not is_floating(array):
            return array
        if self.exact:
            return array.astype(np.float64)
        return _moved(array, self.units, self.dtype, np.random.default_rng([SEED, self.run, *place]))


#: The step as it is.
AS_IT_IS = Move()


def moves(runs: int, dtype: str, exact: bool) -> list[Move]:
    """The runs that measure a step's floors."""
    found = [Move(run, 1 if run % 2 == 0 else MOST_UNITS, dtype) for run in range(runs)]
    return [*found, Move(runs, exact=True)] if exact else found


def is_floating(array: np.ndarray) -> bool:
    """Whether an array's dtype is one whose last places are known."""
    return array.dtype.name in ROUNDING


def move_weights(model: LiveModel, move: Move) -> Callable[[], None]:
    """Move all parameters and buffers of a model.

    Returns:
        What puts back those buffers that the model computes by itself: nothing is carried over to them, so that they
        would stay moved in the next step.
    """
    tensors, layers = model.framework.tensors, model.framework.layers
    own = {
        id(tensor)
        for node in model.nodes
        for slot, tensor, _ in layers.parameters(node.layer)
        if slot in layers.computed(node.layer)
    }
    before: list[tuple[Any, np.ndarray]] = []
    for number, (_, tensor) in enumerate(model.tensors()):
        if not move.exact and tensors.dtype(tensor) in ROUNDING:
            array = tensors.copy(tensor)
            if id(tensor) in own:
                before.append((tensor, array))
            tensors.write(tensor, move.moved(array, 0, number))

    def back() -> None:
        for tensor, array in before:
            tensors.write(tensor, array)

    return back


def _moved(array: np.ndarray, units: int, dtype: str, random: Any) -> np.ndarray:
    # In units of the dtype that is computed in: what is rounded to it would hardly notice smaller ones.
    own = array.dtype.name
    bits = round(np.log2(max(ROUNDING[dtype] / ROUNDING[own], 1.0)))
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
