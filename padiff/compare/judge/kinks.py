"""Whether a net has kinks: where rounding may move a value across one, a whole element of a gradient is another."""

from __future__ import annotations

import numpy as np

from padiff.compare.judge.limits import FEW_LOOK, SPARSE
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records.block import Block
from padiff.records.rows import TENSORS


def may_have_kinks(block: Block) -> np.ndarray:
    """Whether each step's layers, or functions, have kinks; or an activation gradient's error looks as if they had.

    What a model calls without a layer need not be recorded.
    """
    if block.sites.fact(SiteFacts).kinked:
        return np.ones(len(block.rows), np.bool_)
    few = look_like_few(block.rows) & block.known
    return np.asarray(block.of_stage("backward", few).any(axis=-1))


def look_like_few(rows: np.ndarray) -> np.ndarray:
    """Which errors are in few elements, as far as their norms tell: most of the others agree much better."""
    l2, size = rows["l2"], rows["size"]
    known = (l2 != 0) & (size > 0) & np.isfinite(l2)
    few = rows["bulk_l2"] <= FEW_LOOK * l2  # false for NaN
    whole = rows["basis"] == TENSORS
    if not whole.any():
        return np.asarray(known & few)
    # Of values of one size the mean is nearly the root of the mean square; of few among zeros it is far less.
    root, reference = np.sqrt(size), rows["reference_l2"]
    with np.errstate(all="ignore"):
        spread = rows["mean_abs"] * root / l2
        own = rows["mean_reference"] * root / np.where(reference != 0, reference, 1.0)
    return np.asarray(known & (few | (whole & (spread <= SPARSE * own))))
