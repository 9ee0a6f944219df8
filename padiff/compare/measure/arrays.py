"""Figures of two arrays, computed in float64: the definition that all faster computations must match."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from padiff.compare.measure.compiled import kernel_for
from padiff.compare.measure.operands import Arrays
from padiff.compare.measure.sums import CHUNK, Sums, wide
from padiff.records import UNSCALED, Both, Figures

# Smallest size at which a few elements may be left out, and one in how many elements may be left out.
_MANY, _FEW = 1000, 20_000
# Number of groups whose maxima are compared to find the largest elements.
_GROUPS = 1024
_TINY = 5e-324
# One in this many samples may be left out.
_SAMPLES = 8
# Relative L2 error from which on the error without a few elements is measured, which takes as long again. Smaller
# errors are within every limit of float32; float64's limits are smaller.
_BULK_FROM = {"float64": 1e-4}
_BULK_ELSE = 1e-3


def measured(arrays: Arrays, stage: str, dtype: str, elementwise: tuple[float, float] | None) -> Figures:
    """Return the figures of two arrays, as `figures_of`, plus the error of the bulk of their elements where limits
    need it.

    Args:
        stage, dtype: stage and dtype of the records.
    """
    figures = figures_of(arrays, elementwise)
    little = _BULK_FROM.get(dtype, _BULK_ELSE) * figures.reference_l2
    if stage in ("backward", "update") and figures.size >= _MANY and figures.l2 > little:
        figures = replace(figures, bulk_l2=_bulk_l2(arrays, by_sample=stage == "backward"))
    return figures


def _bulk_l2(arrays: Arrays, by_sample: bool) -> float:
    """Return ``||c - r||`` without the largest elements (four, and one in `_FEW`), or without the worst samples.

    Where rounding moves a value across the kink of a ReLU, or to the other of two nearly equal maxima of a pool, single
    elements of the gradient differ completely though both sides are right; and where an element of a gradient is
    rounding noise, an adaptive optimizer makes a full-size update of its sign.
    """
    reference, candidate = arrays.reference, arrays.candidate
    left_out = few(reference.size)
    by_sample = by_sample and reference.shape[0] >= _SAMPLES
    samples = np.zeros(reference.shape[0] if by_sample else 1)
    each = reference.size // len(samples)
    largest, bulk = np.zeros(left_out), 0.0
    with np.errstate(all="ignore"):
        for start, r, c in _chunks(reference, candidate, each if by_sample else 1):
            r, c, _ = wide(r, c, arrays.scales)
            squares = np.square(np.abs(np.subtract(c, r, out=c)) if c.dtype.kind == "c" else np.subtract(c, r, out=c))
            if not math.isfinite(np.add.reduce(squares)):
                # Positions that are not finite are left out, as in the other figures.
                squares[~np.isfinite(squares)] = 0.0
            if by_sample:
                first = start // each
                if squares.size < each:
                    samples[first] += np.add.reduce(squares)
                else:
                    samples[first : first + squares.size // each] = squares.reshape(-1, each).sum(axis=1)
            # The largest squares are added up separately, not subtracted from a sum that they may dwarf.
            large = np.flatnonzero(squares >= max(largest[0], _among_largest(squares, left_out)))
            if large.size:
                largest = np.concatenate([largest, squares[large]])
                squares[large] = 0.0
                largest.partition(large.size)
                bulk += float(np.add.reduce(largest[: large.size]))
                largest = largest[large.size :]
            bulk += float(np.add.reduce(squares))
    if by_sample:
        # A normalisation's backward spreads one such element over its whole sample.
        samples.sort()
        bulk = min(bulk, float(samples[: -(len(samples) // _SAMPLES)].sum()))
    return math.sqrt(bulk)


def few(elements: int) -> int:
    """Return the number of a tensor's elements that may differ completely though both sides are right."""
    return 4 + elements // _FEW


def _among_largest(values: np.ndarray, count: int) -> float:
    """Return a positive number that ``count`` of the values reach, and not many more.

    For few values the smallest positive number is returned, which all other positive values reach.
    """
    rows = values.size // _GROUPS
    if rows == 0 or count > _GROUPS:
        return _TINY
    # Exactly `count` groups have a maximum that reaches the number.
    tops = values[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0)
    tops.partition(_GROUPS - count)
    return max(float(tops[_GROUPS - count]), _TINY)


