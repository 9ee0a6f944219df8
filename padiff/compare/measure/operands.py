"""Bringing two records to one layout and one kind, arrays or sketches: the operands of what is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from padiff.errors import SketchOnlyError
from padiff.model import equivalents
from padiff.records import BROADCAST, PARAMETER_STAGES, Both, Kind, Pair, Problem, Room
from padiff.sketches.sketch import BUCKETS, Sketch, sketch_of


@dataclass(frozen=True, slots=True)
class Arrays:
    """Two arrays of one shape, and what they are divided by."""

    reference: np.ndarray
    candidate: np.ndarray
    scales: Both[float]

    def values(self) -> Both[np.ndarray]:
        """Both in float64 (complex numbers in complex128), divided by their scales."""
        return Both(_wide(self.reference, self.scales.reference), _wide(self.candidate, self.scales.candidate))


@dataclass(frozen=True, slots=True)
class Sketches:
    """Two sketches, and what they are divided by.

    Attributes:
        aligned: whether they look at the same elements in the same order; else only their norms and means tell.
    """

    reference: Sketch
    candidate: Sketch
    scales: Both[float]
    aligned: bool

    def values(self) -> Both[np.ndarray] | None:
        """Both projections, which keep ratios and angles; `None` where they can't be compared."""
        if not self.aligned:
            return None
        return Both(
            self.reference.projection / self.scales.reference, self.candidate.projection / self.scales.candidate
        )


def operands(pair: Pair, rooms: Both[Room] | None = None) -> Arrays | Sketches | Problem:
    """What of a complete pair can be measured, or why nothing can.

    Args:
        rooms: memory that both may be read into. Default: they stay.
    """
    assert pair.reference is not None and pair.candidate is not None
    one, other = pair.reference.source, pair.candidate.source
    if one.sketched or other.sketched:
        return _sketches(pair)
    if rooms is None:
        reference, candidate = one.read(), other.read()
    else:
        reference, candidate = one.read_into(rooms.reference), other.read_into(rooms.candidate)
    candidate = pair.layout.apply(candidate, reference.shape)
    if pair.layout == BROADCAST:
        reference, candidate = np.broadcast_arrays(reference, candidate)
    if _same_elements(reference.shape, candidate.shape, pair.stage):
        candidate = candidate.reshape(reference.shape)
    if reference.shape != candidate.shape:
        return _other_shapes(reference.shape, candidate.shape)
    return Arrays(reference, candidate, pair.scales)


def elements(pair: Pair) -> Both[np.ndarray] | None:
    """Both sides' elements in one order, divided by their scales; `None` where sketches do not have them.

    Of a small tensor a sketch has each, give or take the sign, which is the same on both sides.
    """
    found = operands(pair)
    if isinstance(found, Sketches):
        return found.values() if math.prod(pair.anchor.shape) <= BUCKETS else None
    return found.values().map(np.ravel) if isinstance(found, Arrays) else None


def _wide(array: np.ndarray, scale: float) -> np.ndarray:
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return wide if scale == 1.0 else wide / scale


def _same_elements(reference: tuple[int, ...], candidate: tuple[int, ...], stage: str) -> bool:
    """Whether two shapes hold the same elements in the same order."""
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
    one, other = reference.sketch, candidate.sketch
    try:
        # A side that was kept in full is brought into the other's layout.
        if one is not None and other is None:
            values = pair.layout.apply(candidate.value, reference.shape)
            return Sketches(one, sketch_of(values, one.transposed), pair.scales, True)
        if one is None and other is not None:
            values = pair.layout.undo(reference.value, candidate.shape)
            return Sketches(sketch_of(values, other.transposed), other, pair.scales, True)
    except SketchOnlyError:
        pass
    if one is None or other is None:
        return Problem(Kind.UNMEASURABLE, "a part of what was kept as a sketch only")
    transposed = one.transposed != other.transposed
    return Sketches(one, other, pair.scales, pair.layout.in_order and transposed == pair.layout.transposes)
