"""How the samples of tensors lie in their memory, where that is contiguous; the same for every framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from padiff.sketches.sketch import BLOCK, ELEMENTS, Cut, Kind, arithmetic, block_rows

#: A named tuple's own constructor is a function of Python's: these are made by the hundred in each step.
new_cut: Callable[[Iterable[Any]], Cut] = partial(tuple.__new__, Cut)


class Form(NamedTuple):
    """How the sample of tensors of one shape and dtype lies in their memory.

    Attributes:
        typestr: the dtype in numpy's array interface.
        first: bytes from the first element to the first block.
        shape: of the memory that is looked at: one axis, or blocks.
        chosen, kind, dtype, lengths: as `padiff.sketches.sketch.Cut` has them; the last one is its shape.
        nbytes: of the tensor.
    """

    typestr: str
    first: int
    shape: tuple[int, ...]
    chosen: np.ndarray | None
    kind: Kind
    dtype: str
    lengths: tuple[int, ...]
    nbytes: int

    def cut_of(self, memory: Any) -> Cut:
        """The sample of a tensor, given what numpy reads its memory of (``__array_interface__``)."""
        return new_cut((np.asarray(memory), self.chosen, self.kind, self.dtype, self.lengths))


def form_of(of_numpy: np.dtype[Any], dtype: str, shape: tuple[int, ...]) -> Form:
    """The form of a tensor.

    Args:
        of_numpy: numpy's dtype of its elements.
        dtype: what a record calls it.
    """
    size, width, calculated = math.prod(shape), of_numpy.itemsize, arithmetic(of_numpy)
    if size <= ELEMENTS:
        return Form(of_numpy.str, 0, (size,), None, (size, calculated), dtype, shape, size * width)
    first, rows = block_rows(size)
    blocks = (size - first) // BLOCK, BLOCK
    kind = ELEMENTS, calculated
    return Form(of_numpy.str, first * width, blocks, rows, kind, dtype, shape, size * width)
