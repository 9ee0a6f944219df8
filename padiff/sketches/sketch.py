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
Which elements, and with which signs: `padiff.sketches.places`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from padiff.sketches.cuts import arithmetic, sample
from padiff.sketches.places import BUCKETS as BUCKETS
from padiff.sketches.places import ELEMENTS as ELEMENTS
from padiff.sketches.places import signs

#: Relative standard deviation of an L2 norm that is estimated from the projection.
SPREAD = 1 / math.sqrt(2 * BUCKETS)

#: What is kept beside the projection, in the order in which it is stored.
FIGURES = ("minimum", "maximum", "mean", "mean_abs", "mean_square", "zeros", "nonfinite")


#: Numbers that a sketch is stored as.
ROW = len(FIGURES) + BUCKETS


@dataclass(frozen=True, slots=True)
class Sketch:
    """What is kept of a tensor.

    Attributes:
        size: number of the tensor's elements.
        minimum, maximum: extremes of the finite values that were looked at.
        mean, mean_abs, mean_square: moments of all that was looked at; what is not finite counts as zero.
        zeros, nonfinite: shares of zeros, and of NaN and infinities, 0 to 1.
        projection: `BUCKETS` numbers, or fewer of a smaller tensor, of its elements row by row.
        transposed: whether a matrix was looked at transposed, so that it lies as the other framework's.
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
    transposed: bool = False

    @property
    def looked_at(self) -> int:
        """How many elements the sketch was made from."""
        return min(self.size, ELEMENTS)

    @property
    def l2(self) -> float:
        """The tensor's L2 norm; exact where all of it was looked at, else estimated from the sample."""
        return math.sqrt(self.mean_square * self.size)

    def errors(self, other: Sketch, scale: float = 1.0, other_scale: float = 1.0) -> np.ndarray:
        """The projection of ``other / other_scale - self / scale``, scaled from the sample to the whole tensor."""
        with np.errstate(all="ignore"):
            difference = other.projection / other_scale - self.projection / scale
        share = self.size / self.looked_at if self.size else 1.0
        return np.asarray(difference * math.sqrt(share))

    def row(self) -> np.ndarray:
        """The sketch as `ROW` numbers in float64, as it is stored."""
        out = np.zeros(ROW)
        out[: len(FIGURES)] = [getattr(self, name) for name in FIGURES]
        out[len(FIGURES) : len(FIGURES) + len(self.projection)] = self.projection
        return out

    @classmethod
    def of_row(cls, row: np.ndarray, size: int, transposed: bool) -> Sketch:
        """Undo `row`."""
        figures: dict[str, Any] = {name: float(value) for name, value in zip(FIGURES, row)}
        projection = row[len(FIGURES) : len(FIGURES) + min(size, BUCKETS)]
        return cls(size=size, projection=projection, transposed=transposed, **figures)


def sketch_of(array: np.ndarray, transposed: bool = False) -> Sketch:
    """Sketch a whole tensor; ``transposed`` looks at a matrix transposed."""
    return sketch_of_sample(sample(array, transposed), array.size * (2 if array.dtype.kind == "c" else 1), transposed)


def sketch_of_sample(taken: np.ndarray, size: int, transposed: bool = False) -> Sketch:
    """The sketch of a tensor, given its sample and how many elements it has."""
    if taken.dtype.kind == "c":
        raise TypeError("a complex tensor has no sketch: look at its view as real numbers")
    values = np.zeros((1, padded(taken.size)), arithmetic(taken.dtype))
    values[0, : taken.size] = taken
    row = np.zeros((1, ROW))
    if taken.size:  # of tensors without elements there is nothing to say
        rows_of(values, taken.size, np.empty((2, *values.shape), values.dtype), row)
    return Sketch.of_row(row[0], size, transposed)


# Words of 8 bytes that are added up at a time: fewer than 256, and a divisor of a sample of `ELEMENTS` bytes.
_WORDS = 244

# Length of a sample up to which many are turned for their extremes: to look at short rows one by one takes longer.
_SHORT = 128

# Below this, a sum of squares would lose digits that float32 has; above the other, it would overflow.
_TINY, _HUGE = 2.0**-50, 2.0**50


