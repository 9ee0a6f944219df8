"""The short way to read an ordinary ``.npy`` file; whatever is not ordinary is left to the thorough one."""

from __future__ import annotations

import io
import math
import os
import stat
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from padiff.dump.reading import fill
from padiff.dump.untrusted import NO_LINK
from padiff.records import Room

# Length of the header that numpy writes for all but arrays of many axes.
_USUAL = 128

# Bytes of values up to which nobody asks how large a file is: reading tells. Chosen: so much memory may be taken for a
# file that does not hold it.
_LITTLE = 1 << 20


def read_plain(folder: str, file: str, dtype: np.dtype[Any], shape: tuple[int, ...], room: Room) -> np.ndarray | None:
    """The array of this dtype and shape in ``folder/file``, in memory of the room.

    `None`: it is something else, no ordinary file below the folder, reached by a link, or the room is too small. Numpy
    and the checks of paths that follow links say what is wrong.
    """
    descriptor = _opened(folder, file)
    if descriptor is None:
        return None
    count = math.prod(shape)
    size = count * dtype.itemsize
    head = np.empty(_USUAL, np.uint8)
    try:
        # Memory is taken only for what the file may hold; for a little it need not be asked.
        if size > _LITTLE:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < _USUAL + size:
                return None
        memory = room(size, _USUAL)
        if memory is None:
            return None
        fill(descriptor, 0, head, memory)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if _header(head.tobytes()) != (dtype, shape, False, count):
        return None
    return memory.view(dtype).reshape(shape)


def _opened(folder: str, file: str) -> int | None:
    """A descriptor of ``folder/file``, which is below the folder and reached by no link; else `None`."""
    folders = _folders(file)
    if folders is None:
        return None
    try:
        for inner in folders:
            if not stat.S_ISDIR(os.lstat(folder + inner).st_mode):
                return None
        return os.open(f"{folder}/{file}", NO_LINK)
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=1 << 16)
def _folders(file: str) -> tuple[str, ...] | None:
    """The folders on the way to a file, each from the beginning; `None` of one that need not be below that."""
    parts = file.split("/")
    if "\\" in file or not {"", ".", ".."}.isdisjoint(parts) or not hasattr(os, "O_NOFOLLOW"):
        return None
    return tuple(accumulate(f"/{part}" for part in parts[:-1]))


@lru_cache(maxsize=1024)
def _header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool, int] | None:
    """Dtype, shape, order and number of elements, as numpy reads them; most files of a run share a few headers."""
    stream = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            return None
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # a header made to harm raises nearly anything
        return None
    if dtype.kind not in "biufc" or stream.tell() != len(data) or min(shape, default=0) < 0:
        return None
    return dtype, shape, fortran_order, math.prod(shape)
