"""Reading of a part of a file into memory.

Files are not mapped: if a mapped file becomes shorter, an access ends the process (SIGBUS), and no check beforehand
prevents that. A read returns an error instead.
"""

from __future__ import annotations

import os
import threading

import numpy as np

_lock = threading.Lock()


def read_into(descriptor: int, start: int, *parts: np.ndarray) -> None:
    """Fill contiguous byte arrays, one after the other, with a file's content from offset ``start`` on.

    Raises:
        ValueError: the file is too short.
        OSError: it cannot be read.
    """
    if hasattr(os, "preadv"):
        done = os.preadv(descriptor, [part.data for part in parts], start)
        if done == sum(part.size for part in parts):  # the usual case
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
    """Return ``size`` bytes of a file from offset ``start`` on.

    Raises:
        ValueError: the file is too short.
        OSError: it cannot be read.
    """
    if hasattr(os, "pread"):
        data = os.pread(descriptor, size, start)
        if len(data) == size:  # the usual case
            return data
    memory = np.empty(size, np.uint8)
    read_into(descriptor, start, memory)
    return memory.tobytes()


def _read(descriptor: int, start: int, memory: np.ndarray) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory.data], start)
    with _lock:  # Windows has no `preadv`: seek and read need a lock, as threads share the descriptor's position
        os.lseek(descriptor, start, os.SEEK_SET)
        data = os.read(descriptor, min(memory.size, 1 << 30))
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)
