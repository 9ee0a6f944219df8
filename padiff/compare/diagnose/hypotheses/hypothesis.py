"""What a hypothesis is: a cause, and what the candidate would have recorded if it were true."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Prediction:
    """A tensor of the candidate, as it would be if a hypothesis were true; all arrays have one shape, in float64.

    Attributes:
        site: whose tensor it is, as the reference calls it.
        actual: what the candidate recorded.
        predicted: what it would have recorded.
        without: what it would have recorded if nothing were wrong: mostly the reference's tensor.
        noise: what rounding makes of an element, in absolute size, or of each.
        limit: the share of its norm that the policy lets the tensor be off by.
    """

    site: str
    actual: np.ndarray
    predicted: np.ndarray
    without: np.ndarray
    noise: np.ndarray | float
    limit: float = math.inf


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A cause that can be computed.

    Attributes:
        kind: its machine-readable name, which stays as it is.
        name: what it is called in the list of what was excluded: a word or two.
        sentence: the cause in words, without a full stop.
        predict: what it predicts, a tensor at a time; the largest differences first, as the first wrong one ends it.
        what: what the tensors are, in the plural.
        free: how many numbers were solved for: so many of those that it explains are no evidence.
        tried: how many values or forms were looked through for it.
        changes: of how many things it says that they are wrong. What explains as much with fewer is reported.
        fix: the line that mends it, in the candidate's framework.
        telling: whether it is the cause if it is true; else it is one of several things that come to the same, and is
            never called proven.
        code: whether it says what in the code is other; beside it, what says only how its outcome differs is no news.
    """

    kind: str
    name: str
    sentence: str
    predict: Callable[[], Iterable[Prediction]]
    what: str = "tensors"
    free: int = 0
    tried: int = 1
    changes: int = 1
    fix: str = ""
    telling: bool = True
    code: bool = False
