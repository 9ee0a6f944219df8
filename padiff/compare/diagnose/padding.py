"""Cause of a diff in an embedding's parameter: the padding row, which only one run declares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, whole_of
from padiff.records import PARAMETER_STAGES, Cause

# The largest error of rows that count as equal, relative to the largest element.
_NEAR = 1e-4


def padding_cause(scene: DiffContext) -> Cause | None:
    """Return a cause if an embedding's parameter differs only in the row that one run declares as padding; else `None`.

    The padding row is zero at the start and gets no gradient.
    """
    pair = scene.diff.pair
    declared = [
        difference
        for difference in scene.declared
        if difference.kind == "layer_setting" and difference.name == "padding_idx"
    ]
    difference = next((difference for difference in declared if pair.anchor.layer in difference.layers.reference), None)
    if difference is None or pair.stage not in PARAMETER_STAGES or not pair.complete:
        return None
    sides = whole_of(pair)
    if sides is None or sides.reference.shape != sides.candidate.shape or sides.reference.ndim != 2:
        return None
    differs = np.abs(sides.reference - sides.candidate).max(axis=1) > _NEAR * np.abs(sides.reference).max()
    rows = set(np.flatnonzero(differs).tolist())
    if not rows or not rows <= {index for index in difference.values if isinstance(index, int)}:
        return None
    text = " and ".join(f"row {row}" for row in sorted(rows))
    return replace(
        difference.cause(), proven=True, evidence=f"only {text} of {len(differs)} differs, and that is the padding"
    )