def padded(length: int) -> int:
    """How long a sample of this length is with the zeros that make it a multiple of `BUCKETS`."""
    return -(-length // BUCKETS) * BUCKETS


def rows_of(samples: np.ndarray, length: int, work: np.ndarray, out: np.ndarray) -> None:
    """Sketches of tensors whose samples are equally long, as they are stored: a row for each.

    Args:
        samples: one in each row, filled up with zeros to `padded` of their length; float32 or float64.
        length: of a sample; at least 1.
        work: memory to work in: two arrays of the same shape and dtype.
        out: where the sketches go, of `ROW` numbers each.
    """
    values = samples[:, :length]
    with np.errstate(all="ignore"):
        least, most = _extremes(values)
        # What is not a number is neither more nor less than another. As a rule there is none.
        finite = bool(np.isfinite(np.maximum(most, -least)).all())
        out[:, 6] = 0.0
        if not finite:
            samples, least, most, out[:, 6] = _only_finite(samples, length)
        out[:, 0], out[:, 1] = least, most
        scales = _scales(np.maximum(most, -least))
        if scales is not None:
            samples = np.multiply(samples, scales.astype(samples.dtype), out=work[1])
        _add_up(samples, length, work[0], out)
        if not finite:
            out[:, 5] -= out[:, 6]
        if scales is not None:
            back = 1 / scales
            out[:, 2:4] *= back
            out[:, 4:5] *= back**2
            out[:, len(FIGURES) :] *= back


def _extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the most of each row."""
    if values.shape[1] > _SHORT:
        return values.min(axis=1), values.max(axis=1)
    turned = np.ascontiguousarray(values.T)
    return turned.min(axis=0), turned.max(axis=0)


def _only_finite(samples: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Samples with zeros where they are not finite; the least and the most of what is, and the share of what is not."""
    finite = np.isfinite(samples[:, :length])
    none = ~finite.any(axis=1)
    samples = samples.copy()
    values = samples[:, :length]
    least = np.where(none, 0, np.where(finite, values, np.inf).min(axis=1))
    most = np.where(none, 0, np.where(finite, values, -np.inf).max(axis=1))
    values[~finite] = 0
    return samples, least, most, (~finite).sum(axis=1) / length


def _scales(largest: np.ndarray) -> np.ndarray | None:
    """By what to multiply each row, so that no square leaves the range of float32: powers of two, which round nothing.

    `None`: by nothing.
    """
    odd = (largest > 0) & ((largest < _TINY) | (largest > _HUGE))
    if not odd.any():
        return None
    scales = np.ones((len(largest), 1))
    most_bits = 126 if largest.dtype == np.float32 else 1000  # a scale is a normal number itself
    scales[odd, 0] = 2.0 ** np.clip(-np.floor(np.log2(largest[odd].astype(np.float64))), -most_bits, most_bits)
    return scales


def _add_up(samples: np.ndarray, length: int, work: np.ndarray, out: np.ndarray) -> None:
    """The moments and the projections of samples whose squares are in the range of their dtype."""
    out[:, 2] = _columns(samples).sum(axis=1)
    out[:, 3] = _columns(np.abs(samples, out=work)).sum(axis=1)
    out[:, 4] = np.matmul(samples[:, None, :], samples[:, :, None])[:, 0, 0]
    out[:, 5] = length - _nonzero(samples, work)
    out[:, 2:6] /= length
    np.multiply(samples, _padded_signs(samples.shape[1]), out=work)
    out[:, len(FIGURES) :] = _columns(work)


def _nonzero(samples: np.ndarray, work: np.ndarray) -> np.ndarray:
    """How many elements of each row are not zero; ``work`` as `_add_up` has it."""
    count, width = samples.shape
    if width % (8 * _WORDS):
        # Counts of this size are exact in float32, and a product adds up faster than a sum.
        return np.asarray(np.not_equal(samples, 0, out=work, casting="unsafe") @ _ones(width, work.dtype)[0])
    # In bytes, eight to a word: words add up much faster than bytes do, as long as no byte overflows.
    flags = work.view(np.uint8).reshape(-1)[: samples.size].reshape(samples.shape)
    np.not_equal(samples, 0, out=flags.view(np.bool_))
    words = flags.view(np.uint64).reshape(count, -1, _WORDS).sum(axis=2)
    return np.asarray(words.view(np.uint8).sum(axis=1, dtype=np.intp))


def _columns(terms: np.ndarray) -> np.ndarray:
    """The sum of every `BUCKETS`-th term of each row, in float64."""
    count, width = terms.shape
    if width == BUCKETS:
        # As a sum of one term: that of -0.0 is 0.0.
        return np.asarray(np.add(terms, 0.0, dtype=np.float64))
    if width == 2 * BUCKETS:
        return np.asarray(np.add(terms[:, :BUCKETS] + terms[:, BUCKETS:], 0.0, dtype=np.float64))
    # A product with ones adds up several times faster than a sum does.
    sums = np.matmul(_ones(width // BUCKETS, terms.dtype), terms.reshape(count, -1, BUCKETS))
    return np.asarray(sums[:, 0].astype(np.float64))


@lru_cache(maxsize=64)
def _ones(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    return np.ones((1, count), dtype)


@lru_cache(maxsize=64)
def _padded_signs(width: int) -> np.ndarray:
    return np.resize(signs(), width)  # what comes after a sample is zero, whatever its sign
