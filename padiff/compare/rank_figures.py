"""Distances between the records of two processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from padiff.errors import PadiffError
from padiff.records import Record, TensorSource

# Sums in sketches from two machines may differ in their last digits.
_SKETCHES_DIFFER = 1e-6
# Largest relative error of gradients that are a multiple of another rank's, and largest relative spread of the factors:
# float32 rounds by some units in the last place.
_ONE_FACTOR = 1e-5


def values_of(source: TensorSource) -> np.ndarray | None:
    """Return the values; `None` if only a sketch exists, or the values can't be read."""
    if source.sketched:
        return None
    try:
        return np.asarray(source.read())
    except (PadiffError, TypeError, ValueError):
        return None


def wide_values_of(source: TensorSource) -> np.ndarray | None:
    """Return the values in float64; `None` if no values exist, or they are not numbers."""
    value = values_of(source)
    try:
        return None if value is None else value.astype(np.float64)
    except (TypeError, ValueError):
        return None


def error(a: Record, b: Record) -> float:
    """Return the relative L2 difference; 0 if the values are equal to the bit (sketches: up to their last digits)."""
    if a.source.identity == b.source.identity:
        return 0.0  # both records share one file
    if a.sketch is not None and b.sketch is not None:
        first, second = a.sketch.projection.astype(np.float64), b.sketch.projection.astype(np.float64)
        distance = _relative(first, second) if first.shape == second.shape else np.inf
        return distance if distance > _SKETCHES_DIFFER else 0.0
    if a.sketch is not None or b.sketch is not None:
        return 0.0  # not comparable
    x, y = a.value, b.value
    if x.shape != y.shape:
        return np.inf
    if np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
        return 0.0
    return _relative(x.astype(np.float64).reshape(-1), y.astype(np.float64).reshape(-1)) or np.finfo(np.float64).tiny


def constant(record: Record) -> bool:
    """Return True if all elements are equal."""
    if record.sketch is not None:
        return record.sketch.minimum == record.sketch.maximum
    value = record.value
    return value.size == 0 or bool((value == value.flat[0]).all())


def one_factor(pairs: Iterable[tuple[Record, Record]]) -> float | None:
    """Return the factor between the first and the second records; `None` unless two or more pairs share one factor."""
    factors = []
    for a, b in pairs:
        x, y = (
            r.sketch.projection.astype(np.float64) if r.sketch is not None else r.value.astype(np.float64).reshape(-1)
            for r in (a, b)
        )
        square = float(x @ x) if x.shape == y.shape else 0.0
        if not square or not np.isfinite(square):
            return None
        factor = float(x @ y) / square
        if _relative(factor * x, y) > _ONE_FACTOR:
            return None
        factors.append(factor)
    if len(factors) < 2 or max(factors) - min(factors) > _ONE_FACTOR * abs(factors[0]):
        return None
    return factors[0]


def classes(records: Sequence[tuple[int, Record]]) -> list[list[tuple[int, Record]]]:
    """Group processes by equal records of one tensor.

    The first class is the reference: the largest; among equally large classes the one with the lowest rank.
    """
    groups: list[list[tuple[int, Record]]] = []
    for entry in records:
        same = next((group for group in groups if error(group[0][1], entry[1]) == 0), None)
        if same is None:
            groups.append([entry])
        else:
            same.append(entry)
    return sorted(groups, key=lambda group: (-len(group), group[0][0]))


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    scale, difference = max(float(np.linalg.norm(x)), float(np.linalg.norm(y))), float(np.linalg.norm(x - y))
    if not np.isfinite(difference):
        return np.inf  # NaN or infinity on one side, or at other places
    return difference / scale if scale else 0.0
