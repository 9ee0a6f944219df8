"""Diffs that pass because all of the error is in some elements, and those may be off by as much."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.measure.operands import elements
from padiff.records import Diff, Figure, Rule


def without_noise(
    diff: Diff, gradient: Diff | None, limit: float, rounding: float, another: bool, most: Callable[[int], float]
) -> Diff:
    """A diff that passes if it is all in elements whose gradients are rounding, or are themselves another.

    A bias of query, key and value in one: the attention does not depend on the key's. And where rounding turns the
    sign of an element's gradient over, an adaptive optimizer makes a full-size update of either.

    Args:
        diff: of a parameter's weight or update.
        gradient: the diff of its gradient.
        limit: what the error of the other elements may be (L2).
        rounding: the size up to which an element's gradient is rounding.
        another: whether an element counts, too, whose gradient differs by much.
        most: what the error of so many such elements may be (L2).
    """
    figures = diff.figures
    if gradient is None or gradient.figures is None or figures is None or gradient.figures.size != figures.size:
        return diff
    gradients, sides = elements(gradient.pair), elements(diff.pair)
    if gradients is None or sides is None:
        return diff  # which elements are noise, a sketch does not show
    largest = np.maximum(*gradients.map(np.abs))
    noise = (largest <= rounding) & (len(diff.pair.anchor.shape) == 1)
    if another:
        noise |= np.abs(gradients.candidate - gradients.reference) > limits.ANOTHER * largest
    noise &= largest > 0  # a gradient of zero on both sides is no rounding
    error = sides.candidate - sides.reference
    count = int(noise.sum())
    rest = float(np.linalg.norm(error[~noise]))
    if not count or rest > limit or float(np.linalg.norm(error[noise])) > most(count):
        return diff
    size = figures.reference_l2 or 1.0
    return diff.judged(True, Figure.WITHOUT_NOISE, rest / size, limit / size, Rule.ELEMENTS)


def without_last_places(diff: Diff, weight: Diff | None, limit: float) -> Diff:
    """A diff of updates that passes if it is all in the last place of the weights: nothing smaller can be added.

    Early in a warm-up an update is a few units of it, and whether decay and step are rounded together or one after
    the other moves it by one.

    Args:
        diff: of an update.
        weight: the diff of the weight that it changes.
        limit: what the error beyond the last places may be (L2).
    """
    figures = diff.figures
    if weight is None or weight.figures is None or figures is None or weight.figures.size != figures.size:
        return diff
    dtype = limits.coarse(weight.pair.anchor.dtype)
    if dtype not in limits.ROUNDING or limits.is_half(dtype):
        return diff
    unit, size = 2 * limits.ROUNDING[dtype], figures.reference_l2 or 1.0
    weights, sides = elements(weight.pair), elements(diff.pair)
    if weights is None or sides is None:  # which elements were stepped, a sketch does not show
        most = limit + unit * weight.figures.reference_l2
        passed = figures.l2 <= most * (1 + limits.SURE * figures.spread)
        return diff.judged(True, Figure.REL_L2, figures.rel_l2, most / size, Rule.LAST_PLACE) if passed else diff
    error = np.abs(sides.candidate - sides.reference)
    # What moves into the next power of two has its units.
    places = np.spacing(np.maximum(*weights.map(np.abs)).astype(dtype)).astype(np.float64)
    beyond = error > limits.LAST_PLACES * places * (1 + unit)
    rest = float(np.linalg.norm(error[beyond]))
    if rest > limit:
        return diff
    return diff.judged(True, Figure.BEYOND_LAST_PLACE, rest / size, limit / size, Rule.LAST_PLACE)
