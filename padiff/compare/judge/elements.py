"""Pass diffs whose error lies in a few elements that may be off by that much."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.measure.operands import elements
from padiff.records import Diff, Figure, Rule


def without_noise(
    diff: Diff, gradient: Diff | None, limit: float, rounding: float, another: bool, most: Callable[[int], float]
) -> Diff:
    """Return the diff, passed if its error lies in elements whose gradients are rounding noise, or differ by much.

    Rounding noise is searched for in vectors only. Example: one bias of query, key and value; the attention does not
    depend on the key's part. Where rounding flips the sign of an element's gradient, an adaptive optimizer makes a
    full-size update of either sign.

    Args:
        diff: diff of a parameter's weight or update.
        gradient: diff of the parameter's gradient.
        limit: allowed L2 error of all elements that are not noise.
        rounding: size up to which an element's gradient is rounding noise.
        another: True to also leave out elements whose gradients differ by much.
        most: function from the number of such elements to their allowed L2 error.
    """
    figures = diff.figures
    if gradient is None or gradient.figures is None or figures is None or gradient.figures.size != figures.size:
        return diff
    gradients, sides = elements(gradient.pair), elements(diff.pair)
    if gradients is None or sides is None:
        return diff  # a sketch does not contain single elements
    largest = np.maximum(*gradients.map(np.abs))
    noise = (largest <= rounding) & (len(diff.pair.anchor.shape) == 1)
    if another:
        noise |= np.abs(gradients.candidate - gradients.reference) > limits.ANOTHER * largest
    noise &= largest > 0  # a gradient of zero on both sides is no rounding
    error = sides.candidate - sides.reference
    count = int(noise.sum())
    remainder = float(np.linalg.norm(error[~noise]))
    if not count or remainder > limit or float(np.linalg.norm(error[noise])) > most(count):
        return diff
    size = figures.reference_l2 or 1.0
    return diff.judged(True, Figure.WITHOUT_NOISE, remainder / size, limit / size, Rule.ELEMENTS)


def without_last_places(diff: Diff, weight: Diff | None, limit: float) -> Diff:
    """Return the diff of an update, passed if its error lies in the last place of the weights.

    Nothing smaller than a last place can be added to a weight. Early in a warm-up an update is a few last places, and
    its value depends on whether decay and step are rounded together or one after the other.

    Args:
        diff: diff of an update.
        weight: diff of the weight that the update changes.
        limit: allowed L2 error beyond the last places.
    """
    figures = diff.figures
    if weight is None or weight.figures is None or figures is None or weight.figures.size != figures.size:
        return diff
    dtype = limits.coarse(weight.pair.anchor.dtype)
    if dtype not in limits.ROUNDING or limits.is_half(dtype):
        return diff
    unit, size = 2 * limits.ROUNDING[dtype], figures.reference_l2 or 1.0
    weights, sides = elements(weight.pair), elements(diff.pair)
    if weights is None or sides is None:  # a sketch does not contain single elements
        most = limit + unit * weight.figures.reference_l2
        passed = figures.l2 <= most * (1 + limits.SURE * figures.spread)
        return diff.judged(True, Figure.REL_L2, figures.rel_l2, most / size, Rule.LAST_PLACE) if passed else diff
    error = np.abs(sides.candidate - sides.reference)
    # A weight that crosses a power of two has the larger unit.
    places = np.spacing(np.maximum(*weights.map(np.abs)).astype(dtype)).astype(np.float64)
    beyond = error > limits.LAST_PLACES * places * (1 + unit)
    remainder = float(np.linalg.norm(error[beyond]))
    if remainder > limit:
        return diff
    return diff.judged(True, Figure.BEYOND_LAST_PLACE, remainder / size, limit / size, Rule.LAST_PLACE)
