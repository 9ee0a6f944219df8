"""Storage options of a run: one file per step or many, compression, and a size limit."""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np

from padiff.errors import UsageError
from padiff.system.process import check_free

#: ``zlib`` is Python's own; ``zstd`` needs the package zstandard, and is several times faster.
CODECS = ("zlib", "zstd")

# Largest accepted compression ratio. Zeros reach some thousands; a larger ratio is an attempt to fill the memory.
_LARGEST_RATIO = 50_000
_BLOCK = 1 << 22
_PART = 1 << 20


def check(name: str) -> None:
    """Check that a codec is known and installed.

    Raises:
        UsageError: the codec is unknown or not installed.
    """
    if name not in CODECS:
        raise UsageError(f"compression is one of {', '.join(CODECS)}, got {name!r}")
    if name == "zstd":
        _zstandard()


def compressed(array: np.ndarray, name: str) -> np.ndarray:
    """Return the compressed bytes of an array as a uint8 array.

    Bytes of the same significance are grouped first, which compresses better: exponents are similar, low bits are not.
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
        ValueError: the data does not unpack to an array of this dtype and shape. No more bytes than that are unpacked.
    """
    check(name)
    size = math.prod(shape) * dtype.itemsize
    packed = np.ascontiguousarray(data)
    if size > _LARGEST_RATIO * packed.nbytes + (1 << 20):
        raise ValueError(f"{packed.nbytes:,} bytes that are to unpack to {size:,}")
    check_free(size)
    # Unpacked block by block of bytes of one significance, so that memory holds little more than the array.
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
    except Exception as error:  # each codec has its own error types
        raise ValueError(f"it can't be unpacked: {error}") from error
    if done != size or more:
        raise ValueError(f"it unpacks to {'more than ' if more else ''}{done} bytes, not {size}")
    return array.reshape(-1).view(dtype).reshape(shape)


def _reader(packed: np.ndarray, name: str) -> Callable[[int], bytes]:
    """Return a function that unpacks the next ``count`` bytes, fewer at the end."""
    if name == "zlib":
        unpacking = zlib.decompressobj()
        # In small parts, as zlib copies the unconsumed tail of each.
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


@dataclass(frozen=True)
class Storage:
    """Storage options of a run.

    Args:
        pack: store a rank's step in one file, in the safetensors format (`padiff.dump.pack`).
        compression: codec of packed tensors, ``zlib`` or ``zstd``; empty: none.
        mixed: although ``pack`` is set, store steps without sketches in many files.
        max_bytes: largest size of the run folder; see `padiff.dump.prepare`. Default: no limit.

    Raises:
        UsageError: the codec is unknown or not installed, or the limit is no positive number.
    """

    pack: bool = False
    compression: str = ""
    max_bytes: float | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.compression:
            check(self.compression)
            if not self.pack:
                raise UsageError("compression is for packed steps: leave pack=False away")
        limit = self.max_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
            raise UsageError(f"max_bytes has to be a number of bytes above 0, got {limit!r}")

    @classmethod
    def from_options(
        cls, pack: bool | None, compression: str, max_bytes: float | None, sketches: bool, mixed: bool = False
    ) -> Storage:
        """Return the storage for a recorder's arguments. If ``pack`` is None, sketches or compression turn it on.

        Args:
            sketches: True if steps may have sketches.
            mixed: True if some steps may have none.

        Raises:
            UsageError: ``pack`` is False although steps may have sketches.
        """
        if pack is False and sketches:
            raise UsageError("sketches are written into packed steps: leave pack=False away")
        packed = (sketches or bool(compression)) if pack is None else pack
        return cls(packed, compression, max_bytes, mixed=mixed and pack is None and not compression)

    def in_store(self, pack: bool | None) -> Storage:
        """Return these options for a run in a store, where a rank's step is one object, written atomically.

        Raises:
            UsageError: ``pack`` is False.
        """
        if pack is False:
            raise UsageError("in a store a step is one object, as with pack=True: leave pack=False away")
        return replace(self, pack=True, mixed=False)
