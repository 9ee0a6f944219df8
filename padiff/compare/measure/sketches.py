"""Distance of two sketched tensors: estimates and their uncertainty."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from padiff.compare.measure.arrays import figures_of
from padiff.compare.measure.operands import Arrays, Sketches
from padiff.records import Both, Figures
from padiff.sketches.sketch import BUCKETS, ELEMENTS, SPREAD, Sketch

# Share of the norm that may differ by chance between samples of one tensor at different places. Norms of outputs of
# convolutions, whose channels differ in size, were measured a third apart, channels first against channels last.
_CHANCE = 0.5


def estimated(sketches: Sketches, elementwise: tuple[float, float] | None) -> Figures:
    """Return the figures of two sketches.

    If both sample the same elements in the same order, the projections estimate the L2 error (``basis`` is
    ``sketches``). Otherwise norms and means bound the error from below (``moments``).
    """
    reference, candidate = sketches.reference, sketches.candidate
    figures = _estimated(sketches, elementwise) if sketches.aligned else _bounded(sketches)
    share = abs(reference.nonfinite - candidate.nonfinite)
    both = min(reference.nonfinite, candidate.nonfinite)
    # Samples at different places have different shares by chance, if both sides have such values.
    by_chance = not sketches.aligned and reference.size > ELEMENTS and both > 0
    count = max(1, round(share * figures.size)) if share > (_CHANCE if by_chance else 0.0) else 0
    overflowed = math.ceil(both * figures.size)
    if not (count or overflowed or figures.nonfinite or figures.overflowed):
        return figures  # a copy takes longer than the measurement
    return replace(figures, nonfinite=count, overflowed=overflowed)


def _estimated(sketches: Sketches, elementwise: tuple[float, float] | None) -> Figures:
    """Return the figures of aligned sketches, from their projections."""
    reference, candidate, scales = sketches.reference, sketches.candidate, sketches.scales
    if reference.size <= BUCKETS:
        # Each number of the projection is one element, up to its sign: nothing is estimated.
        exact = figures_of(Arrays(reference.projection, candidate.projection, scales), elementwise)
        return replace(exact, basis="sketches")
    errors = reference.errors(candidate, *scales)
    l2 = float(np.linalg.norm(errors))
    bulk = float(bulk_of_squares(np.square(errors)))
    return _figures(sketches, l2, bulk, "sketches", SPREAD, elementwise)


def bulk_of_squares(squares: np.ndarray) -> np.ndarray:
    """Return estimates of the L2 norms of errors without a few of their elements.

    The error of a few elements is in a few numbers of the projection, and does not change the numbers' median.

    Args:
        squares: squared errors of projections, one along the last axis; this array is reordered.
    """
    # 0.4549 is the median of a squared normal variable. numpy.median would take much longer.
    squares.partition(BUCKETS // 2, axis=-1)
    return np.asarray(np.sqrt(squares[..., BUCKETS // 2] / 0.4549 * BUCKETS))


def _bounded(sketches: Sketches) -> Figures:
    """Return figures from norms and means, which bound the error from below for any order of the elements."""
    reference, candidate, scales = sketches.reference, sketches.candidate, sketches.scales
    norms = Both(reference.l2 / scales.reference, candidate.l2 / scales.candidate)
    means = abs(reference.mean / scales.reference - candidate.mean / scales.candidate) * math.sqrt(reference.size)
    chance = _CHANCE * max(norms) if reference.size > ELEMENTS else 0.0
    l2 = max(abs(norms.reference - norms.candidate) - chance, means - chance, 0.0)
    return _figures(sketches, l2, l2, "moments", 0.0, None)


def _figures(
    sketches: Sketches,
    l2: float,
    bulk: float,
    basis: str,
    spread: float,
    elementwise: tuple[float, float] | None,
) -> Figures:
    reference, candidate, scales = sketches.reference, sketches.candidate, sketches.scales
    size = reference.size
    root_mean_square = l2 / math.sqrt(size) if size else 0.0
    norm = reference.l2 / scales.reference
    extremes = [abs(c / scales.candidate - r / scales.reference) for r, c in _extremes(reference, candidate)]
    largest = max(abs(reference.minimum), abs(reference.maximum)) / scales.reference
    mismatched = 0
    if elementwise is not None:
        # At least one element has an error of the root mean square or more.
        mismatched = int(root_mean_square > elementwise[0] + elementwise[1] * largest)
    return Figures(
        max_abs=max([root_mean_square, *extremes]) if size else 0.0,
        max_rel=l2 / norm if norm else 0.0,
        mean_abs=root_mean_square,
        mean_reference=reference.mean_abs / scales.reference,
        l2=l2,
        reference_l2=norm,
        candidate_l2=candidate.l2 / scales.candidate,
        size=size,
        bulk_l2=bulk if size > BUCKETS else None,
        mismatched=mismatched,
        basis=basis,
        spread=spread,
    )


def _extremes(reference: Sketch, candidate: Sketch) -> list[tuple[float, float]]:
    # Only if the sketches cover whole tensors or the same elements: other samples have other extremes.
    if reference.size > ELEMENTS and reference.transposed != candidate.transposed:
        return []
    return [(reference.minimum, candidate.minimum), (reference.maximum, candidate.maximum)]
