"""The safetensors format (https://huggingface.co/docs/safetensors): headers, arrays on demand, prefetching."""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from padiff.dump.format import bytes_of
from padiff.dump.medium import medium_of
from padiff.dump.store import AnyPath, RemotePath
from padiff.dump.untrusted import NO_LINK, parse_json, read, read_into, shape_of
from padiff.errors import RunFolderError
from padiff.records import Storable, StreamedArray
from padiff.system.process import new_memory

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


def parse_header(whole: int, bytes_at: Callable[[int, int], bytes]) -> tuple[dict[str, str], dict[str, Place]]:
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
    begin, header = 8 + length, parse_json(bytes_at(8, length), _entry)
    about = header.pop("__metadata__", {})
    # As in the safetensors library: tensors lie one after the other, without gaps or overlaps.
    at, last = 0, ""
    for start, end, name in sorted((start, end, name) for name, (start, end, _, _) in header.items()):
        if start != at:
            raise ValueError(f"tensor {name!r} begins at byte {start}, where the one before ends at {at}")
        at, last = end, name
    if begin + at > whole:
        raise ValueError(f"tensor {last!r} does not lie inside of the file")
    if begin + at < whole:
        raise ValueError(f"{whole - begin - at} bytes at its end belong to no tensor")
    places = {name: Place(begin + start, dtype, shape) for name, (start, _, dtype, shape) in header.items()}
    return {str(key): str(value) for key, value in about.items()}, places


def _entry(found: dict[str, Any]) -> Any:
    """Return a header's entry for an array as a tuple, and any other object unchanged."""
    offsets = found.get("data_offsets")
    if not isinstance(offsets, list):
        return found
    start, end = map(int, offsets)
    dtype, shape = DTYPES[found["dtype"]], shape_of(found["shape"])
    if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of {dtype} {shape} from byte {start} to {end}")
    return start, end, dtype, shape


_MOST_OPEN = 4


