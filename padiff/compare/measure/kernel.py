"""One pass over two arrays, compiled by numba. Only `padiff.compare.measure.sums` imports this module.

Numba caches the compiled code beside this file or, if that folder is not writable, in the user's cache folder.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Elements of a block, which stay in the first-level cache until the second look at them.
_BLOCK = 1024
# Elements of a part of a block. Parts with a new largest error are searched element by element.
_PART = 64
# The compiler may reorder sums and fuse products, to compute several elements at once; it assumes nothing about NaN and
# infinity.
_ANY_ORDER = {"reassoc", "contract", "nsz"}


@njit(cache=True, nogil=True, fastmath=_ANY_ORDER)
def _block(reference, candidate, max_abs, max_rel):  # type: ignore[no-untyped-def]
    """Return the sums of a block, and True if some of its elements may have a larger error than all before."""
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
        # One comparison with the smaller limit, in float64 like the sums, is the fastest of several ways.
        least = min(max_abs, max_rel * size if size > 0.0 else max_abs)
        above |= error > least
    return squares, reference_squares, candidate_squares, sum_abs, sum_reference, above


@njit(cache=True, nogil=True, fastmath=_ANY_ORDER)
def _above(reference, candidate, max_abs, max_rel):  # type: ignore[no-untyped-def]
    """Return True if some elements of a part may have a larger error than all before."""
    above = False
    for k in range(reference.size):
        r, c = np.float64(reference[k]), np.float64(candidate[k])
        error, size = abs(c - r), abs(r)
        least = min(max_abs, max_rel * size if size > 0.0 else max_abs)
        above |= error > least
    return above


@njit(cache=True, nogil=True, error_model="numpy")
def one_pass(reference, candidate, max_abs, max_rel):  # type: ignore[no-untyped-def]
    """Return sums over two flat arrays of equal length and dtype (float32 or float64), and the largest errors.

    Args:
        max_abs, max_rel: the largest absolute and relative error so far.

    Returns:
        Sums of ``(c - r)**2``, ``r**2``, ``c**2``, ``|c - r|`` and ``|r|``; the largest ``|c - r|``, its first index
        (-1 if no error exceeds ``max_abs``), and the largest ``|c - r| / |r|``. A sum of squares is not finite if some
        value is not finite.
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
