"""Compressing tensors, by codecs that are kept by others: each has a name, and is imported when it is used."""

from __future__ import annotations

import importlib
import math
import zlib
from typing import Any

import numpy as np

from padiff.errors import UsageError

#: ``zlib`` is Python's own; ``zstd`` needs the package zstandard, and is several times faster.
CODECS = ("zlib", "zstd")

# Zeros shrink by some thousand times; what claims more is made to fill the memory.
_LARGEST_RATIO = 50_000


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
    try:
        if name == "zlib":
            raw = zlib.decompressobj().decompress(packed.data, size + 1)
        else:
            raw = _zstandard().ZstdDecompressor().stream_reader(packed.data).read(size + 1)
    except Exception as error:  # each codec has errors of its own
        raise ValueError(f"it can't be unpacked: {error}") from error
    if len(raw) != size:
        raise ValueError(
            f"it unpacks to {'more than ' if len(raw) > size else ''}{min(len(raw), size)} bytes, not {size}"
        )
    return (
        np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, math.prod(shape)).T)
        .view(dtype)
        .reshape(shape)
    )


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise UsageError(
            "compression='zstd' needs the package zstandard: pip install 'padiff-hooks[compression]', or use 'zlib'"
        ) from None
