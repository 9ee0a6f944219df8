"""Ranks from the environment variables of a launcher of several processes."""

from __future__ import annotations

import os


def launched(rank: str, world_size: str) -> tuple[int, int]:
    """Return the rank of this process and the number of processes; ``(0, 1)`` if either variable is missing or invalid.

    Args:
        rank: the environment variable of the rank.
        world_size: the environment variable of the number of processes.
    """
    try:
        numbers = int(os.environ[rank]), int(os.environ[world_size])
    except (KeyError, ValueError):
        return 0, 1
    return numbers if 0 <= numbers[0] < numbers[1] else (0, 1)
