"""Sketches: some hundred bytes that stand for a tensor, from which the error between two runs is estimated.

Of a tensor with more than `ELEMENTS` elements a sample is looked at: 32 blocks of neighbours, one from each of equally
long stretches, at places that depend on nothing but the number of elements. So a sketch costs about the same however
large the tensor is, and both runs look at the same places. What is kept of the sample:

* norms, extremes, moments, and the shares of zeros and of values that are not finite;
* a projection onto `BUCKETS` numbers: the sum of every 61st element, each with a fixed random sign (a count sketch,
  Charikar, Chen and Farach-Colton 2002, https://doi.org/10.1007/3-540-45465-9_59). It is linear, so two sketches
  differ by the sketch of the difference, whose expected square is the squared norm of the difference: the relative
  L2 error and the cosine between two tensors, without the tensors, to a standard deviation of 9 %.

61 is a prime: neighbouring channels, rows and pixels fall into other buckets, whatever power of two a shape has.
Signs and places come from integer arithmetic of our own, so that no version of any library changes them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

#: Numbers that the projection has.
BUCKETS = 61
#: Elements of a tensor that are looked at, at most: 64 for each bucket, in 32 blocks. Longer blocks would be fewer
#: places, shorter ones cost more: memory is fetched in lines, and in order.
ELEMENTS = 3904
BLOCK = 122
#: Relative standard deviation of an L2 norm that is estimated from the projection.
SPREAD = 1 / math.sqrt(2 * BUCKETS)

#: What is kept beside the projection, in the order in which it is stored.
FIGURES = ("minimum", "maximum", "mean", "mean_abs", "mean_square", "zeros", "nonfinite")


@dataclass(frozen=True, slots=True)
class Sketch:
    """What is kept of a tensor.

    Attributes:
        size: number of the tensor's elements.
        minimum, maximum: extremes of the finite values that were looked at.
        mean, mean_abs, mean_square: moments of all that was looked at; what is not finite counts as zero.
        zeros, nonfinite: shares of zeros, and of NaN and infinities, 0 to 1.
        projection: `BUCKETS` numbers, or fewer of a smaller tensor, of its elements row by row.
        turned: whether a matrix was looked at transposed, so that it lies as the other framework's.
    """

    size: int
    minimum: float
    maximum: float
    mean: float
    mean_abs: float
    mean_square: float
    zeros: float
    nonfinite: float
    projection: np.ndarray
    turned: bool = False

    @property
    def looked_at(self) -> int:
        """How many elements the sketch was made from."""
        return min(self.size, ELEMENTS)

    @property
    def l2(self) -> float:
        """The tensor's L2 norm; exact where all of it was looked at, else estimated from the sample."""
        return math.sqrt(self.mean_square * self.size)

    @property
    def std(self) -> float:
        """Standard deviation of the elements."""
        return math.sqrt(max(self.mean_square - self.mean**2, 0.0))

    def error_l2(self, other: Sketch, scales: tuple[float, float] = (1.0, 1.0)) -> float:
        """Estimated L2 norm of ``other / scales[1] - self / scales[0]``."""
        return float(np.linalg.norm(self.errors(other, scales)))

    def errors(self, other: Sketch, scales: tuple[float, float] = (1.0, 1.0)) -> np.ndarray:
        """The projection of ``other / scales[1] - self / scales[0]``, scaled from the sample to the whole tensor."""
        with np.errstate(all="ignore"):
            difference = other.projection / scales[1] - self.projection / scales[0]
        share = self.size / self.looked_at if self.size else 1.0
        return np.asarray(difference * math.sqrt(share))

    def cosine(self, other: Sketch) -> float:
        """Estimated cosine between the two tensors; NaN where one is zero."""
        norms = float(np.linalg.norm(self.projection) * np.linalg.norm(other.projection))
        return float(np.dot(self.projection, other.projection)) / norms if norms else math.nan

    def row(self) -> np.ndarray:
        """The sketch as ``len(FIGURES) + BUCKETS`` numbers in float64, as it is stored."""
        out = np.zeros(len(FIGURES) + BUCKETS)
        out[: len(FIGURES)] = [getattr(self, name) for name in FIGURES]
        out[len(FIGURES) : len(FIGURES) + len(self.projection)] = self.projection
        return out

    @classmethod
    def of_row(cls, row: np.ndarray, size: int, turned: bool) -> Sketch:
        """Undo `row`."""
        figures: dict[str, Any] = {name: float(value) for name, value in zip(FIGURES, row)}
        projection = row[len(FIGURES) : len(FIGURES) + min(size, BUCKETS)]
        return cls(size=size, projection=projection, turned=turned, **figures)


def sketch_of(array: np.ndarray, turned: bool = False) -> Sketch:
    """Sketch a whole tensor; ``turned`` looks at a matrix transposed."""
    size = array.size * (2 if array.dtype.kind == "c" else 1)
    return sketches([sample(array, turned)], [size], [turned])[0]


