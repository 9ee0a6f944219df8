"""The short way to read an ordinary ``.npy`` file; whatever is not ordinary is left to the thorough one."""

from __future__ import annotations

import io
import math
import mmap
import os
import stat
from functools import lru_cache
from typing import Any

import numpy as np

from padiff.records import Room

# Smaller files are read at once, larger ones mapped: to copy costs less than pages that are mapped one by one.
SMALL = 1 << 20
# Headers of ordinary arrays are shorter.
_HEADER = 512
# Length of the header that numpy writes for all but arrays of many axes.
_USUAL = 128

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def read_plain(folder: str, file: str) -> np.ndarray | None:
    """The array in ``folder/file``, if that is an ordinary file below the folder, reached by no link; else `None`.

    `None` says nothing of what is wrong: numpy and the checks of paths that follow links do.
    """
    descriptor = _opened(folder, file)
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size < SMALL:
            return _array(os.read(descriptor, status.st_size), status.st_size)
        return _array(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), status.st_size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def read_plain_into(
    room: Room, folder: str, file: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray | None:
    """The array of this dtype and shape in ``folder/file``, read into memory of the room.

    `None`: it is something else, is not read by `read_plain`, or the room is too small.
    """
    count = math.prod(shape)
    memory = room(count * dtype.itemsize) if hasattr(os, "preadv") else None
    descriptor = _opened(folder, file) if memory is not None else None
    if memory is None or descriptor is None:
        return None
    head = bytearray(_USUAL)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        # Header and values in one call.
        if os.preadv(descriptor, [head, memory.data], 0) != _USUAL + memory.size:
            return None
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if _header(bytes(head)) != (dtype, shape, False, count):
        return None
    return memory.view(dtype).reshape(shape)


def _opened(folder: str, file: str) -> int | None:
    """A descriptor of ``folder/file``, which is below the folder and reached by no link; else `None`."""
    parts = file.split("/")
    if "\\" in file or not {"", ".", ".."}.isdisjoint(parts) or not hasattr(os, "O_NOFOLLOW"):
        return None
    path = folder
    try:
        for part in parts[:-1]:
            path = f"{path}/{part}"
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return None
        return os.open(f"{path}/{parts[-1]}", _FLAGS)
    except (OSError, ValueError):
        return None


def _array(data: bytes | mmap.mmap, size: int) -> np.ndarray | None:
    begin = 10 + int.from_bytes(data[8:10], "little")
    known = _header(data[:begin]) if begin <= _HEADER else None
    if known is None or len(data) != size:
        return None
    dtype, shape, fortran_order, count = known
    if begin + count * dtype.itemsize > size:
        return None
    flat = np.frombuffer(data, dtype, count, begin)
    return flat.reshape(shape, order="F" if fortran_order else "C")


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
