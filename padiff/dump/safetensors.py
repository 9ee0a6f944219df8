"""The safetensors format (https://huggingface.co/docs/safetensors): many arrays in one file, to be memory-mapped.

A file is eight bytes with the header's length, a JSON header with each array's dtype, shape and place, and the arrays'
bytes one after the other.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from padiff.dump.files import bytes_of, write_all
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.untrusted import parse_json, shape_of
from padiff.errors import RunFolderError
from padiff.records import Room

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
_MOST_MAPPED = 4


def write_safetensors(path: AnyPath, tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Write arrays into one file, wide dtypes first so that each begins at a multiple of its width."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    end = 0
    for name, array in ordered:
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if isinstance(path, RemotePath):
        begin = len(text).to_bytes(8, "little") + text
        path.write_bytes(b"".join((begin, *(bytes_of(array) for _, array in ordered))))
        return
    with open(path, "wb", buffering=0) as file:
        write_all(file, len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            write_all(file, bytes_of(array))


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


class Mapped:
    """A file that is mapped into memory while it is read; arrays are views of it, and keep their map.

    Args:
        path: the file.
        recent: files that are mapped, the oldest first: with too many of them it is let go, and mapped again if need
            be. A report refers to the files of all steps; to have them open would be more than systems allow.
    """

    __slots__ = ("_descriptor", "_identity", "_map", "_recent", "path")

    def __init__(self, path: AnyPath, recent: deque[Mapped]) -> None:
        self.path, self._recent = path, recent
        self._map: mmap.mmap | bytes | None = None
        self._descriptor: _Descriptor | None = None
        self._identity: tuple[int, ...] | None = None

    def header(self) -> tuple[dict[str, str], dict[str, Place]]:
        """The file's own metadata, and where its arrays lie: inside of the file.

        Raises:
            RunFolderError: it is missing or damaged.
        """
        try:
            return _parse_header(self._content())
        except FileNotFoundError:
            raise RunFolderError(
                f"{self.path} is missing: copy the whole run folder, or record the step again"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise RunFolderError(
                f"{self.path} is damaged ({error}): copy it again from where it was recorded"
            ) from error

    def array(self, place: Place) -> np.ndarray:
        """One of the arrays.

        Raises:
            OSError: the file is gone.
            ValueError: it has become shorter, or another one has its name.
        """
        mapped = self._mapped()
        if mapped.size() < place.start + place.size:
            raise ValueError("the file was cut off")  # to look at what was there would end the process
        return np.frombuffer(mapped, place.dtype, math.prod(place.shape), place.start).reshape(place.shape)

    def array_into(self, place: Place, room: Room) -> np.ndarray:
        """`array`, read into memory of the room where that is large enough.

        Raises:
            OSError, ValueError: as there.
        """
        memory = room(place.size) if hasattr(os, "preadv") else None
        if memory is None:
            return self.array(place)
        self._mapped()  # which looks whether it is still the same file
        descriptor = self._descriptor
        if descriptor is None:  # let go by another thread just now
            return self.array(place)
        if os.preadv(descriptor.number, [memory.data], place.start) != place.size:
            raise ValueError("the file was cut off")
        return memory.view(place.dtype).reshape(place.shape)

    def let_go(self) -> None:
        """Close the file; it is opened again if need be."""
        self._map = self._descriptor = None

    def _content(self) -> mmap.mmap | bytes:
        return self._mapped()

    def _mapped(self) -> mmap.mmap:
        found = self._map
        if not isinstance(found, mmap.mmap):
            assert isinstance(self.path, Path)
            # Without waiting for whoever would write into a pipe.
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
            descriptor = _Descriptor(os.open(self.path, flags))
            status = os.fstat(descriptor.number)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no plain file")
            identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if self._identity not in (None, identity):
                raise ValueError("the step was recorded again")
            self._identity = identity
            found = self._map = mmap.mmap(descriptor.number, 0, access=mmap.ACCESS_READ)
            self._descriptor = descriptor
            self._recent.append(self)
            if len(self._recent) > _MOST_MAPPED:
                self._recent.popleft().let_go()
        return found


class _Descriptor:
    """A file that is open for as long as this is used."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _parse_header(data: mmap.mmap | bytes) -> tuple[dict[str, str], dict[str, Place]]:
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= min(_LARGEST_HEADER, len(data) - 8):
        raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
    begin = 8 + length
    header = parse_json(data[8:begin])
    about = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    places = {}
    for name, entry in header.items():
        start, end = (int(n) for n in entry["data_offsets"])
        place = Place(begin + start, DTYPES[entry["dtype"]], shape_of(entry["shape"]))
        if start < 0 or end - start != place.size or begin + end > len(data):
            raise ValueError(f"tensor {name!r} does not lie inside of the file")
        places[str(name)] = place
    return about, places
