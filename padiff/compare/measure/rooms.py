"""Reusable read buffers for the tensors of a pair, one per side and thread.

New memory for each tensor would be cleared by the kernel, page by page, before it is filled. Measured: two files of 256
MB that are in the page cache take 0.24 s to compare with memory that is there, and 0.41 s with new memory.

Where it lies counts too: how far it is, within pages, behind the place in the file where the bytes come from. Measured
on an EPYC, 4 MB: 0.16 ms from 80 to 1,040 bytes behind, 0.19 ms at a multiple of 32 of these, 0.2 ms before it, 0.5 ms
at 24 bytes and 1.2 ms at 8.
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
# Bytes of a page; those that memory of all dtypes begins at a multiple of; and how far behind its origin it begins.
_PAGE, _ALIGNED, _BEHIND = 4096, 16, 272


class _Room:
    """Buffer for one tensor, valid until the next tensor is requested."""

    def __init__(self) -> None:
        self._memory, self._size, self._address = np.empty(0, np.uint8), 0, 0

    def __call__(self, size: int, start: int) -> np.ndarray | None:
        if size > _MOST:
            return None
        if size > self._size:
            self._size = max(size, min(2 * self._size, _MOST), _LEAST)
            self._memory = np.empty(self._size + _PAGE, np.uint8)
            self._address = self._memory.ctypes.data
        begin = ((start + _BEHIND) // _ALIGNED * _ALIGNED - self._address) % _PAGE
        return self._memory[begin : begin + size]


class _Rooms(threading.local):
    """Buffers of each thread, one per side."""

    def __init__(self) -> None:
        self.both = Both(_Room(), _Room())


_rooms = _Rooms()


def rooms() -> Both[_Room]:
    """Return this thread's buffers, for tensors that are released before the next pair is measured."""
    return _rooms.both
