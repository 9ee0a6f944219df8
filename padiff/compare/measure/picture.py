"""Picture of two tensors that differ: distributions, worst elements, and the error's place in the tensor."""

from __future__ import annotations

import math

import numpy as np

from padiff.compare.measure.operands import Arrays, operands
from padiff.errors import PadiffError
from padiff.records import PARAMETER_STAGES, Both, Element, Pair, Picture, Problem

# Least and most bins of a histogram, number of worst elements, and largest rows and columns of the grid: some ten
# kilobytes as JSON, and as much as a card can show.
_BINS, _WORST, _GRID = (8, 32), 6, (24, 48)
# Largest number of elements of a picture: more would take hundreds of megabytes in float64.
_MOST = 1 << 24


def picture_of(pair: Pair) -> Picture | None:
    """Return the picture of a pair; `None` if a tensor is not fully recorded, too large, or not comparable."""
    if not pair.complete or math.prod(pair.anchor.shape) > _MOST:
        return None
    try:
        pair_operands = operands(pair)
    except PadiffError:
        # A sketch, or a step that a recorder has deleted meanwhile: the diff has no picture.
        return None
    if isinstance(pair_operands, Problem) or not isinstance(pair_operands, Arrays) or not pair_operands.reference.size:
        return None
    values = pair_operands.values()
    if values.reference.dtype.kind == "c" or values.candidate.dtype.kind == "c":
        return None  # complex numbers have no order, and so no histogram
    with np.errstate(all="ignore"):
        error = np.abs(values.candidate - values.reference)
    # NaN or infinity on one side only is an infinite error; the same on both sides is no error.
    odd = ~np.isfinite(error)
    if odd.any():
        reference, candidate = values
        alike = (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
        error[odd] = np.where(alike[odd], 0.0, np.inf)
    edges, counts = _histograms(values)
    grid, rows, columns = _grid(error, pair.stage in PARAMETER_STAGES)
    return Picture(
        shape=tuple(values.reference.shape),
        edges=edges,
        counts=counts,
        worst=_worst(values, error),
        error=tuple(tuple(row) for row in grid.tolist()),
        rows=rows,
        columns=columns,
    )


def _histograms(values: Both[np.ndarray]) -> tuple[tuple[float, ...], Both[tuple[int, ...]]]:
    finite = values.map(lambda side: side[np.isfinite(side)])
    nonempty = [side for side in finite if side.size]
    low = min((float(side.min()) for side in nonempty), default=0.0)
    high = max((float(side.max()) for side in nonempty), default=0.0)
    # numpy's own widening of an empty range, or a range below the values' precision, vanishes by rounding.
    least = max(abs(low), abs(high)) * 1e-9 or 1.0
    if high - low < least:
        low, high = low - least / 2, high + least / 2
    bins = min(max(round(2 * math.sqrt(values.reference.size)), _BINS[0]), _BINS[1])
    edges = np.linspace(low, high, bins + 1)
    counts = finite.map(lambda side: tuple(np.histogram(side, bins=edges)[0].tolist()))
    return tuple(edges.tolist()), counts


def _worst(values: Both[np.ndarray], error: np.ndarray) -> tuple[Element, ...]:
    flat = error.ravel()
    count = min(_WORST, flat.size)
    places = np.argpartition(flat, flat.size - count)[flat.size - count :]
    places = places[np.argsort(-flat[places], kind="stable")]
    elements = []
    for place in places.tolist():
        if flat[place] > 0:
            index = tuple(int(i) for i in np.unravel_index(place, error.shape))
            elements.append(Element(index, values.map(lambda side, index=index: float(side[index]))))  # type: ignore[misc]
    return tuple(elements)


def _grid(error: np.ndarray, parameter: bool) -> tuple[np.ndarray, str, str]:
    """Return the error, reduced by maximum to a small grid, and the meaning of the grid's rows and columns.

    Rows of a parameter are its first axis; rows of an activation with three or more axes are its second axis: channels,
    or places in a sequence, reduced over samples.
    """
    axes = error.ndim
    if axes <= 1:
        flat = error.reshape(1, -1)
        return _folded(flat), "", f"{flat.shape[1]:,} elements"
    if parameter or axes == 2:
        flat, row, extents = error.reshape(error.shape[0], -1), 0, error.shape[1:]
    else:
        flat, row, extents = error.max(axis=0).reshape(error.shape[1], -1), 1, error.shape[2:]
    columns = " x ".join(str(n) for n in extents)
    names = {(0, False): "samples", (1, False): "channels"}
    what = names.get((row, parameter), "rows")
    return _folded(flat), f"{flat.shape[0]:,} {what} (axis {row})", f"{columns} elements of each"


def _folded(flat: np.ndarray) -> np.ndarray:
    for axis, most in enumerate(_GRID):
        size = flat.shape[axis]
        if size > most:
            starts = np.linspace(0, size, most, endpoint=False).astype(np.int64)
            flat = np.maximum.reduceat(flat, starts, axis=axis)
    return flat
