"""Memory for copies of tensors, used again from step to step.

Fresh memory for the copies is what recording would spend most of its time on: the kernel hands it out page by page.
Copying into pages that are there already is several times faster. So the buffers of a step come
back once it is written.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from padiff.records import Step, arrays_of

# Smaller arrays come from the heap anyway, which keeps its pages.
_SMALLEST = 1 << 16
# Bytes of a piece that smaller buffers are cut from, and what their starts are multiples of.
_PIECE, _ALIGNED = 32 << 20, 64


class _Buffer:
    """Memory of the pool's own. It is no array: numpy looks through an array that is a view to what is below it, and
    then nothing would lead from the arrays that are handed out back to this.
    """

    __slots__ = ("__array_interface__", "_memory", "size")

    def __init__(self, memory: np.ndarray) -> None:
        self._memory, self.size = memory, memory.nbytes
        self.__array_interface__ = memory.__array_interface__


class ArrayPool:
    """A pool of arrays, safe to use from the loop and the writer.

    Attributes:
        keep: whether buffers that come back are kept: only while the next step is due soon, so that a recorder
            that rests holds no memory.
    """

    def __init__(self) -> None:
        self.keep = False
        self._free: dict[int, list[_Buffer]] = defaultdict(list)
        self._piece: np.ndarray | None = None
        self._used = 0
        self._returned: list[_Buffer] = []
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An uninitialised C-contiguous array, as ``numpy.empty`` gives one."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALLEST:
            return np.empty(shape, dtype)
        with self._lock:
            waiting = self._free.get(size)
            buffer = waiting.pop() if waiting else None
            if buffer is None:
                buffer = self._carved(size)
        array: np.ndarray = np.asarray(buffer).view(dtype).reshape(shape)
        return array

    def _carved(self, size: int) -> _Buffer:
        """New memory, cut from a large piece: numpy asks for huge pages for those, and few large pages come faster."""
        if size > _PIECE // 4:
            return _Buffer(np.empty(size, np.uint8))
        if self._piece is None or self._used + size > _PIECE:
            self._piece, self._used = np.empty(_PIECE, np.uint8), 0
        start, self._used = self._used, self._used + -(-size // _ALIGNED) * _ALIGNED
        return _Buffer(self._piece[start : start + size])

    def take_back(self, arrays: Iterable[np.ndarray]) -> None:
        """Take back some of a step's memory before the step is written; it is given out again when that is done."""
        with self._lock:
            self._returned += [buffer for array in arrays for buffer in _below(array)]

    def recycle(self, step: Step) -> None:
        """Take back the buffers of a step that is written and that nobody looks at any more."""
        found = {id(b): b for array in arrays_of(step) for b in _below(array)}
        with self._lock:
            returned = [*found.values(), *self._returned]
            self._returned = []
            # Sizes that this step did not use are not wanted back (sequences of another length): what is
            # kept is never more than what the steps under way took.
            used = {buffer.size for buffer in returned}
            self._free = defaultdict(list, {size: free for size, free in self._free.items() if size in used})
            if not self.keep:
                self._free.clear()
                self._piece = None
                return
            for buffer in returned:
                self._free[buffer.size].append(buffer)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._free.clear()
            self._returned.clear()
            self._piece = None


def _below(array: np.ndarray) -> Iterator[_Buffer]:
    """The buffer that an array is a view of, if it is."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, _Buffer):
        yield base
