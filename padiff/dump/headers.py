"""What a file in the safetensors format says of its arrays: dtypes, shapes, and where each lies."""

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
from padiff.records.frozen import quickly_made

#: The format's names of dtypes, and those of numpy's.
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
# As the format's own library has it.
_LARGEST_HEADER = 100_000_000
# The entry of the file's own metadata, as text, and how a header begins with it that `json` or others have written.
_ABOUT = "__metadata__"
_QUOTED = f'"{_ABOUT}"'.encode()
_FIRST = b"{" + _QUOTED + b": ", b"{" + _QUOTED + b":"
# Bytes that are looked at for their end.
_LONGEST = 1 << 20
_DECODER = json.JSONDecoder()


@quickly_made
@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a file, and what it is.

    Attributes:
        start: of its first byte, from the beginning of the file.
        dtype, shape: of what is stored.
    """

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


#: What a `Place` says, as a plain tuple, which the garbage collector need not look at again and again.
_Entry: TypeAlias = tuple[int, np.dtype[Any], tuple[int, ...]]


class Places(Mapping[str, Place]):
    """Where the arrays of a file lie, by their names. A `Place` is made when it is asked for: of many layers they are
    many, and most are read together.

    Attributes:
        entries: what the header says of each.
        last: the name of the one that lies farthest behind.
        end: where that ends: the file is as long, at least.
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


#: Those that somebody uses, by where arrays begin and the digest of what is said of them: runs of one model say the
#: same of most steps.
_IN_USE: WeakValueDictionary[tuple[int, bytes], Places] = WeakValueDictionary()


def parse_header(whole: int, bytes_at: Callable[[int, int], bytes]) -> tuple[dict[str, str], Places]:
    """The metadata and the places of arrays in a file of so many bytes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError: it is damaged.
    """
    length = int.from_bytes(bytes_at(0, 8), "little")
    if not 0 < length <= min(_LARGEST_HEADER, whole - 8):
        raise ValueError(f"a header of {length} bytes in a file of {whole}")
    begin, text = 8 + length, bytes_at(8, length)
    parted = _parted(text)
    if parted is None:
        header = parse_json(text, _entry)
        about = header.pop(_ABOUT, {})
        places = _places(header, begin)
    else:
        about, rest = parted
        key = begin, hashlib.sha256(rest).digest()
        found = _IN_USE.get(key)
        if found is None:
            found = _IN_USE[key] = _places(parse_json(rest, _entry), begin)
        places = found
    if places.end > whole:
        raise ValueError(f"tensor {places.last!r} does not lie inside of the file")
    if places.end < whole:
        raise ValueError(f"{whole - places.end} bytes at its end belong to no tensor")
    return {str(key): str(value) for key, value in about.items()}, places


def _parted(text: bytes) -> tuple[Any, bytes] | None:
    """The file's own metadata, and the header without them; `None` where they do not come first and alone."""
    first = next((first for first in _FIRST if text.startswith(first)), None)
    head = text[:_LONGEST]
    if first is None or not head.isascii():
        return None
    try:
        about, end = _DECODER.raw_decode(head.decode(), len(first))
    except ValueError:
        return None
    rest = text[end:].strip()
    if _QUOTED in rest or rest[:1] not in (b",", b"}"):
        return None
    return about, b"{" + rest[1:] if rest[:1] == b"," else b"{" + rest


def _entry(found: dict[str, Any]) -> Any:
    """What a header says of an array, as a plain tuple: of many arrays so many dictionaries and lists would keep the
    garbage collector busy. Anything else as it is.
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
    # As the format's own library has it: one after the other, with neither a hole nor a byte in two tensors.
    at = 0
    for start, end, name in sorted((start, end, name) for name, (start, end, _, _) in header.items()):
        if start != at:
            raise ValueError(f"tensor {name!r} begins at byte {start}, where the one before ends at {at}")
        at = end
    return Places(entries, last, begin + most)
