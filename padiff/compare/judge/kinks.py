"""Whether a net has kinks: where rounding may move a value across one, a whole element of a gradient is another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from padiff.compare.judge.limits import FEW_LOOK, SPARSE
from padiff.model import equivalents
from padiff.records import Diff, Figures, Record, is_functional


def may_have_kinks(diffs: Sequence[Diff], backward: Sequence[Diff]) -> bool:
    """Whether a step's layers, or functions, have kinks; or an activation gradient's error looks as if they had.

    What a model calls without a layer need not be recorded.

    Args:
        diffs: of a step.
        backward: those of them that are of gradients of outputs.
    """
    for diff in diffs:
        pair = diff.pair
        if _has_kinks(pair.reference) or _has_kinks(pair.candidate):
            return True
    return any(looks_like_few(d.figures) for d in backward if d.compared and d.figures)


def _has_kinks(record: Record | None) -> bool:
    if record is None or record.stage != "forward":
        return False
    kind = record.slot.partition("()")[0] if is_functional(record.slot) else record.layer_type
    return equivalents.has_kinks(kind.lower())


def looks_like_few(figures: Figures) -> bool:
    """Whether an error is in few elements, as far as its norms tell: most of the others agree much better."""
    if not figures.l2 or not figures.size or not math.isfinite(figures.l2):
        return False
    if figures.bulk_l2 is not None and figures.bulk_l2 <= FEW_LOOK * figures.l2:
        return True
    if figures.basis != "tensors":
        return False
    # Of values of one size the mean is nearly the root of the mean square; of few among zeros it is far less.
    root = math.sqrt(figures.size)
    spread, own = figures.mean_abs * root / figures.l2, figures.mean_reference * root / (figures.reference_l2 or 1.0)
    return spread <= SPARSE * own
