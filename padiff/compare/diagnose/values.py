"""What the tensors of a failed pair show: one ratio, another order, other zeros."""

from __future__ import annotations

import math

import numpy as np

from padiff.compare.measure.operands import operands
from padiff.errors import SketchOnlyError
from padiff.records import Both, Pair, Problem

#: Relative spread below which a ratio of two tensors counts as one constant.
CONSTANT = 1e-3


def values_of(pair: Pair) -> Both[np.ndarray]:
    """Both sides in one layout, or their projections, whose ratios and angles are those of the tensors.

    Raises:
        SketchOnlyError: there is neither.
    """
    found = operands(pair)
    values = None if isinstance(found, Problem) else found.values()
    if values is None:
        raise SketchOnlyError(pair.anchor.site)
    return values


def ratio_of(reference: np.ndarray, candidate: np.ndarray) -> float | None:
    """The constant that the candidate is of the reference, if it is one."""
    r, c = reference.ravel(), candidate.ravel()
    square = float(np.real(np.vdot(r, r)))
    if r.size == 0 or square == 0 or not np.isfinite(c).all() or not np.isfinite(r).all():
        return None
    ratio = float(np.real(np.vdot(r, c))) / square
    rest = float(np.linalg.norm(c - ratio * r))
    if ratio == 0 or rest > CONSTANT * abs(ratio) * math.sqrt(square) or abs(ratio - 1) < 10 * CONSTANT:
        return None
    return ratio


def round_ratio(ratio: float) -> bool:
    """Whether a ratio, or its inverse, is a whole number that a batch or a class count could be."""
    whole = max(abs(ratio), 1 / abs(ratio))
    return whole < 1e5 and abs(whole - round(whole)) < 1e-4 * whole and round(whole) > 1


def times(ratio: float) -> str:
    return f"{ratio:.5g} times the reference's"


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 1 and a.size == b.size and _agree(np.sort(a, axis=None), np.sort(b, axis=None))


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 0 and bool(np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a))


def masked_apart(reference: np.ndarray, candidate: np.ndarray) -> bool:
    """Whether both are zero in many places, but not in the same ones, and agree in the others."""
    zeros, others = reference == 0, candidate == 0
    few = 0.02 * reference.size
    if reference.shape != candidate.shape or min(zeros.sum(), others.sum(), (zeros != others).sum()) <= few:
        return False
    return _agree(reference[~zeros & ~others], candidate[~zeros & ~others])
