"""Memory that tensors are read into while they are measured, used again from pair to pair.

New memory for each tensor would be cleared by the kernel, page by page, before it is filled. Measured: two files of 256
MB that are in the page cache take 0.24 s to compare with memory that is there, and 0.41 s with new memory.
"""

from __future__ import annotations

import threading

import numpy as np

from padiff.records import Both

# Bytes of the largest tensor that is read into a room; a larger one gets memory of its own. Chosen: what stays taken
# for both sides is less than a framework takes.
_MOST = 64 << 20
# Rooms grow by so many bytes at least, lest each tensor that is a little larger makes a new one.
_LEAST = 1 << 20


class _Room:
    """Memory for one tensor, which lasts until the next one is asked for."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def __call__(self, size: int) -> np.ndarray | None:
        if size > _MOST:
            return None
        if size > self._memory.size:
            self._memory = np.empty(max(size, min(2 * self._memory.size, _MOST), _LEAST), np.uint8)
        return self._memory[:size]


class _Rooms(threading.local):
    """One for each side, of each thread."""

    def __init__(self) -> None:
        self.both = Both(_Room(), _Room())


_rooms = _Rooms()


def rooms() -> Both[_Room]:
    """This thread's rooms, for what is measured and let go before the next pair is."""
    return _rooms.both
