"""Types, names and helpers of the modules that write formulas of function calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from padiff.compare.diagnose.computing.formula import Formula
from padiff.compare.diagnose.computing.known_inputs import KnownInputs

#: Adds an operation to a formula and returns its node.
Add = Callable[..., int]
#: The node of a function's output; a list if the function has several outputs.
Made = int | list[int]
#: Adds a function call to a formula, for a run's framework.
Writing = Callable[[Add, Formula, KnownInputs, str], Made]

#: The names of an axis argument.
AXIS = ("dim", "axis")
#: The name of a leaf that is a number in the code.
CONSTANT = "(number)"
#: The name of a leaf that the code makes of numbers: zeros, a range, a unit matrix.
MADE = "(made)"


def constant(number: float) -> np.ndarray:
    """Return a number of the code as the value of a leaf."""
    return np.asarray(number, np.float64)


def swapped(formula: Formula, node: int) -> list[int]:
    """Return the order of a node's axes with the last two swapped."""
    order = list(range(formula.values[node].ndim))
    order[-1], order[-2] = order[-2], order[-1]
    return order