def sample(array: np.ndarray, turned: bool = False) -> np.ndarray:
    """A copy of the elements that are looked at, one after the other; in the tensor's own dtype, but real."""
    if turned:
        array = array.T
    if array.dtype.kind == "c":
        # Real and imaginary parts are numbers of their own.
        array = np.ascontiguousarray(array).view(array.real.dtype)
    if array.size <= ELEMENTS:
        return array.flatten()
    if array.flags.c_contiguous:
        first, rows = block_rows(array.size)
        flat = array.reshape(-1)[first:]
        return flat[: flat.size // BLOCK * BLOCK].reshape(-1, BLOCK).take(rows, axis=0).reshape(-1)
    return np.asarray(array[np.unravel_index(places(array.size), array.shape)])


@lru_cache(maxsize=1024)
def block_rows(size: int) -> tuple[int, np.ndarray]:
    """Of a tensor of more than `ELEMENTS` elements: where blocks begin, and which of them are looked at; ascending."""
    count = ELEMENTS // BLOCK
    first = int(_random(1, size)[0] % np.uint64(size % BLOCK + 1))
    # One block somewhere in each of equally long stretches.
    edges = np.arange(count + 1, dtype=np.int64) * (size // BLOCK) // count
    return first, edges[:-1] + (_random(count, size) % np.diff(edges).astype(np.uint64)).astype(np.int64)


@lru_cache(maxsize=256)
def places(size: int) -> np.ndarray:
    """Positions, row by row, of the elements that are looked at."""
    if size <= ELEMENTS:
        return np.arange(size)
    first, rows = block_rows(size)
    return np.asarray(first + (rows[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1))


@lru_cache(maxsize=1)
def signs() -> np.ndarray:
    """The random sign, 1 or -1, of each element of a sample, in float32."""
    return np.where(_random(ELEMENTS, 0) & np.uint64(1 << 40), 1, -1).astype(np.float32)


def _random(count: int, seed: int) -> np.ndarray:
    """``count`` 64-bit numbers: SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    with np.errstate(over="ignore"):
        state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed) * np.uint64(count)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(state ^ (state >> np.uint64(31)))


def sketches(samples: Sequence[np.ndarray], sizes: Sequence[int], turned: Sequence[bool]) -> list[Sketch]:
    """Sketch many tensors at once, given their samples, numbers of elements, and whether they are of the transposed."""
    return [Sketch.of_row(row, size, turn) for row, size, turn in zip(rows_of(samples), sizes, turned)]


def rows_of(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Sketches of many tensors, as they are stored: a row for each; those of one length are made together."""
    groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index, taken in enumerate(samples):
        if taken.dtype.kind == "c":
            raise TypeError("a complex tensor has no sketch: look at its view as real numbers")
        wide = taken.dtype.itemsize > 4 or taken.dtype.kind in "iu"
        groups[taken.size, wide].append(index)
    rows = np.zeros((len(samples), len(FIGURES) + BUCKETS))
    # Memory to work in, taken from the system once, not for each group: that would cost more than the arithmetic.
    work = np.empty((2, _AT_ONCE + ELEMENTS + BUCKETS))
    for (length, wide), members in groups.items():
        at_once = max(1, _AT_ONCE // max(length, 1))
        for start in range(0, len(members), at_once):
            some = members[start : start + at_once]
            rows[some] = _rows([samples[k] for k in some], length, np.float64 if wide else np.float32, work)
    return rows


# Elements that are worked on at a time: what fits the processor's second cache, with room for the signs.
_AT_ONCE = 1 << 16
# Below this, a sum of squares would lose digits that float32 has; above the other, it would overflow.
_TINY, _HUGE = 2.0**-50, 2.0**50


def _rows(samples: Sequence[np.ndarray], length: int, dtype: type, memory: np.ndarray) -> np.ndarray:
    """What is stored of tensors whose samples are equally long: a row for each."""
    count = len(samples)
    out = np.zeros((count, len(FIGURES) + BUCKETS))
    if not length:
        return out
    height = -(-length // BUCKETS)
    width = height * BUCKETS
    padded, work = (m.view(dtype)[: count * width].reshape(count, width) for m in memory)
    if length < width:
        padded[:, length:] = 0
    for row, taken in zip(padded, samples):
        row[:length] = taken
    values = padded[:, :length]
    with np.errstate(all="ignore"):
        least, most = values.min(axis=1), values.max(axis=1)
        largest = np.maximum(np.abs(least), np.abs(most)).astype(np.float64)
        if not np.isfinite(largest).all():
            finite = np.isfinite(values)
            out[:, 6] = (~finite).sum(axis=1) / length
            none = ~finite.any(axis=1)
            least = np.where(none, 0, np.where(finite, values, np.inf).min(axis=1))
            most = np.where(none, 0, np.where(finite, values, -np.inf).max(axis=1))
            values[~finite] = 0
            largest = np.maximum(np.abs(least), np.abs(most)).astype(np.float64)
        out[:, 0], out[:, 1] = least, most
        # By a power of two, which rounds nothing, so that no square leaves the range of float32.
        scale = np.ones(count)
        odd = (largest > 0) & ((largest < _TINY) | (largest > _HUGE))
        if odd.any():
            most_bits = 126 if dtype is np.float32 else 1000  # the scale is a normal number itself
            scale[odd] = 2.0 ** np.clip(-np.floor(np.log2(largest[odd])), -most_bits, most_bits)
            padded *= scale.astype(dtype)[:, None]
        cube = padded.reshape(count, height, BUCKETS)
        ones: np.ndarray = np.ones((1, height), dtype)
        out[:, 2] = _sums(ones, cube) / length / scale
        out[:, 5] = [1 - np.count_nonzero(row) / length for row in values != 0]
        out[:, 5] -= out[:, 6]
        np.abs(padded, out=work)
        out[:, 3] = _sums(ones, work.reshape(cube.shape)) / length / scale
        np.multiply(padded, padded, out=work)
        out[:, 4] = _sums(ones, work.reshape(cube.shape)) / length / scale**2
        np.multiply(values, signs()[:length], out=work[:, :length])
        # The padding holds zeros still: their squares.
        projected = np.matmul(ones, work.reshape(cube.shape))[:, 0].astype(np.float64)
        out[:, len(FIGURES) :] = projected / scale[:, None]
    return out


def _sums(ones: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """Sums of all elements: down the columns by a matrix product, which is several times faster, across in float64."""
    return np.asarray(np.matmul(ones, cube)[:, 0].astype(np.float64).sum(axis=1))
