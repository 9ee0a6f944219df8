"""The safetensors format (https://huggingface.co/docs/safetensors): many arrays in one file, each read by itself.

A file is eight bytes with the header's length, a JSON header with each array's dtype, shape and place, and the arrays'
bytes one after the other.
"""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.files import bytes_of, write_all
from padiff.dump.headers import NAMES, Place, Places, parse_header
from padiff.dump.reading import fill, read
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.spool import Spool, spool_of
from padiff.dump.untrusted import NO_LINK
from padiff.errors import RunFolderError
from padiff.records import Room, Storable, Unread
from padiff.system.memory import new_memory

_MOST_OPEN = 4
# Bytes of the largest file that is read at once, as it is opened: each further read costs as much as copying these.
_AT_ONCE = 1 << 18


def write_safetensors(path: AnyPath, tensors: Mapping[str, Storable], about: Mapping[str, str]) -> None:
    """Write arrays into one file, wide dtypes first so that each begins at a multiple of its width.

    Where some of them were written already, while they were recorded, these come first, and the file is that one.
    """
    spool = None if isinstance(path, RemotePath) else spool_of(tensors.values())
    if spool is not None and isinstance(path, Path) and _finished(spool, path, tensors, about):
        return
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    text = _header(about, ordered, _starts(ordered, 0))
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    if isinstance(path, RemotePath):
        # Each piece as bytes of its own: it does not last.
        path.write_bytes(b"".join((text, *(bytes(bytes_of(piece)) for piece in _pieces(ordered)))))
        return
    with open(path, "wb", buffering=0) as file:
        write_all(file, text)
        for piece in _pieces(ordered):
            write_all(file, bytes_of(piece))


def _finished(spool: Spool, path: Path, tensors: Mapping[str, Storable], about: Mapping[str, str]) -> bool:
    """Give the file a name that tensors were written into while they were recorded; false where it can't be used."""
    there: list[tuple[str, Storable]] = []
    starts: list[int] = []
    more: list[tuple[str, Storable]] = []
    for name, array in tensors.items():
        start = spool.start_of(array)
        if start is None:
            more.append((name, array))
        else:
            there.append((name, array))
            starts.append(start)
    more.sort(key=lambda item: -item[1].dtype.itemsize)
    places = [start - spool.begin for start in starts] + _starts(more, spool.end - spool.begin)
    return spool.finish(path, _header(about, [*there, *more], places), starts, _pieces(more))


def _starts(ordered: Sequence[tuple[str, Storable]], first: int) -> list[int]:
    """Where arrays begin that lie one after the other."""
    return list(accumulate((array.nbytes for _, array in ordered), initial=first))[:-1]


def _header(about: Mapping[str, str], ordered: Sequence[tuple[str, Storable]], starts: Sequence[int]) -> bytes:
    """What a file says of its arrays, as JSON."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    for (name, array), start in zip(ordered, starts):
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
    return json.dumps(header).encode()


def _pieces(ordered: Iterable[tuple[str, Storable]]) -> Iterator[np.ndarray]:
    """The elements of arrays; each piece lasts until the next one is asked for."""
    for _, array in ordered:
        if isinstance(array, Unread):
            yield from array.pieces()
        else:
            yield array


class ArrayFile:
    """A file of arrays, which is held open while they are read, one by one.

    Args:
        path: the file.
        recent: files that are open, the oldest first: with too many of them it is closed, and opened again if need be.
            A report refers to the files of all steps; to have them open would be more than systems allow.
    """

    __slots__ = ("_descriptor", "_identity", "_recent", "path")

    def __init__(self, path: AnyPath, recent: deque[ArrayFile]) -> None:
        self.path, self._recent = path, recent
        self._descriptor: _Descriptor | None = None
        self._identity: tuple[int, ...] | None = None

    def header(self) -> tuple[dict[str, str], Places]:
        """The file's own metadata, and where its arrays lie: inside of the file.

        Raises:
            RunFolderError: it is missing or damaged.
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

    def array(self, place: Place, room: Room = new_memory) -> np.ndarray:
        """One of the arrays, in memory of the room where that is large enough. Default: in new memory.

        Raises:
            OSError: the file is gone.
            ValueError: it has become shorter, another one has its name, or so much memory is not free.
        """
        file = self._open()
        memory = room(place.size, place.start)
        if memory is None:
            memory = new_memory(place.size)
        file.fill(place.start, memory)
        return memory.view(place.dtype).reshape(place.shape)

    def view(self, place: Place) -> np.ndarray:
        """One of the arrays, not to be written to. Where the file was read at once, it is no copy.

        Raises:
            OSError, ValueError: as there.
        """
        held = self._open().held(place.start, place.size)
        return self.array(place) if held is None else np.frombuffer(held, place.dtype).reshape(place.shape)

    def forget(self) -> None:
        """Read again what is asked for from now on: a small file is read at once, with its header."""
        if self._descriptor is not None:
            self._descriptor.forget()

    def let_go(self) -> None:
        """Close the file; it is opened again if need be."""
        self._descriptor = None

    def _parsed(self) -> tuple[dict[str, str], Places]:
        file = self._open()
        return parse_header(file.size, file.bytes_at)

    def _open(self) -> _Descriptor:
        found = self._descriptor
        if found is None:
            assert isinstance(self.path, Path)
            number = os.open(self.path, NO_LINK)
            status = os.fstat(number)
            found = _Descriptor(number, status.st_size)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no plain file")
            identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if self._identity not in (None, identity):
                raise ValueError("the step was recorded again")
            self._identity = identity
            self._descriptor = found
            self._recent.append(self)
            if len(self._recent) > _MOST_OPEN:
                self._recent.popleft().let_go()
        return found


class _Descriptor:
    """A file that is open for as long as this is used, and how many bytes it had; a small one is read at once, until
    that is to be forgotten.
    """

    __slots__ = ("_at_once", "_content", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self._at_once = size <= _AT_ONCE
        self._content: bytes | None = None

    def __del__(self) -> None:
        os.close(self.number)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """None at all: a copy of what holds this opens the file for itself, or two would close one number."""
        return type(None), ()

    def fill(self, start: int, memory: np.ndarray) -> None:
        """Fill memory with what stands from a byte on.

        Raises:
            ValueError: the file ends before.
            OSError: it cannot be read.
        """
        held = self.held(start, memory.size)
        if held is None:
            fill(self.number, start, memory)
        else:
            memory[:] = np.frombuffer(held, np.uint8)

    def held(self, start: int, size: int) -> memoryview | None:
        """So many bytes of a small file from one on, not copied; `None` of another one, or once it was forgotten.

        Raises:
            ValueError, OSError: as there.
        """
        if not self._at_once:
            return None
        if self._content is None:
            self._content = read(self.number, 0, self.size)
        found = memoryview(self._content)[start : start + size]
        if len(found) != size:
            raise ValueError("the file was cut off")
        return found

    def forget(self) -> None:
        """Forget what was read."""
        self._content, self._at_once = None, False

    def bytes_at(self, start: int, size: int) -> bytes:
        """So many bytes from one on.

        Raises:
            ValueError, OSError: as there.
        """
        held = self.held(start, size)
        return read(self.number, start, size) if held is None else bytes(held)