def write_safetensors(path: AnyPath, tensors: Mapping[str, Storable], about: Mapping[str, str]) -> None:
    """Write arrays into one file, wide dtypes first so that each array is aligned.

    Args:
        path: path of the file.
        tensors: arrays by name.
        about: the file's metadata.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    text = _header(about, ordered)
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    medium_of(path).write_pieces(path, chain((text,), map(bytes_of, _pieces(ordered))))


def _header(about: Mapping[str, str], ordered: Sequence[tuple[str, Storable]]) -> bytes:
    """Return the JSON header of a file whose arrays lie one after the other."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    start = 0
    for name, array in ordered:
        end = start + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
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

    def header(self) -> tuple[dict[str, str], dict[str, Place]]:
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

    def array(self, place: Place) -> np.ndarray:
        """Return one of the arrays, in new memory.

        Raises:
            OSError: the file is gone.
            ValueError: the file has become shorter, was replaced, or the array exceeds the free memory.
        """
        file = self._open()
        memory = new_memory(place.size)
        read_into(file.number, place.start, memory)
        return memory.view(place.dtype).reshape(place.shape)

    def close(self) -> None:
        """Close the file; the next access opens it again."""
        self._descriptor = None

    def _parsed(self) -> tuple[dict[str, str], dict[str, Place]]:
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
    """An open file, closed when this object is freed.

    Attributes:
        number: the file descriptor.
        size: size of the file in bytes when it was opened.
    """

    __slots__ = ("number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size

    def __del__(self) -> None:
        os.close(self.number)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Copy and pickle as None: a copied `ArrayFile` opens the file anew, else both would close one descriptor."""
        return type(None), ()

    def bytes_at(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from offset ``start``.

        Raises:
            ValueError, OSError: see `read_into`.
        """
        return read(self.number, start, size)


#: Objects that are fetched at the same time.
_THREADS = 4
#: Bytes that may be prefetched besides the next object, so that memory stays limited.
_AHEAD = 256 << 20
#: Size in bytes of the cache of shared tensors, which all steps refer to.
_SHARED = 256 << 20

# The version of an object, and its content.
_Fetched = tuple[str, bytes]


class Fetching:
    """Fetcher of whole objects, which prefetches expected ones on threads.

    Args:
        keep: number of objects that stay in memory after they are read.
    """

    def __init__(self, keep: int = 4) -> None:
        self.keep = keep
        self._pool: ThreadPoolExecutor | None = None
        self._coming: dict[RemotePath, Future[_Fetched]] = {}

    def expect(self, sizes: Mapping[RemotePath, int]) -> None:
        """Start to prefetch these objects (with their sizes in bytes), in this order; drop earlier expectations."""
        for path in [path for path in self._coming if path not in sizes]:
            self._coming.pop(path).cancel()
        waiting = 0
        for path, size in sizes.items():
            if waiting and waiting + size > _AHEAD:
                return
            waiting += size
            if path not in self._coming:
                try:
                    self._pool = self._pool or ThreadPoolExecutor(_THREADS, "padiff-fetch")
                    self._coming[path] = self._pool.submit(_fetched, path)
                except RuntimeError:  # the interpreter is ending, and starts no new threads
                    return

    def fetch(self, path: RemotePath) -> _Fetched:
        """Return the version and content of an object, which is fetched now unless it was prefetched.

        Raises:
            OSError: the store does not return the object.
        """
        coming = self._coming.pop(path, None)
        if not self._coming and self._pool is not None:
            # End the threads once nothing is expected: a report may keep the run, and with it this object, for long.
            self._pool.shutdown(wait=False)
            self._pool = None
        if coming is not None and not coming.cancel():
            try:
                return coming.result()
            except OSError:
                pass  # the error may be outdated: fetch again
        return _fetched(path)


def _fetched(path: RemotePath) -> _Fetched:
    version = path.store.version(path.key)  # read before the content, so that a write in between is noticed later
    return version, path.read_bytes()


class Fetched(ArrayFile):
    """A file of arrays in a store, held in memory while it is read; its arrays are views of that memory.

    Args:
        path: the object.
        recent: the objects in memory, oldest first. After an object was dropped from memory, its tensors are fetched
            one by one.
        fetching: the prefetching of the run.
    """

    __slots__ = ("_content", "_fetching", "_object", "_version")

    def __init__(self, path: RemotePath, recent: deque[ArrayFile], fetching: Fetching) -> None:
        super().__init__(path, recent)
        self._object, self._fetching, self._version = path, fetching, ""
        self._content: bytes | None = None

    def array(self, place: Place) -> np.ndarray:
        """Return an array as a read-only view of the object's memory.

        Raises:
            OSError: the store does not return the object.
            ValueError: the object was written again, or is shorter than expected.
        """
        path, content = self._object, self._content
        if content is None and self._version:
            if path.store.version(path.key) != self._version:
                raise ValueError("the step was recorded again")
            data, start = path.store.get_range(path.key, place.start, place.start + place.size), 0
        else:
            data, start = self._whole(), place.start
        if len(data) < start + place.size:
            raise ValueError("the object was cut off")
        return np.frombuffer(data, place.dtype, math.prod(place.shape), start).reshape(place.shape)

    def close(self) -> None:
        self._content = None

    def _parsed(self) -> tuple[dict[str, str], dict[str, Place]]:
        data = self._whole()
        return parse_header(len(data), lambda start, size: data[start : start + size])

    def _whole(self) -> bytes:
        content = self._content
        if content is None:
            version, content = self._fetching.fetch(self._object)
            if self._version not in ("", version):
                raise ValueError("the step was recorded again")
            self._version, self._content = version, content
            self._recent.append(self)
            while len(self._recent) > self._fetching.keep:
                self._recent.popleft().close()
        return content


class _Shared:
    """A cache of the files of shared tensors. They are named after their content, so none gets outdated."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[RemotePath, bytes] = OrderedDict()

    def read(self, path: RemotePath) -> bytes:
        with self._lock:
            content = self._held.get(path)
            if content is not None:
                self._held.move_to_end(path)
                return content
        data = path.read_bytes()
        with self._lock:
            self._held[path] = data
            while len(self._held) > 1 and sum(map(len, self._held.values())) > _SHARED:
                self._held.popitem(last=False)
        return data


shared = _Shared()
