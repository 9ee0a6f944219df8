"""Row lookup in tables, as embeddings do."""

from __future__ import annotations

import numpy as np


def looked_up(indices: np.ndarray, table: np.ndarray, zero: int | None = None) -> np.ndarray:
    """Return the rows of a table at the indices; zeros for the index ``zero``, if set."""
    rows = np.asarray(table[indices])
    return rows if zero is None else np.where((indices == zero)[..., None], 0.0, rows)
