"""Memory that tensors are read into while they are measured, used again from pair to pair.

A large tensor's file could be mapped instead: but the kernel then enters each page into the process's tables and takes
it out again, which takes longer than copying the page. Measured, for two files of 4 MB that are in the page cache: 0.69
ms to map them and look at each page, 0.4 ms to read them into memory that is there.
"""

from __future__ import annotations

import threading

import numpy as np

from padiff.records import Both

# Bytes of the largest tensor that is read as a whole; larger ones are mapped. Chosen: both sides together are then no
# more than a processor's last cache holds.
_MOST = 16 << 20
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
