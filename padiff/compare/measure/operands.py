"""Operands of a measurement: two records in one layout and of one kind, arrays or sketches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from padiff.errors import SketchOnlyError
from padiff.model import equivalents
from padiff.records import BROADCAST, PARAMETER_STAGES, Both, Kind, OutputBuffer, Pair, Problem
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


def operands(pair: Pair, rooms: Both[OutputBuffer] | None = None) -> Arrays | Sketches | Problem:
    """Return the operands of a complete pair, or the reason why nothing can be measured.

    Args:
        rooms: reusable memory for both tensors. Default: new memory, which stays valid.
    """
    assert pair.reference is not None and pair.candidate is not None
    expected, actual = pair.reference.source, pair.candidate.source
    if expected.sketched or actual.sketched:
        return _sketches(pair)
    if rooms is None:
        reference, candidate = expected.read(), actual.read()
    else:
        reference, candidate = expected.read_into(rooms.reference), actual.read_into(rooms.candidate)
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
