"""Compressing tensors, by codecs that are kept by others: each has a name, and is imported when it is used."""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable
from itertools import product
from typing import Any, cast

import numpy as np

from padiff.errors import UsageError
from padiff.system.memory import check_free

#: ``zlib`` is Python's own; ``zstd`` needs the package zstandard, and is several times faster.
CODECS = ("zlib", "zstd")

# Zeros shrink by some thousand times; what claims more is made to fill the memory.
_LARGEST_RATIO = 50_000
_BLOCK = 1 << 22
_PART = 1 << 20


def check(name: str) -> None:
    """Tell a codec that is unknown or not installed.

    Raises:
        UsageError: saying which there are, or what to install.
    """
    if name not in CODECS:
        raise UsageError(f"compression is one of {', '.join(CODECS)}, got {name!r}")
    if name == "zstd":
        _zstandard()


def compressed(array: np.ndarray, name: str) -> np.ndarray:
    """The array's bytes, compressed, as numbers from 0 to 255.

    Bytes of one significance are put together first: exponents are alike, the lowest digits are not.
    """
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    shuffled = np.ascontiguousarray(flat.reshape(array.size, array.dtype.itemsize).T)
    data = (
        zlib.compress(shuffled.data, 1)
        if name == "zlib"
        else _zstandard().ZstdCompressor(level=1).compress(shuffled.data)
    )
    return np.frombuffer(data, np.uint8)


def restored(data: np.ndarray, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Undo `compressed`.

    Raises:
        ValueError: the bytes are not those of such an array; never more are unpacked than it has.
    """
    check(name)
    size = math.prod(shape) * dtype.itemsize
    packed = np.ascontiguousarray(data)
    if size > _LARGEST_RATIO * packed.nbytes + (1 << 20):
        raise ValueError(f"{packed.nbytes:,} bytes that are to unpack to {size:,}")
    check_free(size)
    # Block by block of bytes of one significance: little more than the array itself is in memory.
    count = math.prod(shape)
    array = np.empty((count, dtype.itemsize), np.uint8)
    read = _reader(packed, name)
    done = 0
    try:
        for plane, start in product(range(dtype.itemsize), range(0, count, _BLOCK)):
            block = array[start : start + _BLOCK, plane]
            raw = read(len(block))
            done += len(raw)
            if len(raw) != len(block):
                break
            block[:] = np.frombuffer(raw, np.uint8)
        more = done == size and bool(read(1))
    except Exception as error:  # each codec has errors of its own
        raise ValueError(f"it can't be unpacked: {error}") from error
    if done != size or more:
        raise ValueError(f"it unpacks to {'more than ' if more else ''}{done} bytes, not {size}")
    return array.reshape(-1).view(dtype).reshape(shape)


def _reader(packed: np.ndarray, name: str) -> Callable[[int], bytes]:
    """Gives the next bytes that are unpacked, fewer at the end."""
    if name == "zlib":
        unpacking = zlib.decompressobj()
        # In parts: what was not consumed of one is copied.
        waiting = iter([packed[start : start + _PART].data for start in range(0, packed.nbytes, _PART)])

        def read(count: int) -> bytes:
            raw = b""
            while len(raw) < count and not unpacking.eof:
                part = unpacking.unconsumed_tail or next(waiting, b"")
                raw += unpacking.decompress(part, count - len(raw))
                if not part:
                    break
            return raw

        return read
    return cast("Callable[[int], bytes]", _zstandard().ZstdDecompressor().stream_reader(packed.data).read)


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise UsageError(
            "compression='zstd' needs the package zstandard: pip install 'padiff-hooks[compression]', or use 'zlib'"
        ) from None
