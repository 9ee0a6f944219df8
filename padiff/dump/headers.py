"""Headers of safetensors files: the dtype, shape and position of each array."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np

from padiff.dump.untrusted import parse_json, shape_of
from padiff.records.frozen import fast_frozen_init

#: The format's dtype names -> numpy dtypes.
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
# The limit of the safetensors library.
_LARGEST_HEADER = 100_000_000
# The header's entry for the file's own metadata, and the first bytes of a header that begins with this entry.
_ABOUT = "__metadata__"
_QUOTED = f'"{_ABOUT}"'.encode()
_FIRST = b"{" + _QUOTED + b": ", b"{" + _QUOTED + b":"
# Bytes of a header that are searched for the end of the metadata.
_LONGEST = 1 << 20
_DECODER = json.JSONDecoder()


@fast_frozen_init
@dataclass(frozen=True, slots=True)
class Place:
    """Position, dtype and shape of a tensor in a file.

    Attributes:
        start: offset of the first byte, from the beginning of the file.
        dtype, shape: dtype and shape of the stored array.
    """

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


#: The fields of a `Place` as a plain tuple, which the garbage collector stops tracking.
_Entry: TypeAlias = tuple[int, np.dtype[Any], tuple[int, ...]]


class Places(Mapping[str, Place]):
    """Positions of a file's arrays, by array name. A `Place` is created on lookup: a file may hold very many arrays,
    and most are read together without it.

    Attributes:
        entries: start, dtype and shape of each array.
        last: name of the array that ends last.
        end: offset at which that array ends; the file has at least this many bytes.
    """

    __slots__ = ("__weakref__", "end", "entries", "last")

    def __init__(self, entries: Mapping[str, _Entry], last: str, end: int) -> None:
        self.entries, self.last, self.end = entries, last, end

    def __getitem__(self, name: str) -> Place:
        return Place(*self.entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


#: Positions in use, by the offset of the first array and the digest of the header: most steps of runs of one model
#: have the same header.
_IN_USE: WeakValueDictionary[tuple[int, bytes], Places] = WeakValueDictionary()


def parse_header(whole: int, bytes_at: Callable[[int, int], bytes]) -> tuple[dict[str, str], Places]:
    """Return the metadata of a file, and the positions of its arrays.

    Args:
        whole: size of the file in bytes.
        bytes_at: reads ``(start, size)`` bytes of the file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError: the header is damaged.
    """
    length = int.from_bytes(bytes_at(0, 8), "little")
    if not 0 < length <= min(_LARGEST_HEADER, whole - 8):
        raise ValueError(f"a header of {length} bytes in a file of {whole}")
    begin, text = 8 + length, bytes_at(8, length)
    parts = _parted(text)
    if parts is None:
        header = parse_json(text, _entry)
        about = header.pop(_ABOUT, {})
        places = _places(header, begin)
    else:
        about, entries = parts
        key = begin, hashlib.sha256(entries).digest()
        places_in_use = _IN_USE.get(key)
        if places_in_use is None:
            places_in_use = _IN_USE[key] = _places(parse_json(entries, _entry), begin)
        places = places_in_use
    if places.end > whole:
        raise ValueError(f"tensor {places.last!r} does not lie inside of the file")
    if places.end < whole:
        raise ValueError(f"{whole - places.end} bytes at its end belong to no tensor")
    return {str(key): str(value) for key, value in about.items()}, places


def _parted(text: bytes) -> tuple[Any, bytes] | None:
    """Split a header into the file's metadata and the rest; return `None` unless the metadata is its first entry."""
    first = next((first for first in _FIRST if text.startswith(first)), None)
    head = text[:_LONGEST]
    if first is None or not head.isascii():
        return None
    try:
        about, end = _DECODER.raw_decode(head.decode(), len(first))
    except ValueError:
        return None
    remainder = text[end:].strip()
    if _QUOTED in remainder or remainder[:1] not in (b",", b"}"):
        return None
    return about, b"{" + remainder[1:] if remainder[:1] == b"," else b"{" + remainder


def _entry(found: dict[str, Any]) -> Any:
    """Return a header's entry for an array as a plain tuple, and any other object unchanged.

    Many dictionaries and lists would keep the garbage collector busy.
    """
    offsets = found.get("data_offsets")
    if not isinstance(offsets, list):
        return found
    start, end = map(int, offsets)
    dtype, shape = DTYPES[found["dtype"]], shape_of(found["shape"])
    if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of {dtype} {shape} from byte {start} to {end}")
    return start, end, dtype, shape


def _places(header: Mapping[str, Any], begin: int) -> Places:
    entries: dict[str, _Entry] = {}
    last, most = "", 0
    for name, (start, end, dtype, shape) in header.items():
        if end > most:
            last, most = name, end
        entries[name] = begin + start, dtype, shape
    # As in the safetensors library: tensors lie one after the other, without gaps or overlaps.
    at = 0
    for start, end, name in sorted((start, end, name) for name, (start, end, _, _) in header.items()):
        if start != at:
            raise ValueError(f"tensor {name!r} begins at byte {start}, where the one before ends at {at}")
        at = end
    return Places(entries, last, begin + most)
