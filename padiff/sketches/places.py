"""Positions and signs of a tensor's sample, the same in every run and for every library.

Signs and positions come from integer arithmetic in this module, so that no version of any library changes them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

#: Length of the projection.
BUCKETS = 61
#: Maximum length of a sample: 64 elements for each bucket, in 32 blocks. Longer blocks would cover fewer positions of
#: the tensor, shorter blocks cost more: memory is fetched in lines, and in order.
ELEMENTS = 3904
BLOCK = 122


@lru_cache(maxsize=1024)
def block_rows(size: int) -> tuple[int, np.ndarray]:
    """Return the start of the first block, and the numbers of the sampled blocks, ascending.

    Args:
        size: number of the tensor's elements, more than `ELEMENTS`.
    """
    count = ELEMENTS // BLOCK
    first = int(_random(1, size)[0] % np.uint64(size % BLOCK + 1))
    # One random block from each of equally long ranges.
    edges = np.arange(count + 1, dtype=np.int64) * (size // BLOCK) // count
    return first, edges[:-1] + (_random(count, size) % np.diff(edges).astype(np.uint64)).astype(np.int64)


@lru_cache(maxsize=256)
def places(size: int) -> np.ndarray:
    """Return the positions of the sampled elements, counted row by row."""
    if size <= ELEMENTS:
        return np.arange(size)
    first, rows = block_rows(size)
    return np.asarray(first + (rows[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1))


@lru_cache(maxsize=1)
def signs() -> np.ndarray:
    """Return the random sign, 1 or -1, of each element of a sample, in float32."""
    return np.where(_random(ELEMENTS, 0) & np.uint64(1 << 40), 1, -1).astype(np.float32)


def _random(count: int, seed: int) -> np.ndarray:
    """Return `count` 64-bit numbers: SplitMix64 (Steele, Lea and Flood 2014,
    https://doi.org/10.1145/2660193.2660195).
    """
    with np.errstate(over="ignore"):
        state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed) * np.uint64(count)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(state ^ (state >> np.uint64(31)))
