"""The safetensors format (https://huggingface.co/docs/safetensors): many arrays in one file, each readable on its own.

A file is eight bytes with the header's length, a JSON header with each array's dtype, shape and offsets, and the
arrays' bytes one after the other.
"""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.files import bytes_of
from padiff.dump.headers import NAMES, Place, Places, parse_header
from padiff.dump.medium import medium_of
from padiff.dump.reading import read, read_into
from padiff.dump.remote_path import AnyPath, as_local
from padiff.dump.spool import Spool, spool_of
from padiff.dump.untrusted import NO_LINK
from padiff.errors import RunFolderError
from padiff.records import OutputBuffer, Storable, StreamedArray
from padiff.system.memory import new_memory

_MOST_OPEN = 4
# Largest file in bytes that is read at once when it is opened: a separate read costs as much as copying this.
_AT_ONCE = 1 << 18


def write_safetensors(path: AnyPath, tensors: Mapping[str, Storable], about: Mapping[str, str]) -> None:
    """Write arrays into one file, wide dtypes first so that each array is aligned.

    If some arrays were written into a spool while they were recorded, the spool becomes the file, with these arrays
    first.

    Args:
        path: path of the file.
        tensors: arrays by name.
        about: the file's metadata.
    """
    local = as_local(path)
    spool = None if local is None else spool_of(tensors.values())
    if local is not None and spool is not None and _finished(spool, local, tensors, about):
        return
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    text = _header(about, ordered, _starts(ordered, 0))
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    medium_of(path).write_pieces(path, chain((text,), map(bytes_of, _pieces(ordered))))


def _finished(spool: Spool, path: Path, tensors: Mapping[str, Storable], about: Mapping[str, str]) -> bool:
    """Complete a spool and give it the path; return False if the spool can't be used."""
    spooled: list[tuple[str, Storable]] = []
    starts: list[int] = []
    more: list[tuple[str, Storable]] = []
    for name, array in tensors.items():
        start = spool.start_of(array)
        if start is None:
            more.append((name, array))
        else:
            spooled.append((name, array))
            starts.append(start)
    more.sort(key=lambda item: -item[1].dtype.itemsize)
    places = [start - spool.begin for start in starts] + _starts(more, spool.end - spool.begin)
    return spool.seal(path, _header(about, [*spooled, *more], places), starts, _pieces(more))


def _starts(ordered: Sequence[tuple[str, Storable]], first: int) -> list[int]:
    """Return the offsets of arrays that lie one after the other, beginning at ``first``."""
    return list(accumulate((array.nbytes for _, array in ordered), initial=first))[:-1]


def _header(about: Mapping[str, str], ordered: Sequence[tuple[str, Storable]], starts: Sequence[int]) -> bytes:
    """Return the JSON header of a file."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    for (name, array), start in zip(ordered, starts):
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
    return json.dumps(header).encode()


def _pieces(ordered: Iterable[tuple[str, Storable]]) -> Iterator[np.ndarray]:
    """Yield the elements of arrays in pieces; the memory of a piece is valid until the next one."""
    for _, array in ordered:
        if isinstance(array, StreamedArray):
            yield from array.pieces()
        else:
            yield array


class ArrayFile:
    """A file of arrays, which stays open while they are read one by one.

    Args:
        path: the file.
        recent: the open files, oldest first. If there are too many, the oldest is closed, and opened again on access: a
            report refers to the files of all steps, which are too many to keep open.
    """

    __slots__ = ("_descriptor", "_identity", "_recent", "path")

    def __init__(self, path: AnyPath, recent: deque[ArrayFile]) -> None:
        self.path, self._recent = path, recent
        self._descriptor: _Descriptor | None = None
        self._identity: tuple[int, ...] | None = None

    def header(self) -> tuple[dict[str, str], Places]:
        """Return the file's metadata, and the positions of its arrays, which are checked to lie in the file.

        Raises:
            RunFolderError: the file is missing or damaged.
        """
        try:
            return self._parsed()
        except FileNotFoundError:
            raise RunFolderError(
                f"{self.path} is missing: copy the whole run folder, or record the step again"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise RunFolderError(
                f"{self.path} is damaged ({error}): copy it again from where it was recorded"
            ) from error

    def array(self, place: Place, room: OutputBuffer = new_memory) -> np.ndarray:
        """Return one of the arrays, in memory from ``room`` if that is large enough. Default: in new memory.

        Raises:
            OSError: the file is gone.
            ValueError: the file has become shorter, was replaced, or the array exceeds the free memory.
        """
        file = self._open()
        memory = room(place.size, place.start)
        if memory is None:
            memory = new_memory(place.size)
        file.fill(place.start, memory)
        return memory.view(place.dtype).reshape(place.shape)

    def view(self, place: Place) -> np.ndarray:
        """Return one of the arrays, which must not be modified; without a copy if the file was read at once.

        Raises:
            OSError, ValueError: see `array`.
        """
        content = self._open().held(place.start, place.size)
        return self.array(place) if content is None else np.frombuffer(content, place.dtype).reshape(place.shape)

    def forget(self) -> None:
        """Free the content of a small file that was read at once; later accesses read from disk."""
        if self._descriptor is not None:
            self._descriptor.forget()

    def close(self) -> None:
        """Close the file; the next access opens it again."""
        self._descriptor = None

    def _parsed(self) -> tuple[dict[str, str], Places]:
        file = self._open()
        return parse_header(file.size, file.bytes_at)

    def _open(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            number = os.open(str(self.path), NO_LINK)
            status = os.fstat(number)
            descriptor = _Descriptor(number, status.st_size)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no plain file")
            identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if self._identity not in (None, identity):
                raise ValueError("the step was recorded again")
            self._identity = identity
            self._descriptor = descriptor
            self._recent.append(self)
            if len(self._recent) > _MOST_OPEN:
                self._recent.popleft().close()
        return descriptor


class _Descriptor:
    """An open file, closed when this object is freed. A small file is read at once, until `forget`.

    Attributes:
        number: the file descriptor.
        size: size of the file in bytes when it was opened.
    """

    __slots__ = ("_at_once", "_content", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self._at_once = size <= _AT_ONCE
        self._content: bytes | None = None

    def __del__(self) -> None:
        os.close(self.number)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Copy and pickle as None: a copied `ArrayFile` opens the file anew, else both would close one descriptor."""
        return type(None), ()

    def fill(self, start: int, memory: np.ndarray) -> None:
        """Fill memory with the file's content from offset ``start`` on.

        Raises:
            ValueError: the file is too short.
            OSError: it cannot be read.
        """
        content = self.held(start, memory.size)
        if content is None:
            read_into(self.number, start, memory)
        else:
            memory[:] = np.frombuffer(content, np.uint8)

    def held(self, start: int, size: int) -> memoryview | None:
        """Return ``size`` bytes from offset ``start`` without a copy; `None` for a large file, or after `forget`.

        Raises:
            ValueError, OSError: see `read_into`.
        """
        if not self._at_once:
            return None
        if self._content is None:
            self._content = read(self.number, 0, self.size)
        content = memoryview(self._content)[start : start + size]
        if len(content) != size:
            raise ValueError("the file was cut off")
        return content

    def forget(self) -> None:
        """Free the content that was read at once."""
        self._content, self._at_once = None, False

    def bytes_at(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from offset ``start``.

        Raises:
            ValueError, OSError: see `read_into`.
        """
        content = self.held(start, size)
        return read(self.number, start, size) if content is None else bytes(content)
