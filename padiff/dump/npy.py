"""Fast reading of ordinary ``.npy`` files; `padiff.dump.tensor_file` reads all others, with full checks."""

from __future__ import annotations

import io
import math
import os
import stat
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from padiff.dump.reading import read_into
from padiff.dump.untrusted import NO_LINK
from padiff.records import OutputBuffer

# Length in bytes of the header that numpy writes, except for arrays of many axes.
_USUAL = 128

# Arrays up to this size in bytes are read without checking the file's size first. Chosen: allocating this much in vain
# does no harm.
_LITTLE = 1 << 20


def read_plain(
    folder: str, file: str, dtype: np.dtype[Any], shape: tuple[int, ...], room: OutputBuffer
) -> np.ndarray | None:
    """Return the array in ``folder/file``, in memory from ``room``, or `None` if the file needs the full checks.

    That is so if the array has another dtype or shape, the file is not a regular one below the folder, the path has a
    link, or the room is too small.
    """
    descriptor = _opened(folder, file)
    if descriptor is None:
        return None
    count = math.prod(shape)
    size = count * dtype.itemsize
    head = np.empty(_USUAL, np.uint8)
    try:
        # Allocate only what the file can hold; for small arrays the check is not worth it.
        if size > _LITTLE:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < _USUAL + size:
                return None
        memory = room(size, _USUAL)
        if memory is None:
            return None
        read_into(descriptor, 0, head, memory)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if _header(head.tobytes()) != (dtype, shape, False, count):
        return None
    return memory.view(dtype).reshape(shape)


def _opened(folder: str, file: str) -> int | None:
    """Return a descriptor of ``folder/file``; `None` if the path leaves the folder, has a link or can't be opened."""
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
    """Return the relative paths of a file's parent folders, outermost first; `None` if the path may lead elsewhere."""
    parts = file.split("/")
    if "\\" in file or not {"", ".", ".."}.isdisjoint(parts) or not hasattr(os, "O_NOFOLLOW"):
        return None
    return tuple(accumulate(f"/{part}" for part in parts[:-1]))


@lru_cache(maxsize=1024)
def _header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool, int] | None:
    """Return dtype, shape, order and number of elements of a header; cached, as most files of a run share a few."""
    stream = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            return None
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # a malicious header can raise nearly any error
        return None
    if dtype.kind not in "biufc" or stream.tell() != len(data) or min(shape, default=0) < 0:
        return None
    return dtype, shape, fortran_order, math.prod(shape)
