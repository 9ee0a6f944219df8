"""Operands of a measurement in one layout and of one kind, and pictures of two tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padiff.errors import PadiffError, RunFolderError, SketchOnlyError
from padiff.model import equivalents
from padiff.records import (
    BROADCAST,
    PARAMETER_STAGES,
    Both,
    Element,
    Kind,
    Pair,
    Picture,
    Problem,
    Record,
    is_of_loss,
    loss_role,
)
from padiff.sketches.sketch import BUCKETS, Sketch, sketch_of


@dataclass(frozen=True, slots=True)
class Arrays:
    """Two arrays of one shape, and the divisors of their values."""

    reference: np.ndarray
    candidate: np.ndarray
    scales: Both[float]

    def values(self) -> Both[np.ndarray]:
        """Return both arrays in float64 (complex numbers in complex128), divided by their scales."""
        return Both(_wide(self.reference, self.scales.reference), _wide(self.candidate, self.scales.candidate))


@dataclass(frozen=True, slots=True)
class Sketches:
    """Two sketches, and the divisors of their values.

    Attributes:
        aligned: True if both sample the same elements in the same order; otherwise only norms and means are comparable.
    """

    reference: Sketch
    candidate: Sketch
    scales: Both[float]
    aligned: bool

    def values(self) -> Both[np.ndarray] | None:
        """Return both projections, which preserve ratios and angles; `None` if they can't be compared."""
        if not self.aligned:
            return None
        return Both(
            self.reference.projection / self.scales.reference, self.candidate.projection / self.scales.candidate
        )


def operands(pair: Pair) -> Arrays | Sketches | Problem:
    """Return the operands of a complete pair, or the reason why nothing can be measured."""
    assert pair.reference is not None and pair.candidate is not None
    expected, actual = pair.reference.source, pair.candidate.source
    if expected.sketched or actual.sketched:
        return _sketches(pair)
    reference, candidate = expected.read(), actual.read()
    candidate = pair.layout.apply(candidate, reference.shape)
    if pair.layout == BROADCAST:
        reference, candidate = np.broadcast_arrays(reference, candidate)
    if _same_elements(reference.shape, candidate.shape, pair.stage):
        candidate = candidate.reshape(reference.shape)
    if reference.shape != candidate.shape:
        return _other_shapes(reference.shape, candidate.shape)
    return Arrays(reference, candidate, pair.scales)


def elements(pair: Pair) -> Both[np.ndarray] | None:
    """Return both sides' elements in one order, divided by their scales; `None` if sketches do not contain them.

    The sketch of a small tensor contains each element, up to a sign that is the same on both sides.
    """
    pair_operands = operands(pair)
    if isinstance(pair_operands, Sketches):
        return pair_operands.values() if math.prod(pair.anchor.shape) <= BUCKETS else None
    return pair_operands.values().map(np.ravel) if isinstance(pair_operands, Arrays) else None


def _wide(array: np.ndarray, scale: float) -> np.ndarray:
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return wide if scale == 1.0 else wide / scale


def _same_elements(reference: tuple[int, ...], candidate: tuple[int, ...], stage: str) -> bool:
    """Return True if two shapes hold the same elements in the same order."""
    # A scalar loss is () in one framework and (1,) in the other.
    if math.prod(reference) == math.prod(candidate) == 1:
        return True
    return stage in PARAMETER_STAGES and equivalents.same_order(reference, candidate)


def _other_shapes(reference: tuple[int, ...], candidate: tuple[int, ...]) -> Problem:
    return Problem(Kind.SHAPES, f"shapes differ: {reference} against {candidate}")


def _sketches(pair: Pair) -> Sketches | Problem:
    reference, candidate = pair.reference, pair.candidate
    assert reference is not None and candidate is not None
    if pair.layout == BROADCAST:
        what = "one side has for every sample what the other has once, and a sketch is of the whole"
        return Problem(Kind.UNMEASURABLE, what)
    shape = pair.layout.shape(candidate.shape, reference.shape)
    if reference.shape != shape and not _same_elements(reference.shape, shape, pair.stage):
        return _other_shapes(reference.shape, shape)
    expected, actual = reference.sketch, candidate.sketch
    try:
        # A full tensor is converted to the other side's layout and sketched.
        if expected is not None and actual is None:
            values = pair.layout.apply(candidate.value, reference.shape)
            return Sketches(expected, sketch_of(values, expected.transposed), pair.scales, True)
        if expected is None and actual is not None:
            values = pair.layout.undo(reference.value, candidate.shape)
            return Sketches(sketch_of(values, actual.transposed), actual, pair.scales, True)
    except SketchOnlyError:
        pass
    if expected is None or actual is None:
        return Problem(Kind.UNMEASURABLE, "a part of what was kept as a sketch only")
    transposed = expected.transposed != actual.transposed
    return Sketches(expected, actual, pair.scales, pair.layout.in_order and transposed == pair.layout.transposes)


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
        error = np.where(odd, np.where(alike, 0.0, np.inf), error)
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


def labels_by_call(records: Sequence[Record]) -> dict[int, Record]:
    """Return the integer labels of loss functions, by call number.

    A call number with several labels is left out, because several functions share the number.
    """
    used = [record for record in records if is_of_loss(record) and loss_role(record.slot) == "labels"]
    labels = [record for record in used if record.dtype.startswith(("int", "uint"))]
    times = Counter(record.call for record in labels)
    return {record.call: record for record in labels if times[record.call] == 1}


def same_labels(reference: Record, candidate: Record) -> bool:
    """Return True if two losses have the same labels. All negative numbers are equal: they mark ignored labels."""
    try:
        expected, actual = reference.value.ravel(), candidate.value.ravel()
    except (RunFolderError, SketchOnlyError):
        return False
    if expected.shape != actual.shape or not expected.size:
        return False
    return bool(((expected == actual) | ((expected < 0) & (actual < 0))).all())
