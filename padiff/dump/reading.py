"""Reading a part of a file into memory.

Nothing is mapped: a file that becomes shorter while it is mapped ends the process that looks at it (SIGBUS), and no
check beforehand prevents that. A read tells.
"""

from __future__ import annotations

import os
import threading

import numpy as np

_lock = threading.Lock()


def fill(descriptor: int, start: int, *parts: np.ndarray) -> None:
    """Fill parts of memory (bytes in a row), one after the other, with a file's content from a byte on.

    Raises:
        ValueError: the file ends before.
        OSError: it cannot be read.
    """
    if hasattr(os, "preadv"):
        done = os.preadv(descriptor, [part.data for part in parts], start)
        if done == sum(part.size for part in parts):  # as a rule
            return
    for part in parts:
        done = 0
        while done < part.size:
            read = _read(descriptor, start + done, part[done:])
            if not read:
                raise ValueError("the file was cut off")
            done += read
        start += part.size


def read(descriptor: int, start: int, size: int) -> bytes:
    """So many bytes of a file from one on.

    Raises:
        ValueError, OSError: as there.
    """
    if hasattr(os, "pread"):
        found = os.pread(descriptor, size, start)
        if len(found) == size:  # as a rule
            return found
    memory = np.empty(size, np.uint8)
    fill(descriptor, start, memory)
    return memory.tobytes()


def _read(descriptor: int, start: int, memory: np.ndarray) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory.data], start)
    with _lock:  # Windows has no such call: the place is the descriptor's, which threads share
        os.lseek(descriptor, start, os.SEEK_SET)
        found = os.read(descriptor, min(memory.size, 1 << 30))
    memory[: len(found)] = np.frombuffer(found, np.uint8)
    return len(found)
