"""Patterns in the values of a pair that differs: a constant ratio, another order, other zeros."""

from __future__ import annotations

import math

import numpy as np

from padiff.compare.measure.operands import operands
from padiff.errors import SketchOnlyError
from padiff.records import Both, Pair, Problem

#: Relative spread below which a ratio of two tensors counts as one constant.
CONSTANT = 1e-3


def values_of(pair: Pair) -> Both[np.ndarray]:
    """Return the values of both sides in one layout, or the projections of their sketches.

    Projections keep the ratios of the tensors' values and the angle between the tensors.

    Raises:
        SketchOnlyError: neither values nor projections are available.
    """
    tensors = operands(pair)
    values = None if isinstance(tensors, Problem) else tensors.values()
    if values is None:
        raise SketchOnlyError(pair.anchor.site)
    return values


def ratio_of(reference: np.ndarray, candidate: np.ndarray) -> float | None:
    """Return the constant ratio of the candidate to the reference; `None` if not constant, or close to 1."""
    r, c = reference.ravel(), candidate.ravel()
    square = float(np.real(np.vdot(r, r)))
    if r.size == 0 or square == 0 or not np.isfinite(c).all() or not np.isfinite(r).all():
        return None
    ratio = float(np.real(np.vdot(r, c))) / square
    residual = float(np.linalg.norm(c - ratio * r))
    if ratio == 0 or residual > CONSTANT * abs(ratio) * math.sqrt(square) or abs(ratio - 1) < 10 * CONSTANT:
        return None
    return ratio


def round_ratio(ratio: float) -> bool:
    """Return True if a ratio, or its inverse, is a whole number that could be a batch size or a number of classes."""
    factor = max(abs(ratio), 1 / abs(ratio))
    return factor < 1e5 and abs(factor - round(factor)) < 1e-4 * factor and round(factor) > 1


def times(ratio: float) -> str:
    return f"{ratio:.5g} times the reference's"


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 1 and a.size == b.size and _agree(np.sort(a, axis=None), np.sort(b, axis=None))


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 0 and bool(np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a))


def masked_apart(reference: np.ndarray, candidate: np.ndarray) -> bool:
    """Return True if both tensors have many zeros, partly at different places, and agree where neither is zero."""
    zeros, others = reference == 0, candidate == 0
    few = 0.02 * reference.size
    if reference.shape != candidate.shape or min(zeros.sum(), others.sum(), (zeros != others).sum()) <= few:
        return False
    return _agree(reference[~zeros & ~others], candidate[~zeros & ~others])