def figures_of(arrays: Arrays, elementwise: tuple[float, float] | None = None) -> Figures:
    """Return the figures of two arrays of the same shape.

    Positions that are not finite on one side or both are left out of norms and means. Equal infinities, and NaN on both
    sides, count as equal; other such positions are counted in ``nonfinite``. Different integers differ even if they are
    equal in float64.

    Args:
        elementwise: ``(atol, rtol)``: count elements with ``|c - r| > atol + rtol * |r|`` (numpy.isclose's formula).
    """
    reference, candidate, scales = arrays.reference, arrays.candidate, arrays.scales
    if reference.size == 0:
        return Figures(size=0)
    shape = reference.shape
    total = _sums(arrays, elementwise)
    index = _index(total.worst, shape)
    return Figures(
        max_abs=total.max_abs,
        max_rel=total.max_rel,
        mean_abs=total.sum_abs / total.finite if total.finite else 0.0,
        mean_reference=total.sum_reference / total.finite if total.finite else 0.0,
        l2=math.sqrt(total.squares),
        reference_l2=math.sqrt(total.reference_squares),
        candidate_l2=math.sqrt(total.candidate_squares),
        size=reference.size,
        index=index,
        values=Both(_scalar(reference[index], scales.reference), _scalar(candidate[index], scales.candidate)),
        mismatched=total.mismatched,
        nonfinite=total.nonfinite,
        overflowed=total.overflowed,
    )


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the multi-dimensional index of the element at a flat, row-major position."""
    if len(shape) == 1:
        return (place,)
    # numpy.unravel_index takes longer than all the rest of a small tensor's figures.
    index = []
    for extent in reversed(shape):
        place, offset = divmod(place, extent)
        index.append(offset)
    return tuple(reversed(index))


def _sums(arrays: Arrays, elementwise: tuple[float, float] | None) -> Sums:
    reference, candidate, scales = arrays.reference, arrays.candidate, arrays.scales
    plain = elementwise is None and (scales is UNSCALED or scales == UNSCALED)
    kernel = kernel_for(reference, candidate) if plain else None
    if kernel is not None:
        total = Sums(reference.size)
        if reference.flags.c_contiguous and candidate.flags.c_contiguous:
            # Contiguous arrays are one chunk: the compiled loop needs no buffers.
            if total.add_compiled(kernel, reference.reshape(-1), candidate.reshape(-1), 0):
                return total
        elif all(total.add_compiled(kernel, r, c, start) for start, r, c in _chunks(reference, candidate)):
            return total
    total = Sums(reference.size)
    with np.errstate(all="ignore"):
        for start, r, c in _chunks(reference, candidate):
            total.add(start, r, c, elementwise, scales)
    return total


def _chunks(
    reference: np.ndarray, candidate: np.ndarray, each: int = 1, most: int = CHUNK
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield pieces that fit into the cache: the position of the first element, and both sides' elements, row by row.

    Args:
        each: pieces have a whole multiple of this number of elements, or lie within one multiple.
        most: largest number of elements of a piece.
    """
    if reference.size <= most and each == 1:
        yield 0, reference.ravel(), candidate.ravel()
        return
    blocks = [(0, reference, candidate)]
    if not (reference.flags.c_contiguous and candidate.flags.c_contiguous):
        # In slices along the first axis, so that a non-contiguous tensor is never copied as a whole.
        row = reference.size // len(reference)
        rows = max(1, most // row)
        blocks = [(k * row, reference[k : k + rows], candidate[k : k + rows]) for k in range(0, len(reference), rows)]
    length = most // each * each if each <= most else most
    for offset, *block in blocks:
        r, c = (part.ravel() for part in block)
        piece = min(each, r.size) if each > most else r.size
        for begin in range(0, r.size, piece):
            for start in range(begin, min(begin + piece, r.size), length):
                end = min(start + length, begin + piece)
                yield offset + start, r[start:end], c[start:end]


def _scalar(value: np.generic, scale: float) -> float:
    return float(abs(value)) if value.dtype.kind == "c" else float(value) / scale  # type: ignore[arg-type]
