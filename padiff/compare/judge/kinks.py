"""Whether a net has kinks: where rounding may move a value across one, a whole element of a gradient is another."""

from __future__ import annotations

import numpy as np

from padiff.compare.judge.limits import FEW_LOOK, SPARSE
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records.rows import TENSORS
from padiff.records.step_diffs import StepDiffs


def may_have_kinks(diffs: StepDiffs) -> bool:
    """Whether a step's layers, or functions, have kinks; or an activation gradient's error looks as if they had.

    What a model calls without a layer need not be recorded.
    """
    if diffs.sites.fact(SiteFacts).kinked:
        return True
    return bool(look_like_few(diffs.rows[diffs.known_places("backward")]).any())


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
