"""How much memory there is to take, taking it for a tensor that is read, and what the C library does with it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

_SYSTEM = Path("/proc/meminfo")
# Of a container: its limit, and what it uses already.
_CONTAINER = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")

# Of the memory that is free, one tensor may take so much: its partner needs as much, and measuring some more.
_LARGEST_SHARE = 0.4
# Below this nobody asks how much is free, which takes some 50 us.
_LARGE = 64 << 20
# Bytes of a block that is just below the largest of which glibc learns (32 MB with what it notes of it).
_LEARNT = 31 << 20


def available() -> int | None:
    """Bytes that can be taken without anything being swapped out; `None` where the system does not say."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _SYSTEM.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(path.read_text()) for path in _CONTAINER)
        found.append(max(limit - used, 0))
    return min(found, default=None)


def check_free(size: int) -> None:
    """Make sure that one tensor of so many bytes can be read, before memory is taken for it.

    Raises:
        ValueError: it cannot.
    """
    free = available() if size > _LARGE else None
    if free is not None and size > free * _LARGEST_SHARE:
        raise ValueError(f"it has {size:,} bytes, with {free:,} of memory free")


def new_memory(size: int, _start: int = 0) -> np.ndarray:
    """So many bytes of new memory, for one tensor; wherever in a file they come from.

    Raises:
        ValueError: so much is not free.
        MemoryError: nor given.
    """
    check_free(size)
    return np.empty(size, np.uint8)


def keep_freed() -> None:
    """Have glibc keep freed memory for what is asked for next, up to 62 MB of it, as it does in any process that has
    freed a block of 31 MB: from then on it takes blocks up to that size from its heap, and gives back what is free at
    the end of that only where it is twice as much (M_MMAP_THRESHOLD in mallopt(3); who sets that himself is left with
    it). The block is never written to, so that it takes no memory.

    Whether gradients of some MB lie at the end of the heap, to be given back and taken anew in each step, is chance;
    whatever is allocated while a training runs moves them. Measured, ResNet-18 on the CPU: none to 13,800 page faults a
    step, of 2 us each, mostly more with a recorder than without; with this, next to none.
    """
    np.empty(_LEARNT, np.uint8)
