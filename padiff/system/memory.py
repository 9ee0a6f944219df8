"""How much memory there is to take."""

from __future__ import annotations

import contextlib
from pathlib import Path

_SYSTEM = Path("/proc/meminfo")
# Of a container: its limit, and what it uses already.
_CONTAINER = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


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
