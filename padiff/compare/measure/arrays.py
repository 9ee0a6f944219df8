"""How far apart two tensors are: the arithmetic, stated once, in float64."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from padiff.compare.measure.operands import Arrays
from padiff.records import UNSCALED, Both, Figures

# Elements that are held in float64 at a time, and in float32: few enough to stay in a core's own cache.
_CHUNK = 1 << 16
_CHUNK32 = 2 * _CHUNK
# Elements that are squared and added up in float32 at a time.
_PIECE = 2048
_ONES = np.ones(_CHUNK32, np.float32)
_ONES.setflags(write=False)
# Between these, sums of squares of float32 neither overflow nor lose their smallest terms.
_SMALL, _LARGE = 1e-24, 1e30
# From how many elements on a few may be left out, and how few of them.
_MANY, _FEW = 1000, 20_000
# Groups of elements whose largest are looked at to find the largest of all.
_GROUPS = 1024
_TINY = 5e-324
# One sample in so many may be left out.
_SAMPLES = 8
# Relative L2 error from which on a few elements are looked at, which costs as much again: less is within every limit of
# float32, and of float64 all but nothing is.
_BULK_FROM = {"float64": 1e-4}
_BULK_ELSE = 1e-3


def measured(arrays: Arrays, stage: str, dtype: str, elementwise: tuple[float, float] | None) -> Figures:
    """Figures of two arrays, as `figures_of` gives them, and of the bulk of their elements where a limit may need it.

    Args:
        stage, dtype: of the records.
    """
    figures = figures_of(arrays, elementwise)
    little = _BULK_FROM.get(dtype, _BULK_ELSE) * figures.reference_l2
    if stage in ("backward", "update") and figures.size >= _MANY and figures.l2 > little:
        figures = replace(figures, bulk_l2=_bulk_l2(arrays, by_sample=stage == "backward"))
    return figures


def _bulk_l2(arrays: Arrays, by_sample: bool) -> float:
    """``||c - r||`` without its largest elements (four, and one in `_FEW` of them), or without its worst samples.

    Where rounding moves a value across the kink of a ReLU, or to the other of two nearly equal maxima of a pool, single
    elements of the gradient are wholly different though both sides are right; and where an element of a gradient is
    rounding noise, an adaptive optimizer makes a full-size update of its sign.
    """
    reference, candidate = arrays.reference, arrays.candidate
    left_out = few(reference.size)
    by_sample = by_sample and reference.shape[0] >= _SAMPLES
    samples = np.zeros(reference.shape[0] if by_sample else 1)
    each = reference.size // len(samples)
    largest, rest = np.zeros(left_out), 0.0
    with np.errstate(all="ignore"):
        for start, r, c in _chunks(reference, candidate, each if by_sample else 1):
            r, c, _ = _wide(r, c, arrays.scales)
            squares = np.square(np.abs(np.subtract(c, r, out=c)) if c.dtype.kind == "c" else np.subtract(c, r, out=c))
            if not math.isfinite(np.add.reduce(squares)):
                # As in the other figures, positions that are not finite are left out.
                squares[~np.isfinite(squares)] = 0.0
            if by_sample:
                first = start // each
                if squares.size < each:
                    samples[first] += np.add.reduce(squares)
                else:
                    samples[first : first + squares.size // each] = squares.reshape(-1, each).sum(axis=1)
            # The largest so far are kept aside, not subtracted from a sum that they may dwarf.
            large = np.flatnonzero(squares >= max(largest[0], _among_largest(squares, left_out)))
            if large.size:
                largest = np.concatenate([largest, squares[large]])
                squares[large] = 0.0
                largest.partition(large.size)
                rest += float(np.add.reduce(largest[: large.size]))
                largest = largest[large.size :]
            rest += float(np.add.reduce(squares))
    if by_sample:
        # A normalisation's backward spreads one such element over its whole sample.
        samples.sort()
        rest = min(rest, float(samples[: -(len(samples) // _SAMPLES)].sum()))
    return math.sqrt(rest)


def few(elements: int) -> int:
    """How many elements of a tensor may be wholly different though both sides are right."""
    return 4 + elements // _FEW


def _among_largest(values: np.ndarray, count: int) -> float:
    """A number above 0 that ``count`` of the values reach, and not many more; or the smallest, if none is known."""
    rows = values.size // _GROUPS
    if rows == 0 or count > _GROUPS:
        return _TINY
    # So many groups have one that reaches it.
    tops = values[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0)
    tops.partition(_GROUPS - count)
    return max(float(tops[_GROUPS - count]), _TINY)


def figures_of(arrays: Arrays, elementwise: tuple[float, float] | None = None) -> Figures:
    """Figures of two arrays of one shape.

    Positions where both hold the same kind of NaN or infinity count as equal; where only one does, they are counted
    in ``nonfinite`` and left out of the other figures. Integers that float64 can't tell
    apart still differ.

    Args:
        elementwise: ``(atol, rtol)``: count elements with ``|c - r| > atol + rtol * |r|`` (numpy.isclose's formula).
    """
    reference, candidate, scales = arrays.reference, arrays.candidate, arrays.scales
    if reference.size == 0:
        return Figures(size=0)
    shape = reference.shape
    total = _Sums()
    narrow = reference.dtype == candidate.dtype == np.float32
    with np.errstate(all="ignore"):
        for start, r, c in _chunks(reference, candidate, most=_CHUNK32 if narrow else _CHUNK):
            total.add(start, r, c, elementwise, scales)
    index = (0,) * len(shape) if not total.worst else tuple(int(i) for i in np.unravel_index(total.worst, shape))
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


class _Sums:
    """Running sums over chunks."""

    def __init__(self) -> None:
        self.max_abs = self.max_rel = 0.0
        self.sum_abs = self.sum_reference = 0.0
        self.squares = self.reference_squares = self.candidate_squares = 0.0
        self.finite = self.mismatched = self.nonfinite = self.overflowed = self.worst = 0
        self._equal_so_far = True

    def add(
        self,
        start: int,
        reference: np.ndarray,
        candidate: np.ndarray,
        elementwise: tuple[float, float] | None,
        scales: Both[float],
    ) -> None:
        # A look at the bits is cheap, and two runs of one code are often equal; once they differ they mostly go on to.
        if self._equal_so_far and reference.dtype == candidate.dtype and scales.reference == scales.candidate:
            if _same_bits(reference, candidate) and self._add_equal(reference, scales.reference):
                return
            self._equal_so_far = False
        plain = reference.dtype == candidate.dtype == np.float32 and scales == UNSCALED and elementwise is None
        if plain and self._add_float32(start, reference, candidate):
            return
        r, c, spare = _wide(reference, candidate, scales)
        if r.dtype.kind == c.dtype.kind == "f":
            reference_squares, candidate_squares = _dot(r), _dot(c)
            finite = math.isfinite(reference_squares + candidate_squares)
        else:
            finite = False
        if not finite:
            r, c = self._leave_out(r, c)
            self.candidate_squares += float(np.square(np.abs(c)).sum())
            error, size = np.abs(c - r), np.abs(r)
            reference_squares = _dot(size)
        else:
            self.candidate_squares += candidate_squares
            self.finite += r.size
            error = np.subtract(c, r, out=c)
            np.absolute(error, out=error)
            size = np.absolute(r, out=r)
        if reference.dtype.kind in "iub" and candidate.dtype.kind in "iub" and scales.reference == scales.candidate:
            error[(reference != candidate) & (error == 0)] = 1.0  # int64 neighbours beyond 2**53
        self.reference_squares += reference_squares
        self.squares += _dot(error)
        self.sum_abs += float(np.add.reduce(error))
        self.sum_reference += float(np.add.reduce(size))
        largest = int(error.argmax())
        if error[largest] > self.max_abs:
            self.max_abs, self.worst = float(error[largest]), start + largest
        if elementwise is not None:
            atol, rtol = elementwise
            self.mismatched += int(np.count_nonzero(error > atol + rtol * size))
        self.max_rel = max(self.max_rel, _largest_ratio(error, size, spare[: size.size]))

    def _add_float32(self, start: int, reference: np.ndarray, candidate: np.ndarray) -> bool:
        """Add a chunk of float32, in float32 where that loses nothing that the figures show; false where it might.

        Differences of neighbours are exact, sums are taken over short pieces and added up in float64: norms and means
        are right to some 1e-7, in half the time. Numbers whose squares leave float32's range are left to float64.
        """
        error, size, spare = (room[: reference.size] for room in _buffers.narrow)
        np.subtract(candidate, reference, out=error)
        squares = [_dot32(values) for values in (reference, candidate, error)]
        if not all(value == 0 or _SMALL < value < _LARGE for value in squares):
            return False
        np.absolute(error, out=error)
        np.absolute(reference, out=size)
        sums = _sum32(error), _sum32(size)
        if (squares[2] == 0) != (sums[0] == 0) or (squares[0] == 0) != (sums[1] == 0):
            return False
        self.finite += reference.size
        self.reference_squares += squares[0]
        self.candidate_squares += squares[1]
        self.squares += squares[2]
        self.sum_abs += sums[0]
        self.sum_reference += sums[1]
        largest = int(error.argmax())
        if error[largest] > self.max_abs:
            exact = abs(float(candidate[largest]) - float(reference[largest]))
            self.max_abs, self.worst = exact, start + largest
        self.max_rel = max(self.max_rel, _largest_ratio(error, size, spare))
        return True

    def _add_equal(self, values: np.ndarray, scale: float) -> bool:
        """Add a chunk that both sides share; false where it is not all finite."""
        if values.dtype.kind == "c":
            return False
        size, _, _ = _wide(values, values[:0], Both(scale, 1.0))
        squares = _dot(size)
        if not math.isfinite(squares):
            return False
        self.finite += size.size
        self.reference_squares += squares
        self.candidate_squares += squares
        self.sum_reference += float(np.add.reduce(np.absolute(size, out=size)))
        return True

    def _leave_out(self, r: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        finite_reference, finite_candidate = np.isfinite(r), np.isfinite(c)
        finite = finite_reference & finite_candidate
        self.finite += int(np.count_nonzero(finite))
        if finite.all():
            return r, c
        self.overflowed += int(np.count_nonzero(~(finite_reference | finite_candidate)))
        same = (np.isnan(r) & np.isnan(c)) | (r == c)
        self.nonfinite += int(np.count_nonzero(~finite & ~same))
        return np.where(finite, r, 0), np.where(finite, c, 0)


def _chunks(
    reference: np.ndarray, candidate: np.ndarray, each: int = 1, most: int = _CHUNK
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Position and elements of pieces that fit into the cache, row by row; whole multiples, or parts, of ``each``."""
    if reference.size <= most and each == 1:
        yield 0, reference.ravel(), candidate.ravel()
        return
    blocks = [(0, reference, candidate)]
    if not (reference.flags.c_contiguous and candidate.flags.c_contiguous):
        # In slices of the first axis: a tensor in another layout is never copied whole.
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


class _Buffers(threading.local):
    """Room for three chunks, for each thread."""

    def __init__(self) -> None:
        self.arrays = np.empty((3, _CHUNK32))  # float32 that needs it is looked at in float64, too
        self.narrow = self.arrays.view(np.float32)


_buffers = _Buffers()


def _wide(
    reference: np.ndarray, candidate: np.ndarray, scales: Both[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two chunks in float64, divided by their scales, and room for a third; they last until the next call."""
    room = _buffers.arrays
    wide: list[np.ndarray] = []
    for array, scale, own in zip((reference, candidate), scales, room):
        out: np.ndarray
        if array.dtype.kind == "c":
            out = array.astype(np.complex128)
        else:
            out = own[: array.size]
            out[...] = array
        if scale != 1.0:
            out /= scale
        wide.append(out)
    return wide[0], wide[1], room[2]


def _dot(values: np.ndarray) -> float:
    """Sum of squares."""
    # Not numpy.dot, which starts threads of its own for long vectors, beside ours.
    return float(np.einsum("i,i->", values, values))


def _dot32(values: np.ndarray) -> float:
    """Sum of squares of float32, in float32 over short pieces."""
    return _products(values, values)


def _sum32(values: np.ndarray) -> float:
    """Sum of float32 likewise; twice as fast as numpy's own."""
    return _products(values, _ONES[: values.size])


def _products(a: np.ndarray, b: np.ndarray) -> float:
    """Sum of the products of two vectors of float32; pieces are so short that numpy starts no threads beside ours."""
    whole = a.size // _PIECE * _PIECE
    total = float(np.dot(a[whole:], b[whole:]))
    if whole:
        pieces, others = a[:whole].reshape(-1, 1, _PIECE), b[:whole].reshape(-1, _PIECE, 1)
        total += float(np.add.reduce(np.matmul(pieces, others), axis=None, dtype=np.float64))
    return total


def _largest_ratio(error: np.ndarray, size: np.ndarray, spare: np.ndarray) -> float:
    """Largest relative error; where the reference is 0 there is none."""
    # 0 / 0, which a ReLU gives often, is passed over by fmax.
    relative = float(np.fmax.reduce(np.divide(error, size, out=spare)))
    if not math.isfinite(relative):
        np.multiply(error, size != 0, out=spare)
        relative = float(np.fmax.reduce(np.divide(spare, size, out=spare)))
    # All of them 0 / 0: nothing is above nothing.
    return 0.0 if math.isnan(relative) else relative


def _same_bits(reference: np.ndarray, candidate: np.ndarray) -> bool:
    whole = f"u{min(reference.dtype.itemsize, 8)}"
    return bool(np.logical_and.reduce(reference.view(whole) == candidate.view(whole)))


def _scalar(value: np.generic, scale: float) -> float:
    return float(abs(value)) if np.iscomplexobj(value) else float(value) / scale  # type: ignore[arg-type]
