"""Rows of tables."""

from __future__ import annotations

import numpy as np


def looked_up(indices: np.ndarray, table: np.ndarray, zero: int | None = None) -> np.ndarray:
    """Rows of a table; those of one index may be zeros."""
    found = np.asarray(table[indices])
    return found if zero is None else np.where((indices == zero)[..., None], 0.0, found)
