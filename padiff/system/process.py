"""This process: its command line, its memory, and its end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Seconds between two checks.
_LOOK = 1.0
# Number of prctl's option, from <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Start a thread that exits this process as soon as its parent has ended, even if the parent was killed.

    Args:
        parent: the parent's process id, passed by the parent because it may have ended already.
    """
    if os.name == "posix":
        threading.Thread(target=_watch, args=(parent,), name="padiff-parent", daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends, also after this process runs another program.

    Only Linux does; elsewhere the process goes on without its parent.

    Args:
        parent: the parent's process id, passed by the parent because it may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


# A word that a shell takes as it is; largest number of characters; and what a command does not show: absolute paths,
# and options whose value nobody else is to know.
_PLAIN, _LONGEST = re.compile(r"[A-Za-z0-9_.,=:+@%-][A-Za-z0-9_.,=:+@%/-]*"), 300
_PRIVATE = re.compile(r"[=:]/|token|secret|passw|key|credential|auth", re.IGNORECASE)


def command_text(words: Sequence[str]) -> str:
    """Return a script and its arguments as one line; empty if it is no script, or a word is not plain or is private."""
    text = " ".join(words)
    if not words or not words[0].endswith(".py") or len(text) > _LONGEST or _PRIVATE.search(text):
        return ""
    return text if all(map(_PLAIN.fullmatch, words)) else ""


_SYSTEM = Path("/proc/meminfo")
# Files with a container's memory limit and its present use.
_CONTAINER = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")

# Largest share of the free memory for one tensor: its partner needs as much, and measuring some more.
_LARGEST_SHARE = 0.4
# Tensors up to this size in bytes are not checked, as reading the free memory takes some 50 us.
_LARGE = 64 << 20


def available() -> int | None:
    """Return the number of bytes that can be allocated without swapping; `None` if the system does not report it."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _SYSTEM.read_text().splitlines() if line.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(path.read_text()) for path in _CONTAINER)
        limits.append(max(limit - used, 0))
    return min(limits, default=None)


def check_free(size: int) -> None:
    """Check that there is enough free memory to read a tensor of `size` bytes.

    Raises:
        ValueError: there is not enough free memory.
    """
    free = available() if size > _LARGE else None
    if free is not None and size > free * _LARGEST_SHARE:
        raise ValueError(f"it has {size:,} bytes, with {free:,} of memory free")


def new_memory(size: int) -> np.ndarray:
    """Return new memory of `size` bytes for one tensor.

    Raises:
        ValueError: there is not enough free memory.
        MemoryError: the allocation failed.
    """
    check_free(size)
    return np.empty(size, np.uint8)
