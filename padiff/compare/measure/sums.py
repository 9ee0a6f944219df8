"""Sums over the elements of two arrays, in one pass over pieces that stay in the cache.

This module uses numpy; `padiff.compare.measure.sums` computes the same sums in one loop, if that is available.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from padiff.records import UNSCALED, Both

Kernel: TypeAlias = Callable[
    [np.ndarray, np.ndarray, float, float], tuple[float, float, float, float, float, float, int, float]
]

# Elements that numpy measures in a process before the kernel is loaded. Measured: importing numba and loading its
# cached code takes 0.3 s of processor time, and numpy takes 1.3 ns longer for each element. So the whole measurement
# never takes more than twice as long as the better choice, however much work follows.
_PAYS = 250_000_000
#: Smallest number of elements for the kernel. Smaller tensors take equally long either way; numpy always measures them,
#: so that their figures do not depend on installed packages.
LEAST = 1 << 15

_TAKEN = (np.dtype(np.float32), np.dtype(np.float64))


class _Compiled:
    """Kernel of this process, and the number of elements measured without it."""

    def __init__(self) -> None:
        self.seen = 0
        self.kernel: Kernel | None = None
        self.tried = False
        self._lock = threading.Lock()

    def load(self) -> Kernel | None:
        with self._lock:
            if not self.tried:
                self.kernel = _loaded()
                self.tried = True
        return self.kernel


_compiled = _Compiled()


def load() -> Kernel | None:
    """Load the kernel now, regardless of the amount of work, and return it; `None` if numba is missing or fails."""
    return _compiled.load()


def kernel_for(reference: np.ndarray, candidate: np.ndarray) -> Kernel | None:
    """Return the kernel for two arrays, or `None` if numpy must measure them: kernel unavailable, not worth loading, or
    unsuited.
    """
    if reference.size < LEAST or reference.dtype != candidate.dtype or reference.dtype not in _TAKEN:
        return None
    if not (reference.flags.aligned and candidate.flags.aligned):
        return None
    if _compiled.kernel is None and not _compiled.tried:
        _compiled.seen += reference.size
        return None if _compiled.seen < _PAYS else _compiled.load()
    return _compiled.kernel


def _loaded() -> Kernel | None:
    try:
        from padiff.compare.measure.kernel import one_pass

        # Compiled for read-only arrays, as those of files are: one version for each dtype.
        def kernel(
            reference: np.ndarray, candidate: np.ndarray, max_abs: float, max_rel: float
        ) -> tuple[float, float, float, float, float, float, int, float]:
            return one_pass(_read_only(reference), _read_only(candidate), max_abs, max_rel)  # type: ignore[no-any-return]

        probe = np.ones(1, np.float32)
        return kernel if kernel(probe, probe, 0.0, 0.0)[1] == 1.0 else None
    except Exception:  # numba is missing, does not fit this numpy, or has no cache folder: numpy measures
        return None


def _read_only(array: np.ndarray) -> np.ndarray:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


#: Elements that are converted to float64 at a time: few enough to stay in a core's own cache.
CHUNK = 1 << 15
# Elements that are multiplied and added up at a time: OpenBLAS starts threads for vectors of more than 10,000.
_PIECE = 1 << 13
# Elements that are squared and added up in float32 at a time.
_PIECE32 = 2048
_ONES = np.ones((_PIECE, 1))
_ONES32 = np.ones(LEAST, np.float32)
_ONES.setflags(write=False)
_ONES32.setflags(write=False)
# Range in which sums of squares of float32 neither overflow nor lose their smallest terms.
_SMALL, _LARGE = 1e-24, 1e30


class Sums:
    """Running sums over the chunks of a tensor.

    Args:
        size: number of elements of the whole tensor.
    """

    def __init__(self, size: int) -> None:
        self._small = size < LEAST
        self.max_abs = self.max_rel = 0.0
        self.sum_abs = self.sum_reference = 0.0
        self.squares = self.reference_squares = self.candidate_squares = 0.0
        self.finite = self.mismatched = self.nonfinite = self.overflowed = self.worst = 0
        self._equal_so_far = True

    def add_compiled(self, kernel: Kernel, reference: np.ndarray, candidate: np.ndarray, start: int) -> bool:
        """Add flat arrays with the kernel; return False if some values are not finite."""
        kernel_sums = kernel(reference, candidate, self.max_abs, self.max_rel)
        squares, reference_squares, candidate_squares, sum_abs, sum_reference, max_abs, worst, max_rel = kernel_sums
        if not math.isfinite(reference_squares + candidate_squares):
            return False
        self.finite += reference.size
        self.squares += squares
        self.reference_squares += reference_squares
        self.candidate_squares += candidate_squares
        self.sum_abs += sum_abs
        self.sum_reference += sum_reference
        self.max_rel = max_rel
        if worst >= 0:
            self.max_abs, self.worst = max_abs, start + worst
        return True

    def add(
        self,
        start: int,
        reference: np.ndarray,
        candidate: np.ndarray,
        elementwise: tuple[float, float] | None,
        scales: Both[float],
    ) -> None:
        """Add a chunk of at most `CHUNK` elements; ``start`` is the index of its first element."""
        # Comparing bits is cheap, and runs of the same code are often equal; after a difference, more are likely.
        if self._equal_so_far and reference.dtype == candidate.dtype and scales.reference == scales.candidate:
            if _same_bits(reference, candidate) and self._add_equal(reference, scales.reference):
                return
            self._equal_so_far = False
        plain = reference.dtype == candidate.dtype == np.float32 and scales == UNSCALED and elementwise is None
        if plain and self._small and self._add_float32(start, reference, candidate):
            return
        r, c, spare = wide(reference, candidate, scales)
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
        self.sum_abs += _sum(error)
        self.sum_reference += _sum(size)
        largest = int(error.argmax())
        if error[largest] > self.max_abs:
            self.max_abs, self.worst = float(error[largest]), start + largest
        if elementwise is not None:
            atol, rtol = elementwise
            self.mismatched += int(np.count_nonzero(error > atol + rtol * size))
        self.max_rel = _largest_ratio(error, size, spare[: size.size], self.max_rel)

    def _add_float32(self, start: int, reference: np.ndarray, candidate: np.ndarray) -> bool:
        """Add a small float32 tensor in float32; return False, adding nothing, if its values need float64.

        Sums over short pieces are added up in float64: norms and means are right to about 1e-7, in half the time.
        Values whose squares leave float32's range need float64.
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
        self.max_rel = _largest_ratio(error, size, spare, self.max_rel)
        return True

    def _add_equal(self, values: np.ndarray, scale: float) -> bool:
        """Add a chunk that is equal on both sides; return False, adding nothing, if it is complex or not all finite."""
        if values.dtype.kind == "c":
            return False
        size, _, _ = wide(values, values[:0], Both(scale, 1.0))
        squares = _dot(size)
        if not math.isfinite(squares):
            return False
        self.finite += size.size
        self.reference_squares += squares
        self.candidate_squares += squares
        self.sum_reference += _sum(np.absolute(size, out=size))
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


