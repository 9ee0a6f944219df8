"""What a launcher of several processes says to each of them."""

from __future__ import annotations

import os


def launched(rank: str, world_size: str) -> tuple[int, int]:
    """The number of this process and how many there are, from two environment variables; 0 of 1 without both."""
    try:
        found = int(os.environ[rank]), int(os.environ[world_size])
    except (KeyError, ValueError):
        return 0, 1
    return found if 0 <= found[0] < found[1] else (0, 1)
