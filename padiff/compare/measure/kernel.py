"""One pass over two arrays, compiled by numba. Only `padiff.compare.measure.compiled` imports this.

Numba keeps what it compiled beside this file or, where it must not write there, in the user's cache folder.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Elements that are looked at at a time: they are still in the first cache when they are looked at again.
_BLOCK = 1024
# And of those, where some are off by more than any before: these are looked at one by one.
_PART = 64
# Sums may be added up in another order and products fused, so that several elements go at once; nothing is assumed of
# NaN and infinity.
_ANY_ORDER = {"reassoc", "contract", "nsz"}


@njit(cache=True, nogil=True, fastmath=_ANY_ORDER)
def _block(reference, candidate, max_abs, max_rel):  # type: ignore[no-untyped-def]
    """Sums of a block, and whether some of its elements are off by more than any before."""
    squares = reference_squares = candidate_squares = sum_abs = sum_reference = 0.0
    above = False
    for k in range(reference.size):
        r, c = np.float64(reference[k]), np.float64(candidate[k])
        error, size = abs(c - r), abs(r)
        squares += error * error
        reference_squares += r * r
        candidate_squares += c * c
        sum_abs += error
        sum_reference += size
        # One question, of the smaller limit, and its answer in float64 as all the rest: the fastest of several ways.
        least = min(max_abs, max_rel * size if size > 0.0 else max_abs)
        above |= error > least
    return squares, reference_squares, candidate_squares, sum_abs, sum_reference, above


@njit(cache=True, nogil=True, fastmath=_ANY_ORDER)
def _above(reference, candidate, max_abs, max_rel):  # type: ignore[no-untyped-def]
    """Return True if some elements of a part have a larger error than all before."""
    above = False
    for k in range(reference.size):
        r, c = np.float64(reference[k]), np.float64(candidate[k])
        error, size = abs(c - r), abs(r)
        least = min(max_abs, max_rel * size if size > 0.0 else max_abs)
        above |= error > least
    return above


@njit(cache=True, nogil=True, error_model="numpy")
def one_pass(reference, candidate, max_abs, max_rel):  # type: ignore[no-untyped-def]
    """Sums over two flat arrays of one length and dtype, float32 or float64, and their largest errors.

    Args:
        max_abs, max_rel: the largest so far.

    Returns:
        Sums of ``(c - r)**2``, ``r**2``, ``c**2``, ``|c - r|`` and ``|r|``; the largest ``|c - r|``, its first place
        (-1: it was above that before), and the largest ``|c - r| / |r|``. If some value is not finite, a sum of squares
        is not.
    """
    squares = reference_squares = candidate_squares = sum_abs = sum_reference = 0.0
    worst = -1
    for begin in range(0, reference.size, _BLOCK):
        end = min(begin + _BLOCK, reference.size)
        rs, cs = reference[begin:end], candidate[begin:end]
        block_sums = _block(rs, cs, max_abs, max_rel)
        squares += block_sums[0]
        reference_squares += block_sums[1]
        candidate_squares += block_sums[2]
        sum_abs += block_sums[3]
        sum_reference += block_sums[4]
        if not block_sums[5]:
            continue
        for part in range(begin, end, _PART):
            stop = min(part + _PART, end)
            if not _above(reference[part:stop], candidate[part:stop], max_abs, max_rel):
                continue
            for k in range(part, stop):
                size = abs(np.float64(reference[k]))
                error = abs(np.float64(candidate[k]) - np.float64(reference[k]))
                if error > max_abs:
                    max_abs, worst = error, k
                if size > 0.0 and error > max_rel * size:
                    max_rel = max(max_rel, error / size)
    return squares, reference_squares, candidate_squares, sum_abs, sum_reference, max_abs, worst, max_rel
