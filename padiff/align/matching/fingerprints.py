"""Units of two models with the same values in any order: both models may start from the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from padiff.align.matching.parameter_units import Unit
from padiff.align.runtime_evidence import Values
from padiff.records import Both
from padiff.sketches.sketch import Sketch

#: Sum, sum of squares, minimum and maximum.
_Print = tuple[float, float, float, float]

# Number of elements per pass, which fit a core's own cache, and number of elements per product, for which numpy starts
# no threads.
_CHUNK = 1 << 16
_PIECE = 1 << 13

# Number of float32 elements that are summed in float32: few enough that the rounding error of a sum is far below the
# tolerance of fingerprints. A sum of squares is accurate between the two bounds.
_NARROW = 2048
_ONES = np.ones((_NARROW, 1), np.float32)
_ONES.setflags(write=False)
_SMALL, _LARGE = 1e-24, 1e30

# Share of fingerprints that must occur on both sides for the models to count as started from the same weights.
_MOST = 0.5


def value_numbers(units: Both[list[Unit]], values: Both[Values | None]) -> Both[dict[Unit, int]]:
    """Return a number for each unit whose weight is not constant; equal values have the same number on both sides.

    Both maps are empty if less than half of the weights occur on the other side: the models then start from different
    weights, and values are no evidence.
    """
    nothing: Both[dict[Unit, int]] = Both({}, {})
    prints = Both(*(_prints(side, read) if read is not None else {} for side, read in zip(units, values)))
    if not all(prints):
        return nothing
    sorted_prints = sorted((fingerprint, unit.defined, unit) for unit, fingerprint in prints.reference.items())
    table = np.array([fingerprint for fingerprint, _, _ in sorted_prints])
    numbers: Both[dict[Unit, int]] = Both({}, {})
    again = [False, *_equal(table[1:], table[:-1]).tolist()]
    for k, (_, _, unit) in enumerate(sorted_prints):
        numbers.reference[unit] = numbers.reference[sorted_prints[k - 1][2]] if again[k] else k
    others = np.array(list(prints.candidate.values()))
    # The table is sorted by the sum, so that only near neighbours can be equal.
    slack = 1e-3 * np.sqrt(others[:, 1]) + 1e-12
    near = [np.searchsorted(table[:, 0], others[:, 0] + off).tolist() for off in (-slack, slack)]
    matched = 0
    for number, (unit, row, low, high) in enumerate(zip(prints.candidate, others, *near)):
        equal = np.flatnonzero(_equal(table[low:high], row))
        matched += bool(equal.size)
        number = numbers.reference[sorted_prints[low + equal[0]][2]] if equal.size else len(sorted_prints) + number
        numbers.candidate[unit] = number
    return numbers if matched >= _MOST * min(prints.map(len)) else nothing


def _prints(units: Sequence[Unit], values: Values) -> dict[Unit, _Print]:
    prints = {}
    for unit in units:
        weight = unit.parameters.get("weight")
        fingerprint = _fingerprint(values(unit.path, weight.slot)) if weight is not None else None
        if fingerprint is not None:
            prints[unit] = fingerprint
    return prints


def _fingerprint(values: np.ndarray | Sketch | None) -> _Print | None:
    """Return figures that do not depend on the order of the values; `None` for constants and values that are not
    finite.
    """
    if isinstance(values, Sketch):
        if values.size < 2 or values.minimum == values.maximum:
            return None
        return values.mean * values.size, values.mean_square * values.size, values.minimum, values.maximum
    if values is None or values.size < 2 or values.dtype.kind not in "fV":
        return None
    total = squares = 0.0
    least, largest = np.inf, -np.inf
    flat, room = values.reshape(-1), np.empty(min(values.size, _CHUNK))
    # In one pass, so that a large weight is read from memory once.
    for start in range(0, flat.size, _CHUNK):
        piece = flat[start : start + _CHUNK]
        sums = _narrow_sums(piece) if piece.dtype == np.float32 and piece.size == _CHUNK else None
        if sums is None:
            wide = room[: piece.size]
            wide[...] = piece
            sums = (
                float(np.add.reduce(wide)),
                sum(float(np.dot(wide[k : k + _PIECE], wide[k : k + _PIECE])) for k in range(0, len(wide), _PIECE)),
            )
            piece = wide
        total, squares = total + sums[0], squares + sums[1]
        if not np.isfinite(squares):
            return None
        least, largest = min(least, float(np.minimum.reduce(piece))), max(largest, float(np.maximum.reduce(piece)))
    return None if least == largest else (total, squares, least, largest)


def _narrow_sums(values: np.ndarray) -> tuple[float, float] | None:
    """Return sum and sum of squares of float32 in a third of the time; `None` if float32 does not hold the squares."""
    rows = values.reshape(-1, 1, _NARROW)
    # Products of rows, for which numpy starts no threads.
    with np.errstate(all="ignore"):
        squares = float(np.add.reduce(np.matmul(rows, values.reshape(-1, _NARROW, 1)), axis=None, dtype=np.float64))
        if not _SMALL < squares < _LARGE:
            return None
        return float(np.add.reduce(np.matmul(rows, _ONES), axis=None, dtype=np.float64)), squares


def _equal(prints: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return a mask of the fingerprints that equal `others` (one fingerprint, or one for each) up to rounding."""
    # A sum of values that nearly cancel is accurate only relative to their norm.
    scale = np.abs(others)
    scale[..., 0] = np.sqrt(others[..., 1])
    return np.asarray((np.abs(prints - others) <= 1e-4 * scale + 1e-12).all(axis=-1))