class _Buffers(threading.local):
    """Buffers for three chunks, for each thread."""

    def __init__(self) -> None:
        self.arrays = np.empty((3, CHUNK))
        self.narrow = self.arrays.view(np.float32)


_buffers = _Buffers()


def wide(
    reference: np.ndarray, candidate: np.ndarray, scales: Both[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two chunks in float64, divided by their scales, and a spare buffer; all are valid until the next call."""
    room = _buffers.arrays
    widened: list[np.ndarray] = []
    for array, scale, buffer in zip((reference, candidate), scales, room):
        out: np.ndarray
        if array.dtype.kind == "c":
            out = array.astype(np.complex128)
        else:
            out = buffer[: array.size]
            out[...] = array
        if scale != 1.0:
            out /= scale
        widened.append(out)
    return widened[0], widened[1], room[2]


def _dot(values: np.ndarray) -> float:
    """Return the sum of squares."""
    if values.size < CHUNK:
        # Not numpy.dot, which starts threads for long vectors, in addition to padiff's.
        return float(np.einsum("i,i->", values, values))
    pieces = values.reshape(-1, 1, _PIECE)
    return float(np.add.reduce(np.matmul(pieces, values.reshape(-1, _PIECE, 1)), axis=None))


def _sum(values: np.ndarray) -> float:
    """Return the sum; numpy's own sum takes twice as long for a whole chunk."""
    if values.size < CHUNK:
        return float(np.add.reduce(values))
    return float(np.add.reduce(np.matmul(values.reshape(-1, 1, _PIECE), _ONES), axis=None))


def _dot32(values: np.ndarray) -> float:
    """Return the sum of squares of float32 values, in float32 over short pieces."""
    return _products32(values, values)


def _sum32(values: np.ndarray) -> float:
    """Return the sum of float32 values over short pieces; twice as fast as numpy's own."""
    return _products32(values, _ONES32[: values.size])


def _products32(a: np.ndarray, b: np.ndarray) -> float:
    """Return the sum of the products of two float32 vectors, in pieces so short that numpy starts no threads."""
    full_length = a.size // _PIECE32 * _PIECE32
    total = float(np.dot(a[full_length:], b[full_length:]))
    if full_length:
        pieces, others = a[:full_length].reshape(-1, 1, _PIECE32), b[:full_length].reshape(-1, _PIECE32, 1)
        total += float(np.add.reduce(np.matmul(pieces, others), axis=None, dtype=np.float64))
    return total


def _largest_ratio(error: np.ndarray, size: np.ndarray, spare: np.ndarray, least: float = 0.0) -> float:
    """Return the largest relative error of elements whose reference is not 0, or ``least`` if that is larger.

    Args:
        spare: buffer of the arrays' size.
    """
    if least:
        # Multiplying and comparing takes half as long as dividing, and few elements exceed all before.
        above = error > np.multiply(size, least, out=spare)
        if not above.any():
            return least
        error, size = error[above], size[above]
        spare = spare[: error.size]
    # fmax ignores 0 / 0, which is frequent behind a ReLU.
    relative = float(np.fmax.reduce(np.divide(error, size, out=spare)))
    if not math.isfinite(relative):
        np.multiply(error, size != 0, out=spare)
        relative = float(np.fmax.reduce(np.divide(spare, size, out=spare)))
    # NaN if all ratios are 0 / 0: then there is no relative error.
    return least if math.isnan(relative) else max(least, relative)


def _same_bits(reference: np.ndarray, candidate: np.ndarray) -> bool:
    integer_type = f"u{min(reference.dtype.itemsize, 8)}"
    return bool(np.logical_and.reduce(reference.view(integer_type) == candidate.view(integer_type)))
