"""A pool of memory for copies of tensors, reused from step to step.

The kernel provides fresh memory page by page, which would take most of the time of recording. Copying into existing
pages is several times faster. So the buffers of a step return to the pool once the step is written.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from padiff.records import Step, arrays_of

# Smallest size in bytes of a pooled array: smaller ones come from the heap, which keeps its pages.
_SMALLEST = 1 << 16
# Bytes of a large piece from which buffers are cut, and the alignment of the buffers.
_PIECE, _ALIGNED = 32 << 20, 64


class _Buffer:
    """A piece of the pool's memory.

    A buffer is not an array: the ``base`` of a numpy view is the array at the bottom of all views, which would not lead
    back to this buffer.
    """

    __slots__ = ("__array_interface__", "_memory", "size")

    def __init__(self, memory: np.ndarray) -> None:
        self._memory, self.size = memory, memory.nbytes
        self.__array_interface__ = memory.__array_interface__


class ArrayPool:
    """A pool of arrays, which the loop's thread and the writer's thread may use at the same time.

    Attributes:
        keep: True to keep returned buffers. Set only while the next step is due soon, so that an idle recorder holds
            no memory.
    """

    def __init__(self) -> None:
        self.keep = False
        self._free: dict[int, list[_Buffer]] = defaultdict(list)
        self._piece: np.ndarray | None = None
        self._used = 0
        self._returned: list[_Buffer] = []
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialised C-contiguous array, like ``numpy.empty``."""
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
        """Return new memory, cut from a large piece: numpy requests huge pages there, which are allocated faster."""
        if size > _PIECE // 4:
            return _Buffer(np.empty(size, np.uint8))
        if self._piece is None or self._used + size > _PIECE:
            self._piece, self._used = np.empty(_PIECE, np.uint8), 0
        start, self._used = self._used, self._used + -(-size // _ALIGNED) * _ALIGNED
        return _Buffer(self._piece[start : start + size])

    def take_back(self, arrays: Iterable[np.ndarray]) -> None:
        """Return some of a step's arrays to the pool early; their memory is reused once the step is written."""
        with self._lock:
            self._returned += [buffer for array in arrays for buffer in _below(array)]

    def recycle(self, step: Step) -> None:
        """Return the buffers of a step to the pool, once the step is written and not used any more."""
        buffers = {id(b): b for array in arrays_of(step) for b in _below(array)}
        with self._lock:
            returned = [*buffers.values(), *self._returned]
            self._returned = []
            # Sizes that this step did not use are dropped (sequences of another length), so that the pool never holds
            # more memory than the current steps need.
            used = {buffer.size for buffer in returned}
            self._free = defaultdict(list, {size: free for size, free in self._free.items() if size in used})
            if not self.keep:
                self._free.clear()
                self._piece = None
                return
            for buffer in returned:
                self._free[buffer.size].append(buffer)

    def clear(self) -> None:
        """Free all memory of the pool."""
        with self._lock:
            self._free.clear()
            self._returned.clear()
            self._piece = None


def _below(array: np.ndarray) -> Iterator[_Buffer]:
    """Yield the buffer that an array is a view of, if any."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, _Buffer):
        yield base
