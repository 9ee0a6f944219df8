"""Detect nets with kinks, where rounding may move a value across a kink and change a gradient's whole element."""

from __future__ import annotations

import numpy as np

from padiff.compare.judge.limits import FEW_LOOK, SPARSE
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records.diff_rows import TENSORS
from padiff.records.step_batch import StepBatch


def may_have_kinks(block: StepBatch) -> np.ndarray:
    """Return a mask of the steps whose layers or functions have kinks, or whose activation gradients suggest kinks.

    Functions that a model calls outside of layers may be unrecorded; therefore the errors are checked, too.
    """
    if block.sites.fact(SiteFacts).kinked:
        return np.ones(len(block.rows), np.bool_)
    few = look_like_few(block.rows) & block.known
    return np.asarray(block.of_stage("backward", few).any(axis=-1))


def look_like_few(rows: np.ndarray) -> np.ndarray:
    """Return a mask of the errors that lie in few elements, judging by their norms."""
    l2, size = rows["l2"], rows["size"]
    is_known = (l2 != 0) & (size > 0) & np.isfinite(l2)
    few = rows["bulk_l2"] <= FEW_LOOK * l2  # false for NaN
    is_full = rows["basis"] == TENSORS
    if not is_full.any():
        return np.asarray(is_known & few)
    # The mean of equally large values is nearly their root mean square; of a few values among zeros it is far less.
    root, reference = np.sqrt(size), rows["reference_l2"]
    with np.errstate(all="ignore"):
        spread = rows["mean_abs"] * root / l2
        own_spread = rows["mean_reference"] * root / np.where(reference != 0, reference, 1.0)
    return np.asarray(is_known & (few | (is_full & (spread <= SPARSE * own_spread))))
