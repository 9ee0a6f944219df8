"""How far apart two tensors are: the arithmetic, stated once, in float64."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from padiff.model import equivalents
from padiff.pair import layouts as views
from padiff.records import PARAMETER_STAGES, Diff, Figures, Pair

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


def measure(pair: Pair, elementwise: tuple[float, float] | None = None) -> Diff:
    """Measure a pair; a pure function of the two records.

    Args:
        pair: the two records; with a missing side the other's norm is still measured.
        elementwise: ``(atol, rtol)``: count elements with ``|c - r| > atol + rtol * |r|`` (numpy.isclose's formula).

    Returns:
        The diff, not judged yet: ``passed`` is false only where ``problem`` says why.
    """
    if pair.reference is None or pair.candidate is None:
        side = "reference" if pair.reference is None else "candidate"
        return Diff(pair, figures=_lone(pair), passed=True, problem=f"missing on the {side}")
    reference, candidate = _loaded(pair)
    if reference.shape != candidate.shape:
        shapes = f"shapes differ: {reference.shape} against {candidate.shape}"
        return Diff(pair, passed=False, problem=shapes)
    figures = figures_of(reference, candidate, elementwise, pair.scales)
    few = _BULK_FROM.get(pair.reference.dtype, _BULK_ELSE) * figures.reference_l2
    if pair.stage in ("backward", "update") and figures.size >= _MANY and figures.l2 > few:
        figures = replace(figures, bulk_l2=_bulk_l2(reference, candidate, pair.scales, pair.stage == "backward"))
    problem = ""
    if figures.nonfinite:
        problem = f"{figures.nonfinite} of {figures.size} values are NaN or infinite on one side only"
    return Diff(pair, figures=figures, passed=not problem, problem=problem)


def _bulk_l2(reference: np.ndarray, candidate: np.ndarray, scales: tuple[float, float], by_sample: bool) -> float:
    """``||c - r||`` without its largest elements (four, and one in `_FEW` of them), or without its worst samples.

    Where rounding moves a value across the kink of a ReLU, or to the other of two nearly equal maxima of a pool, single
    elements of the gradient are wholly different though both sides are right; and where an element of a gradient is
    rounding noise, an adaptive optimizer makes a full-size update of its sign.
    """
    left_out = few(reference.size)
    by_sample = by_sample and reference.shape[0] >= _SAMPLES
    samples = np.zeros(reference.shape[0] if by_sample else 1)
    each = reference.size // len(samples)
    largest, rest = np.zeros(left_out), 0.0
    with np.errstate(all="ignore"):
        for start, left, right in _chunks(reference, candidate, each if by_sample else 1):
            r, c, _ = _wide(left, right, scales)
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


def _loaded(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    assert pair.reference is not None and pair.candidate is not None
    reference, candidate = pair.reference.value, pair.candidate.value
    candidate = views.apply(pair.transform, candidate, reference.shape)
    if pair.transform == views.BROADCAST:
        reference, candidate = np.broadcast_arrays(reference, candidate)
    if reference.size == candidate.size == 1:
        # A scalar loss is () in one framework and (1,) in the other.
        candidate = candidate.reshape(reference.shape)
    if pair.stage in PARAMETER_STAGES and equivalents.same_order(reference.shape, candidate.shape):
        candidate = candidate.reshape(reference.shape)
    return reference, candidate


def loaded(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Both sides of a pair in one layout, in float64, divided by their scales."""
    sides = []
    for array, scale in zip(_loaded(pair), pair.scales):
        wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
        sides.append(wide if scale == 1.0 else wide / scale)
    return sides[0], sides[1]


def _lone(pair: Pair) -> Figures:
    array = pair.anchor.value
    zeros = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    own = figures_of(array, zeros, None, pair.scales)
    norm, value = own.reference_l2, own.values[0]
    if pair.reference is not None:
        return Figures(size=own.size, reference_l2=norm, values=(value, 0.0))
    return Figures(size=own.size, candidate_l2=norm, values=(0.0, value))


def figures_of(
    reference: np.ndarray,
    candidate: np.ndarray,
    elementwise: tuple[float, float] | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Figures:
    """Figures of two arrays of one shape.

    Positions where both hold the same kind of NaN or infinity count as equal; where only one does, they are counted
    in ``nonfinite`` and left out of the other figures. Integers that float64 can't tell
    apart still differ.
    """
    if reference.size == 0:
        return Figures(size=0)
    shape = reference.shape
    total = _Sums()
    narrow = reference.dtype == candidate.dtype == np.float32
    with np.errstate(all="ignore"):
        for start, left, right in _chunks(reference, candidate, most=_CHUNK32 if narrow else _CHUNK):
            total.add(start, left, right, elementwise, scales)
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
        values=(_scalar(reference[index], scales[0]), _scalar(candidate[index], scales[1])),
        beyond=total.beyond,
        nonfinite=total.nonfinite,
        overflowed=total.overflowed,
    )


class _Sums:
    """Running sums over chunks."""

    def __init__(self) -> None:
        self.max_abs = self.max_rel = 0.0
        self.sum_abs = self.sum_reference = 0.0
        self.squares = self.reference_squares = self.candidate_squares = 0.0
        self.finite = self.beyond = self.nonfinite = self.overflowed = self.worst = 0
        self._equal_so_far = True

    def add(
        self,
        start: int,
        left: np.ndarray,
        right: np.ndarray,
        elementwise: tuple[float, float] | None,
        scales: tuple[float, float],
    ) -> None:
        # A look at the bits is cheap, and two runs of one code are often equal; once they differ they mostly go on to.
        if self._equal_so_far and left.dtype == right.dtype and scales[0] == scales[1]:
            if _same_bits(left, right) and self._add_equal(left, scales[0]):
                return
            self._equal_so_far = False
        plain = left.dtype == right.dtype == np.float32 and scales == (1.0, 1.0) and elementwise is None
        if plain and self._add_float32(start, left, right):
            return
        r, c, spare = _wide(left, right, scales)
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
        if left.dtype.kind in "iub" and right.dtype.kind in "iub" and scales[0] == scales[1]:
            error[(left != right) & (error == 0)] = 1.0  # int64 neighbours beyond 2**53
        self.reference_squares += reference_squares
        self.squares += _dot(error)
        self.sum_abs += float(np.add.reduce(error))
        self.sum_reference += float(np.add.reduce(size))
        largest = int(error.argmax())
        if error[largest] > self.max_abs:
            self.max_abs, self.worst = float(error[largest]), start + largest
        if elementwise is not None:
            atol, rtol = elementwise
            self.beyond += int(np.count_nonzero(error > atol + rtol * size))
        self.max_rel = max(self.max_rel, _largest_ratio(error, size, spare[: size.size]))

    def _add_float32(self, start: int, left: np.ndarray, right: np.ndarray) -> bool:
        """Add a chunk of float32, in float32 where that loses nothing that the figures show; false where it might.

        Differences of neighbours are exact, sums are taken over short pieces and added up in float64: norms and means
        are right to some 1e-7, in half the time. Numbers whose squares leave float32's range are left to float64.
        """
        error, size, spare = (room[: left.size] for room in _buffers.narrow)
        np.subtract(right, left, out=error)
        squares = [_dot32(values) for values in (left, right, error)]
        if not all(value == 0 or _SMALL < value < _LARGE for value in squares):
            return False
        np.absolute(error, out=error)
        np.absolute(left, out=size)
        sums = _sum32(error), _sum32(size)
        if (squares[2] == 0) != (sums[0] == 0) or (squares[0] == 0) != (sums[1] == 0):
            return False
        self.finite += left.size
        self.reference_squares += squares[0]
        self.candidate_squares += squares[1]
        self.squares += squares[2]
        self.sum_abs += sums[0]
        self.sum_reference += sums[1]
        largest = int(error.argmax())
        if error[largest] > self.max_abs:
            exact = abs(float(right[largest]) - float(left[largest]))
            self.max_abs, self.worst = exact, start + largest
        self.max_rel = max(self.max_rel, _largest_ratio(error, size, spare))
        return True

    def _add_equal(self, values: np.ndarray, scale: float) -> bool:
        """Add a chunk that both sides share; false where it is not all finite."""
        if values.dtype.kind == "c":
            return False
        size, _, _ = _wide(values, values[:0], (scale, 1.0))
        squares = _dot(size)
        if not math.isfinite(squares):
            return False
        self.finite += size.size
        self.reference_squares += squares
        self.candidate_squares += squares
        self.sum_reference += float(np.add.reduce(np.absolute(size, out=size)))
        return True

    def _leave_out(self, r: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ours, theirs = np.isfinite(r), np.isfinite(c)
        finite = ours & theirs
        self.finite += int(np.count_nonzero(finite))
        if finite.all():
            return r, c
        self.overflowed += int(np.count_nonzero(~(ours | theirs)))
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
    for offset, ours, theirs in blocks:
        left, right = ours.ravel(), theirs.ravel()
        part = min(each, left.size) if each > most else left.size
        for begin in range(0, left.size, part):
            for start in range(begin, min(begin + part, left.size), length):
                end = min(start + length, begin + part)
                yield offset + start, left[start:end], right[start:end]


class _Buffers(threading.local):
    """Room for three chunks, for each thread."""

    def __init__(self) -> None:
        self.arrays = np.empty((3, _CHUNK32))  # float32 that needs it is looked at in float64, too
        self.narrow = self.arrays.view(np.float32)


_buffers = _Buffers()


def _wide(
    left: np.ndarray, right: np.ndarray, scales: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two chunks in float64, divided by their scales, and room for a third; they last until the next call."""
    room = _buffers.arrays
    wide: list[np.ndarray] = []
    for array, scale, own in zip((left, right), scales, room):
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


def _products(left: np.ndarray, right: np.ndarray) -> float:
    """Sum of the products of two vectors of float32; pieces are so short that numpy starts no threads beside ours."""
    whole = left.size // _PIECE * _PIECE
    total = float(np.dot(left[whole:], right[whole:]))
    if whole:
        pieces, others = left[:whole].reshape(-1, 1, _PIECE), right[:whole].reshape(-1, _PIECE, 1)
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


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    whole = f"u{min(left.dtype.itemsize, 8)}"
    return bool(np.logical_and.reduce(left.view(whole) == right.view(whole)))


def _scalar(value: np.generic, scale: float) -> float:
    return float(abs(value)) if np.iscomplexobj(value) else float(value) / scale  # type: ignore[arg-type]
