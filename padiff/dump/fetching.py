"""Fetching objects of a store: those that are read next are on their way while one is looked at."""

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
from padiff.records import Room
from padiff.system.memory import new_memory

#: Objects that are fetched at the same time.
_THREADS = 4
#: Bytes that may wait for their reader, beside the object that comes first: memory stays limited.
_AHEAD = 256 << 20
#: Bytes of shared tensors that are kept: each step refers to the same ones.
_SHARED = 256 << 20

# An object, and which version of it.
_Fetched = tuple[str, bytes]


class Fetching:
    """Fetches whole objects, some of them before they are asked for.

    Args:
        keep: how many objects that were read stay in memory.
    """

    def __init__(self, keep: int = 4) -> None:
        self.keep = keep
        self._pool: ThreadPoolExecutor | None = None
        self._coming: dict[RemotePath, Future[_Fetched]] = {}

    def expect(self, sizes: Mapping[RemotePath, int]) -> None:
        """What will be read next, in this order, and how many bytes each has; what was expected before is let go."""
        for path in [path for path in self._coming if path not in sizes]:
            self._coming.pop(path).cancel()
        waiting = 0
        for path, size in sizes.items():
            if waiting and waiting + size > _AHEAD:
                return
            waiting += size
            if path not in self._coming:
                self._pool = self._pool or ThreadPoolExecutor(_THREADS, "padiff-fetch")
                self._coming[path] = self._pool.submit(_fetched, path)

    def take(self, path: RemotePath) -> _Fetched:
        """A version and the object, fetched now where it was not expected.

        Raises:
            OSError: the store does not give it.
        """
        coming = self._coming.pop(path, None)
        if not self._coming and self._pool is not None:
            # What was begun is ended, and the threads with it: a report that is kept keeps the run.
            self._pool.shutdown(wait=False)
            self._pool = None
        if coming is not None and not coming.cancel():
            try:
                return coming.result()
            except OSError:
                pass  # some time has gone by: once more
        return _fetched(path)


def _fetched(path: RemotePath) -> _Fetched:
    version = path.store.version(path.key)  # before: what is put again in between is noticed later
    return version, path.read_bytes()


class Fetched(ArrayFile):
    """An object of a store that is held in memory while it is read; arrays are views of it, and keep it.

    Args:
        path: the object.
        recent: objects that are held, the oldest first. One that was let go is not fetched again as a whole: each
            tensor that is asked for is.
        fetching: of the run.
    """

    __slots__ = ("_content", "_fetching", "_version")

    def __init__(self, path: RemotePath, recent: deque[ArrayFile], fetching: Fetching) -> None:
        super().__init__(path, recent)
        self._fetching, self._version = fetching, ""
        self._content: bytes | None = None

    def array(self, place: Place, room: Room = new_memory) -> np.ndarray:
        """As there; in no room: it is in memory as it is."""
        path, held = self._place, self._content
        if held is None and self._version:
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

    def let_go(self) -> None:
        self._content = None

    def _parsed(self) -> tuple[dict[str, str], Places]:
        data = self._whole()
        return parse_header(len(data), lambda start, size: data[start : start + size])

    def _whole(self) -> bytes:
        found = self._content
        if found is None:
            version, found = self._fetching.take(self._place)
            if self._version not in ("", version):
                raise ValueError("the step was recorded again")
            self._version, self._content = version, found
            self._recent.append(self)
            while len(self._recent) > self._fetching.keep:
                self._recent.popleft().let_go()
        return found

    @property
    def _place(self) -> RemotePath:
        assert isinstance(self.path, RemotePath)
        return self.path


class _Shared:
    """Shared tensors' files, the latest ones held. Each is named after its content, so none goes out of date."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[RemotePath, bytes] = OrderedDict()

    def read(self, path: RemotePath) -> bytes:
        with self._lock:
            found = self._held.get(path)
            if found is not None:
                self._held.move_to_end(path)
                return found
        data = path.read_bytes()
        with self._lock:
            self._held[path] = data
            while len(self._held) > 1 and sum(map(len, self._held.values())) > _SHARED:
                self._held.popitem(last=False)
        return data


shared = _Shared()
