"""How far apart what two processes recorded is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from padiff.errors import PadiffError
from padiff.records import Record, TensorSource

# Of sketches, the numbers that were added up on two machines may differ in their last digits.
_SKETCHES_DIFFER = 1e-6
# Gradients that are one multiple of another rank's: float32 rounds their ratio by some units in the last place.
_ONE_FACTOR = 1e-5


def values_of(source: TensorSource) -> np.ndarray | None:
    """The values; `None` where a sketch is all that was kept, or they can't be read."""
    if source.sketched:
        return None
    try:
        return np.asarray(source.read())
    except (PadiffError, TypeError, ValueError):
        return None


def wide_values_of(source: TensorSource) -> np.ndarray | None:
    """The values in float64; `None` where there are none, or they are no numbers."""
    value = values_of(source)
    try:
        return None if value is None else value.astype(np.float64)
    except (TypeError, ValueError):
        return None


def error(a: Record, b: Record) -> float:
    """The relative L2 difference; 0 where they are equal to the bit (of sketches: but for their last digits)."""
    if a.source.identity == b.source.identity:
        return 0.0  # one file that stands for both
    if a.sketch is not None and b.sketch is not None:
        left, right = a.sketch.projection.astype(np.float64), b.sketch.projection.astype(np.float64)
        found = _relative(left, right) if left.shape == right.shape else np.inf
        return found if found > _SKETCHES_DIFFER else 0.0
    if a.sketch is not None or b.sketch is not None:
        return 0.0  # not comparable
    x, y = a.value, b.value
    if x.shape != y.shape:
        return np.inf
    if np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
        return 0.0
    return _relative(x.astype(np.float64).reshape(-1), y.astype(np.float64).reshape(-1)) or np.finfo(np.float64).tiny


def constant(record: Record) -> bool:
    """Whether all elements are equal."""
    if record.sketch is not None:
        return record.sketch.minimum == record.sketch.maximum
    value = record.value
    return value.size == 0 or bool((value == value.flat[0]).all())


def one_factor(pairs: Iterable[tuple[Record, Record]]) -> float | None:
    """What all second records are of the first ones; `None` where they are not one multiple of them."""
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
    """Processes and what they recorded of one tensor, those that hold the same together.

    The first class is what the others are held against: the largest, of equally large ones that of the lowest rank.
    """
    found: list[list[tuple[int, Record]]] = []
    for one in records:
        same = next((own for own in found if error(own[0][1], one[1]) == 0), None)
        if same is None:
            found.append([one])
        else:
            same.append(one)
    return sorted(found, key=lambda own: (-len(own), own[0][0]))


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    scale, difference = max(float(np.linalg.norm(x)), float(np.linalg.norm(y))), float(np.linalg.norm(x - y))
    if not np.isfinite(difference):
        return np.inf  # NaN or infinity on one side, or at other places
    return difference / scale if scale else 0.0
