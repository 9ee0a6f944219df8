"""When a hypothesis explains what was recorded: the one measure that all of them are held to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction

#: What a prediction is off by, as a multiple of the rounding noise: all tensors together, and the worst of them, for it
#: to be at the level of rounding. Chosen: noise is estimated to a factor of two or so.
NEAR, WORST = 3.0, 8.0
#: How many times nearer a true cause comes than the reference does, for it to be proven, and for it to be likely.
#: Chosen: the best of a few hundred wrong values comes some times nearer, never to the level of rounding.
PROVEN, LIKELY = 10.0, 4.0
#: What a likely cause may leave, as a multiple of the rounding noise: noise that is underestimated, no other error.
#: Chosen.
CLOSE = 30.0
#: How many independent numbers have to agree, besides two for each that was solved for. Chosen: a tenth of the error
#: is left by chance once in ``10 ** numbers`` times.
NUMBERS = 8
#: Share of a tensor's error that is left of one that no hypothesis touches: looked at to give up early.
_HOPELESS = 0.7


@dataclass(frozen=True, slots=True)
class Weight:
    """How well a hypothesis explains what the candidate recorded.

    Attributes:
        residual: what its predictions are off by, as a multiple of the rounding noise (root of the mean square).
        without: what the reference is off by, likewise.
        size: how large what was recorded is itself, likewise: what is all but zero is no explanation of it.
        worst: the residual of the worst tensor.
        tensors: how many were predicted.
        elements: how many elements of them.
        numbers: how many of them differ from the reference by more than rounding, and do not from what is predicted.
        within: whether the policy would pass every prediction.
    """

    residual: float = math.inf
    without: float = 0.0
    size: float = 0.0
    worst: float = math.inf
    tensors: int = 0
    elements: int = 0
    numbers: int = 0
    within: bool = False

    @property
    def gain(self) -> float:
        """How many times nearer than the reference, or than zeros, it comes; below the noise nothing is nearer."""
        return min(self.without, self.size) / max(self.residual, 0.5)


#: Of what predicts nothing.
NOTHING = Weight()


def weigh(predictions: Iterable[Prediction]) -> Weight:
    """Hold predictions against what was recorded; stops at the first tensor that shows them to be wrong."""
    squares = squares_without = sizes = worst = 0.0
    tensors = elements = numbers = 0
    within = True
    for one in predictions:
        if not one.actual.size:
            continue
        with np.errstate(all="ignore"):
            left = np.abs(one.actual - one.predicted) / one.noise
            apart = np.abs(one.actual - one.without) / one.noise
            sizes += max(_square(np.abs(one.actual) / one.noise), _square(np.abs(one.predicted) / one.noise))
        own, own_without = _square(left), _square(apart)
        if not math.isfinite(own) or not math.isfinite(own_without):
            return NOTHING
        squares, squares_without = squares + own, squares_without + own_without
        numbers += int(np.count_nonzero((apart > PROVEN) & (left <= apart / LIKELY)))
        worst = max(worst, math.sqrt(own / left.size))
        tensors, elements = tensors + 1, elements + left.size
        within = within and _norm(one.actual - one.predicted) <= one.limit * max(
            _norm(one.predicted), _norm(one.without)
        )
        if own > own_without * _HOPELESS**2 and own > left.size * WORST**2:
            return NOTHING
    if not elements:
        return NOTHING
    root = math.sqrt(elements)
    residual, without, size = (math.sqrt(one) / root for one in (squares, squares_without, sizes))
    return Weight(residual, without, size, worst, tensors, elements, numbers, within)


def is_enough(weight: Weight, hypothesis: Hypothesis) -> bool:
    """Whether so many numbers agree that it is not by chance."""
    return weight.numbers >= NUMBERS + 2 * hypothesis.free + math.log2(max(hypothesis.tried, 1)) / 2


def explains(weight: Weight, hypothesis: Hypothesis) -> bool:
    """Whether computing with it comes to the level of rounding, and computing without it does not."""
    near = weight.residual <= NEAR and weight.worst <= WORST and weight.within
    return near and weight.gain >= PROVEN and is_enough(weight, hypothesis)


def is_likely(weight: Weight, hypothesis: Hypothesis) -> bool:
    """Whether it explains most of what is wrong, and not by chance."""
    return weight.residual <= CLOSE and weight.gain >= LIKELY and is_enough(weight, hypothesis)


def evidence(weight: Weight, hypothesis: Hypothesis) -> str:
    """What speaks for it, in words."""
    many = f"{weight.tensors} {hypothesis.what}" if weight.tensors > 1 else f"{weight.elements} elements"
    exact = weight.residual == 0
    with_it = "exactly" if exact else f"to {weight.residual:.2g} times the rounding noise"
    without = "" if exact or not math.isfinite(weight.without) else f", without it to {weight.without:.3g} times"
    solved = f"; {hypothesis.free} number{'s' if hypothesis.free > 1 else ''} solved for" if hypothesis.free else ""
    return f"with it {many} agree {with_it}{without}{solved}"


def _square(values: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        return float(np.sum(np.square(values)))


def _norm(values: np.ndarray) -> float:
    return math.sqrt(_square(np.abs(values)))
