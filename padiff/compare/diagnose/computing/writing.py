"""What the calls of functions are written down with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from padiff.compare.diagnose.computing.formula import Formula
from padiff.compare.diagnose.computing.given import Given

#: Adds an operation to a formula, and gives its node.
Add = Callable[..., int]
#: The node of what a function gives; several where it gives several.
Made = int | list[int]
#: Writes down a function's call, given the run's framework.
Writing = Callable[[Add, Formula, Given, str], Made]

#: What an axis is called among arguments.
AXIS = ("dim", "axis")
#: The name of a leaf that is a number in the code.
CONSTANT = "(number)"


def constant(number: float) -> np.ndarray:
    """A number of the code, as the value of a leaf."""
    return np.asarray(number, np.float64)


def swapped(formula: Formula, node: int) -> list[int]:
    """The order of a node's axes, the last two the other way round."""
    order = list(range(formula.values[node].ndim))
    order[-1], order[-2] = order[-2], order[-1]
    return order
