"""Where the sample of a tensor lies in its memory, and copying it from there."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from padiff.sketches.places import BLOCK, ELEMENTS, block_rows, places

#: Length of a sample, and what its sketch is calculated in.
Kind = tuple[int, type]

_Move = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: ``move(to, of, size)``: copy so many bytes from one address to another. A few times faster than any call of numpy's;
#: and other threads wait meanwhile, as a sample is small.
move: Callable[[int, int, int], None] = _Move(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


# The addresses that a process may have: below that there is nothing, as an address of 0 means none, nor beyond it.
_LEAST, _MOST = 1 << 12, 1 << 48


@lru_cache(maxsize=256)
def _everything(stored: np.dtype[Any], width: int) -> np.ndarray:
    """The memory of the process from `_LEAST` on: a row of so many elements begins at each multiple of an element."""
    size = stored.itemsize
    buffer: Any = (ctypes.c_char * (_MOST - _LEAST)).from_address(_LEAST)
    return np.ndarray(((_MOST - _LEAST) // size - width, width), stored, buffer, 0, (size, size))


def places_in_memory(addresses: np.ndarray, stored: np.dtype[Any]) -> np.ndarray:
    """Where elements of a dtype begin, as `read` takes it.

    Raises:
        ValueError: an address is none that a process can have, or no multiple of the size of an element.
    """
    found, rest = np.divmod(addresses - _LEAST, stored.itemsize)
    if rest.any() or (found.size and (found.min() < 0 or addresses.max() >= _MOST)):
        raise ValueError(f"no memory of {stored} begins there")
    return np.asarray(found)


def read(places: np.ndarray, stored: np.dtype[Any], width: int) -> np.ndarray:
    """A copy of as many elements from each place in memory on: of many pieces in one call of numpy's, which takes a
    tenth of the time that as many calls of `move` take.
    """
    return np.asarray(_everything(stored, width)[places])


class Cut(NamedTuple):
    """Where the elements that are looked at lie in a tensor's memory: at an address, or in an array.

    One of an address holds nothing: it is good for as long as the tensor has its memory.

    Attributes:
        kind: of the sample.
        dtype, shape: of the tensor.
        form, address: how contiguous memory is looked at, and where it begins; or
        view, chosen: an array, and rows of it, or indices into it; `None`: all of it.
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
        """Bytes of an element in memory."""
        return int(self._seen()[0].itemsize)

    def _seen(self) -> tuple[np.ndarray, np.ndarray | tuple[np.ndarray, ...] | None]:
        """The memory, and what of it is looked at."""
        if self.form is not None:
            return self.form.view(self.address), self.form.chosen
        assert self.view is not None
        return self.view, self.chosen

    def copy_to(self, row: np.ndarray) -> None:
        """Copy them into a row: one axis, or of the longest samples blocks."""
        view, chosen = self._seen()
        if chosen is None:
            row.reshape(view.shape)[...] = view
        elif isinstance(chosen, tuple):
            row.reshape(-1)[...] = view[chosen]
        elif view.dtype == row.dtype:
            # With "raise" numpy would copy twice.
            view.take(chosen, 0, row if row.ndim == view.ndim else row.reshape(-1, BLOCK), "clip")
        else:
            row.reshape(-1, BLOCK)[...] = view.take(chosen, 0)


#: A named tuple's own constructor is a function of Python's: these are made by the hundred in each step.
_new_cut: Callable[[Iterable[Any]], Cut] = partial(tuple.__new__, Cut)


class Form(NamedTuple):
    """How the sample of tensors of one shape and dtype lies in contiguous memory.

    Attributes:
        stored: the dtype in memory.
        first: bytes from the first element to the first block.
        looked_at: the shape of the memory that is looked at: one axis, or blocks.
        chosen, kind, dtype, shape: as `Cut` has them.
        nbytes: of the tensor.
        direct: whether the sample is all of the memory, as it is.
        buffer: what ctypes calls as many bytes as are looked at.
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
        """The cut of a tensor whose memory begins at an address."""
        return _new_cut((self.kind, self.dtype, self.shape, self, address, None, None))

    def copy(self, address: int, row: np.ndarray) -> None:
        """Copy the sample of such a tensor into a row."""
        if self.chosen is None or self.stored != row.dtype:
            self.at(address).copy_to(row)
        else:
            self.view(address).take(self.chosen, 0, row, "clip")

    def view(self, address: int) -> np.ndarray:
        """The memory of such a tensor, as it is looked at; not to be kept."""
        return np.ndarray(self.looked_at, self.stored, self.buffer.from_address(address + self.first))


def form_of(stored: np.dtype[Any], dtype: str, shape: tuple[int, ...]) -> Form:
    """The form of a tensor.

    Args:
        stored: numpy's dtype of its elements.
        dtype: what a record calls it.
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
    """Where the sample of an array lies; ``transposed`` looks at a matrix transposed.

    Good for as long as the array has its memory, whatever is written there; but for a complex one once only.
    """
    dtype, shape = array.dtype.name, array.shape
    if transposed:
        array = array.T
    if array.dtype.kind == "c":
        # Real and imaginary parts are numbers of their own.
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
    """A copy of the elements that are looked at, one after the other; in the tensor's own dtype, but real."""
    cut = cut_of(array, transposed)
    taken: np.ndarray = np.empty(cut.kind[0], array.real.dtype)
    cut.copy_to(taken)
    return taken


@lru_cache(maxsize=256)
def _unravelled(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return np.unravel_index(places(math.prod(shape)), shape)


@lru_cache(maxsize=64)
def arithmetic(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    """What sketches of a dtype are calculated in: float32 where that loses nothing, else float64."""
    return np.float64 if dtype.itemsize > 4 or dtype.kind in "iu" else np.float32
