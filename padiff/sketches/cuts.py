"""Positions of a tensor's sample, the same in every run, and copies of the sample from memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
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
