"""Prefetching of objects from a store."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from padiff.dump.headers import Place, Places, parse_header
from padiff.dump.remote_path import RemotePath
from padiff.dump.safetensors import ArrayFile
from padiff.records import OutputBuffer
from padiff.system.memory import new_memory

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

    def array(self, place: Place, room: OutputBuffer = new_memory) -> np.ndarray:
        """Return an array as a read-only view of the object's memory; ``room`` is not used.

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

    def view(self, place: Place) -> np.ndarray:
        return self.array(place)

    def close(self) -> None:
        self._content = None

    def _parsed(self) -> tuple[dict[str, str], Places]:
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
