"""Sketches: a few hundred bytes that stand for a tensor, the positions of its sample, and copies from memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

#: Length of the projection.
BUCKETS = 61
#: Maximum length of a sample: 64 elements for each bucket, in 32 blocks. Longer blocks would cover fewer positions of
#: the tensor, shorter blocks cost more: memory is fetched in lines, and in order.
ELEMENTS = 3904
BLOCK = 122


@lru_cache(maxsize=1024)
def block_rows(size: int) -> tuple[int, np.ndarray]:
    """Return the start of the first block, and the numbers of the sampled blocks, ascending.

    Args:
        size: number of the tensor's elements, more than `ELEMENTS`.
    """
    count = ELEMENTS // BLOCK
    first = int(_random(1, size)[0] % np.uint64(size % BLOCK + 1))
    # One random block from each of equally long ranges.
    edges = np.arange(count + 1, dtype=np.int64) * (size // BLOCK) // count
    return first, edges[:-1] + (_random(count, size) % np.diff(edges).astype(np.uint64)).astype(np.int64)


@lru_cache(maxsize=256)
def places(size: int) -> np.ndarray:
    """Return the positions of the sampled elements, counted row by row."""
    if size <= ELEMENTS:
        return np.arange(size)
    first, rows = block_rows(size)
    return np.asarray(first + (rows[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1))


@lru_cache(maxsize=1)
def signs() -> np.ndarray:
    """Return the random sign, 1 or -1, of each element of a sample, in float32."""
    return np.where(_random(ELEMENTS, 0) & np.uint64(1 << 40), 1, -1).astype(np.float32)


def _random(count: int, seed: int) -> np.ndarray:
    """Return `count` 64-bit numbers: SplitMix64 (Steele, Lea and Flood 2014,
    https://doi.org/10.1145/2660193.2660195).
    """
    with np.errstate(over="ignore"):
        state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed) * np.uint64(count)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(state ^ (state >> np.uint64(31)))


#: Length of a sample, and the dtype in which its sketch is computed.
Kind = tuple[int, type]

_Move = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: ``move(to, of, size)``: copy `size` bytes from address `of` to address `to`. Several times faster than any numpy
#: call. It holds the GIL, as a sample is small.
move: Callable[[int, int, int], None] = _Move(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


# Range of the addresses that a process may have: address 0 means none, and no address exceeds 48 bits.
_LEAST, _MOST = 1 << 12, 1 << 48


@lru_cache(maxsize=256)
def _everything(stored: np.dtype[Any], width: int) -> np.ndarray:
    """Return a view of the process's memory from `_LEAST` on, with a row of `width` elements for each element
    position.
    """
    size = stored.itemsize
    buffer: Any = (ctypes.c_char * (_MOST - _LEAST)).from_address(_LEAST)
    return np.ndarray(((_MOST - _LEAST) // size - width, width), stored, buffer, 0, (size, size))


def places_in_memory(addresses: np.ndarray, stored: np.dtype[Any]) -> np.ndarray:
    """Return the row numbers for `read` of elements that begin at these addresses.

    Raises:
        ValueError: an address is outside a process's address range, or no multiple of the element size.
    """
    rows, misaligned = np.divmod(addresses - _LEAST, stored.itemsize)
    if misaligned.any() or (rows.size and (rows.min() < 0 or addresses.max() >= _MOST)):
        raise ValueError(f"no memory of {stored} begins there")
    return np.asarray(rows)


def read(places: np.ndarray, stored: np.dtype[Any], width: int) -> np.ndarray:
    """Return a copy of `width` elements from each position in memory.

    One numpy call copies many pieces in a tenth of the time that as many calls of `move` take.
    """
    return np.asarray(_everything(stored, width)[places])


class Cut(NamedTuple):
    """Position of a tensor's sample in memory: an address with its form, or an array.

    A cut with an address keeps nothing alive: it is valid as long as the tensor's memory.

    Attributes:
        kind: kind of the sample.
        dtype, shape: dtype and shape of the tensor.
        form, address: form and start of contiguous memory; or
        view, chosen: an array, and the rows or indices of the sample; `None`: the whole array.
    """

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    form: Form | None
    address: int
    view: np.ndarray | None
    chosen: np.ndarray | tuple[np.ndarray, ...] | None

    @property
    def itemsize(self) -> int:
        """Return the size of an element in memory, in bytes."""
        return int(self._seen()[0].itemsize)

    def _seen(self) -> tuple[np.ndarray, np.ndarray | tuple[np.ndarray, ...] | None]:
        """Return the memory as an array, and the sample's rows or indices in it."""
        if self.form is not None:
            return self.form.view(self.address), self.form.chosen
        assert self.view is not None
        return self.view, self.chosen

    def copy_to(self, row: np.ndarray) -> None:
        """Copy the sample into a row, which has one axis, or two (blocks) for samples of the maximum length."""
        view, chosen = self._seen()
        if chosen is None:
            row.reshape(view.shape)[...] = view
        elif isinstance(chosen, tuple):
            row.reshape(-1)[...] = view[chosen]
        elif view.dtype == row.dtype:
            # "clip", as with "raise" numpy would copy twice.
            view.take(chosen, 0, row if row.ndim == view.ndim else row.reshape(-1, BLOCK), "clip")
        else:
            row.reshape(-1, BLOCK)[...] = view.take(chosen, 0)


#: Fast constructor: the named tuple's own is a Python function, and each step creates hundreds of cuts.
_new_cut: Callable[[Iterable[Any]], Cut] = partial(tuple.__new__, Cut)


class Form(NamedTuple):
    """Position of the sample within the contiguous memory of tensors of one shape and dtype.

    Attributes:
        stored: the dtype in memory.
        first: offset of the first block, in bytes.
        looked_at: shape of the memory that contains the sample: one axis, or blocks.
        chosen, kind, dtype, shape: the attributes of `Cut`.
        nbytes: size of the tensor in bytes.
        direct: True if the sample is a plain copy of the whole memory.
        buffer: ctypes type of the memory that contains the sample.
    """

    stored: np.dtype[Any]
    first: int
    looked_at: tuple[int, ...]
    chosen: np.ndarray | None
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    direct: bool
    buffer: Any

    def at(self, address: int) -> Cut:
        """Return the cut of a tensor whose memory begins at an address."""
        return _new_cut((self.kind, self.dtype, self.shape, self, address, None, None))

    def copy_sample(self, address: int, row: np.ndarray) -> None:
        """Copy the sample of a tensor at an address into a row."""
        if self.chosen is None or self.stored != row.dtype:
            self.at(address).copy_to(row)
        else:
            self.view(address).take(self.chosen, 0, row, "clip")

    def view(self, address: int) -> np.ndarray:
        """Return the memory of a tensor at an address as an array; not valid beyond the tensor's lifetime."""
        return np.ndarray(self.looked_at, self.stored, self.buffer.from_address(address + self.first))


def form_of(stored: np.dtype[Any], dtype: str, shape: tuple[int, ...]) -> Form:
    """Return the form of a tensor.

    Args:
        stored: numpy's dtype of its elements.
        dtype: the dtype's name in records.
    """
    size, width, calculated = math.prod(shape), stored.itemsize, arithmetic(stored)
    if size <= ELEMENTS:
        direct = stored == calculated
        buffer = ctypes.c_char * (size * width)
        return Form(stored, 0, (size,), None, (size, calculated), dtype, shape, size * width, direct, buffer)
    first, rows = block_rows(size)
    looked_at = (size - first) // BLOCK, BLOCK
    buffer = ctypes.c_char * (math.prod(looked_at) * width)
    kind = ELEMENTS, calculated
    return Form(stored, first * width, looked_at, rows, kind, dtype, shape, size * width, False, buffer)


def cut_of(array: np.ndarray, transposed: bool = False) -> Cut:
    """Return the position of an array's sample; `transposed` samples the transposed matrix.

    The cut is valid as long as the array's memory, and sees later writes. The cut of a complex array may refer to a
    copy, so that it may miss later writes.
    """
    dtype, shape = array.dtype.name, array.shape
    if transposed:
        array = array.T
    if array.dtype.kind == "c":
        # Real and imaginary parts are separate numbers.
        array = np.ascontiguousarray(array).view(array.real.dtype)
    size = array.size
    if size <= ELEMENTS:
        return Cut((size, arithmetic(array.dtype)), dtype, shape, None, 0, array, None)
    kind = ELEMENTS, arithmetic(array.dtype)
    if not array.flags.c_contiguous:
        return Cut(kind, dtype, shape, None, 0, array, _unravelled(array.shape))
    first, rows = block_rows(size)
    blocks = array.reshape(-1)[first : first + (size - first) // BLOCK * BLOCK].reshape(-1, BLOCK)
    return Cut(kind, dtype, shape, None, 0, blocks, rows)


def sample(array: np.ndarray, transposed: bool = False) -> np.ndarray:
    """Return a copy of the sample as a flat array in the tensor's dtype (for a complex tensor, the real dtype)."""
    cut = cut_of(array, transposed)
    values: np.ndarray = np.empty(cut.kind[0], array.real.dtype)
    cut.copy_to(values)
    return values


@lru_cache(maxsize=256)
def _unravelled(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return np.unravel_index(places(math.prod(shape)), shape)


@lru_cache(maxsize=64)
def arithmetic(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    """Return the dtype in which sketches of a dtype are computed: float32 if that is exact, else float64."""
    return np.float64 if dtype.itemsize > 4 or dtype.kind in "iu" else np.float32


#: Relative standard deviation of an L2 norm estimated from the projection.
SPREAD = 1 / math.sqrt(2 * BUCKETS)

#: Figures that a sketch holds beside the projection, in the order of storage.
FIGURES = ("minimum", "maximum", "mean", "mean_abs", "mean_square", "zeros", "nonfinite")


#: Number of float64 values of a stored sketch.
ROW = len(FIGURES) + BUCKETS


@dataclass(frozen=True, slots=True)
class Sketch:
    """The sketch of a tensor.

    Attributes:
        size: number of the tensor's elements.
        minimum, maximum: extremes of the finite values of the sample.
        mean, mean_abs, mean_square: moments of the sample; values that are not finite count as zero.
        zeros, nonfinite: shares of zeros, and of NaN and infinities, 0 to 1.
        projection: `BUCKETS` numbers (fewer for a smaller tensor), computed from the elements row by row.
        transposed: True if the transposed matrix was sampled, so that the order of elements is the other framework's.
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
        """Return the number of sampled elements."""
        return min(self.size, ELEMENTS)

    @property
    def l2(self) -> float:
        """Return the tensor's L2 norm; exact if the sample is the whole tensor, else an estimate."""
        return math.sqrt(self.mean_square * self.size)

    def errors(self, other: Sketch, scale: float = 1.0, other_scale: float = 1.0) -> np.ndarray:
        """Return the projection of ``other / other_scale - self / scale``, scaled from the sample to the whole
        tensor.
        """
        with np.errstate(all="ignore"):
            difference = other.projection / other_scale - self.projection / scale
        share = self.size / self.looked_at if self.size else 1.0
        return np.asarray(difference * math.sqrt(share))

    def is_equal(self, other: Sketch) -> bool:
        """Return True if two sketches are equal to the bit, as those of equal tensors are."""
        return bool(not np.any(self.errors(other)) and self.l2 == other.l2)

    def row(self) -> np.ndarray:
        """Return the sketch in its stored form: `ROW` numbers in float64."""
        out = np.zeros(ROW)
        out[: len(FIGURES)] = [getattr(self, name) for name in FIGURES]
        out[len(FIGURES) : len(FIGURES) + len(self.projection)] = self.projection
        return out

    @classmethod
    def of_row(cls, row: np.ndarray, size: int, transposed: bool) -> Sketch:
        """Return the sketch from the result of `row`."""
        figures: dict[str, Any] = {name: float(value) for name, value in zip(FIGURES, row)}
        projection = row[len(FIGURES) : len(FIGURES) + min(size, BUCKETS)]
        return cls(size=size, projection=projection, transposed=transposed, **figures)


def sketch_of(array: np.ndarray, transposed: bool = False) -> Sketch:
    """Return the sketch of a tensor; `transposed` samples the transposed matrix."""
    return sketch_of_sample(sample(array, transposed), array.size * (2 if array.dtype.kind == "c" else 1), transposed)


def sketch_of_sample(taken: np.ndarray, size: int, transposed: bool = False) -> Sketch:
    """Return the sketch of a tensor from its sample and its number of elements."""
    if taken.dtype.kind == "c":
        raise TypeError("a complex tensor has no sketch: look at its view as real numbers")
    values = np.zeros((1, padded(taken.size)), arithmetic(taken.dtype))
    values[0, : taken.size] = taken
    row = np.zeros((1, ROW))
    if taken.size:  # the row of a tensor without elements stays zero
        rows_of(values, taken.size, np.empty((2, *values.shape), values.dtype), row)
    return Sketch.of_row(row[0], size, transposed)


# Number of 8-byte words per partial sum: fewer than 256, and a divisor of a sample of `ELEMENTS` bytes.
_WORDS = 244

# Maximum length of samples that are transposed for their extremes: reductions over short rows take longer.
_SHORT = 128

# Below the first bound, a sum of squares would lose digits in float32; above the second, it would overflow.
_TINY, _HUGE = 2.0**-50, 2.0**50


def padded(length: int) -> int:
    """Return the length of a sample with the zeros that make it a multiple of `BUCKETS`."""
    return -(-length // BUCKETS) * BUCKETS


def rows_of(samples: np.ndarray, length: int, work: np.ndarray, out: np.ndarray) -> None:
    """Write the sketches of samples of equal length in their stored form: a row for each.

    Args:
        samples: one in each row, filled up with zeros to the `padded` length; float32 or float64.
        length: length of each sample; at least 1.
        work: scratch memory: two arrays of the shape and dtype of `samples`.
        out: output, `ROW` numbers for each sketch.
    """
    values = samples[:, :length]
    with np.errstate(all="ignore"):
        least, most = _extremes(values)
        # Extremes of a row with NaN are NaN. Usually all values are finite.
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
    """Return the minimum and the maximum of each row."""
    if values.shape[1] > _SHORT:
        return values.min(axis=1), values.max(axis=1)
    turned = np.ascontiguousarray(values.T)
    return turned.min(axis=0), turned.max(axis=0)


def _only_finite(samples: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Replace values that are not finite by zeros.

    Returns:
        The samples, minimum and maximum of the finite values of each, and the share of values that are not finite.
    """
    finite = np.isfinite(samples[:, :length])
    none = ~finite.any(axis=1)
    samples = samples.copy()
    values = samples[:, :length]
    least = np.where(none, 0, np.where(finite, values, np.inf).min(axis=1))
    most = np.where(none, 0, np.where(finite, values, -np.inf).max(axis=1))
    values[~finite] = 0
    return samples, least, most, (~finite).sum(axis=1) / length


def _scales(largest: np.ndarray) -> np.ndarray | None:
    """Return factors for the rows that keep all squares in the range of float32; `None` if no row needs one.

    The factors are powers of two, which round nothing.
    """
    odd = (largest > 0) & ((largest < _TINY) | (largest > _HUGE))
    if not odd.any():
        return None
    scales = np.ones((len(largest), 1))
    most_bits = 126 if largest.dtype == np.float32 else 1000  # a scale is a normal number itself
    scales[odd, 0] = 2.0 ** np.clip(-np.floor(np.log2(largest[odd].astype(np.float64))), -most_bits, most_bits)
    return scales


def _add_up(samples: np.ndarray, length: int, work: np.ndarray, out: np.ndarray) -> None:
    """Write the moments and the projections of samples whose squares are in the range of their dtype."""
    out[:, 2] = _columns(samples).sum(axis=1)
    out[:, 3] = _columns(np.abs(samples, out=work)).sum(axis=1)
    out[:, 4] = np.matmul(samples[:, None, :], samples[:, :, None])[:, 0, 0]
    out[:, 5] = length - _nonzero(samples, work)
    out[:, 2:6] /= length
    np.multiply(samples, _padded_signs(samples.shape[1]), out=work)
    out[:, len(FIGURES) :] = _columns(work)


def _nonzero(samples: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return the number of nonzero elements of each row; `work` is scratch memory of the shape of `samples`."""
    count, width = samples.shape
    if width % (8 * _WORDS):
        # Counts of this size are exact in float32, and a matrix product is faster than a sum.
        return np.asarray(np.not_equal(samples, 0, out=work, casting="unsafe") @ _ones(width, work.dtype)[0])
    # Bytes, eight to a word: sums of words are much faster than sums of bytes, and no byte overflows.
    flags = work.view(np.uint8).reshape(-1)[: samples.size].reshape(samples.shape)
    np.not_equal(samples, 0, out=flags.view(np.bool_))
    words = flags.view(np.uint64).reshape(count, -1, _WORDS).sum(axis=2)
    return np.asarray(words.view(np.uint8).sum(axis=1, dtype=np.intp))


def _columns(terms: np.ndarray) -> np.ndarray:
    """Return the sums of every `BUCKETS`-th term of each row, in float64."""
    count, width = terms.shape
    if width == BUCKETS:
        # Like a sum of one term, which turns -0.0 into 0.0.
        return np.asarray(np.add(terms, 0.0, dtype=np.float64))
    if width == 2 * BUCKETS:
        return np.asarray(np.add(terms[:, :BUCKETS] + terms[:, BUCKETS:], 0.0, dtype=np.float64))
    # A product with ones is several times faster than a sum.
    sums = np.matmul(_ones(width // BUCKETS, terms.dtype), terms.reshape(count, -1, BUCKETS))
    return np.asarray(sums[:, 0].astype(np.float64))


@lru_cache(maxsize=64)
def _ones(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    return np.ones((1, count), dtype)


@lru_cache(maxsize=64)
def _padded_signs(width: int) -> np.ndarray:
    return np.resize(signs(), width)  # the padding is zero, whatever its sign


class Own(NamedTuple):
    """Elements of a full tensor's sample that lie in one part.

    Attributes:
        places: positions of these elements in the sample.
        elements: positions of these elements in the part, row by row.
        length: length of the sample.
    """

    places: np.ndarray
    elements: np.ndarray
    length: int


@lru_cache(maxsize=1024)
def own_of(whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], transposed: bool = False) -> Own:
    """Return the elements of a full tensor's sample that lie in a part.

    Args:
        whole: shape of the full tensor.
        offset, shape: start of the part along each axis, and shape of the part. If the part has one axis and the full
            tensor has another number of axes, the part is a range of the full tensor's elements, row by row.
        transposed: True if the transposed full tensor is sampled.
    """
    size = math.prod(whole)
    looked_at = places(size)
    order = whole[::-1] if transposed else whole
    at = np.unravel_index(looked_at, order) if size else tuple(np.zeros((len(whole), 0), np.int64))
    at = at[::-1] if transposed else at
    if len(shape) == 1 and len(whole) != 1:
        flat = np.ravel_multi_index(at, whole) if whole and size else looked_at
        inside = (flat >= offset[0]) & (flat < offset[0] + shape[0])
        return Own(np.flatnonzero(inside), flat[inside] - offset[0], min(size, ELEMENTS))
    inside = np.ones(len(looked_at), bool)
    for index, start, length in zip(at, offset, shape):
        inside &= (index >= start) & (index < start + length)
    local = [index[inside] - start for index, start in zip(at, offset)]
    nonempty = bool(shape) and 0 not in shape
    elements = np.ravel_multi_index(local, shape) if nonempty else np.zeros(int(inside.sum()), np.int64)
    return Own(np.flatnonzero(inside), np.asarray(elements), min(size, ELEMENTS))


def whole_sketch(sketches: Sequence[Sketch], owned: Sequence[int]) -> Sketch:
    """Return the sketch of a full tensor from the sketches of its parts.

    Args:
        sketches: sketches of the parts.
        owned: number of the sample's elements in each part.
    """
    first = sketches[0]
    length = first.looked_at
    filled = [sketch for sketch, count in zip(sketches, owned) if count]

    def total(name: str) -> float:
        return float(sum(getattr(sketch, name) for sketch in sketches))

    # Each part counts the elements of the other parts as zeros.
    foreign = sum(length - count for count in owned) / length if length else 0.0
    return Sketch(
        size=first.size,
        minimum=min((sketch.minimum for sketch in filled), default=0.0),
        maximum=max((sketch.maximum for sketch in filled), default=0.0),
        mean=total("mean"),
        mean_abs=total("mean_abs"),
        mean_square=total("mean_square"),
        zeros=max(0.0, total("zeros") - foreign),
        nonfinite=total("nonfinite"),
        projection=np.sum([sketch.projection for sketch in sketches], axis=0),
        transposed=first.transposed,
    )
