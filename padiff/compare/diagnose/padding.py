"""A row of an embedding that one run leaves out: its padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.hypotheses.scene import Scene, whole_of
from padiff.records import PARAMETER_STAGES, Cause

# As near as equal rows come to each other, relative to the largest element.
_NEAR = 1e-4


def padding_cause(scene: Scene) -> Cause | None:
    """That all of a first diff of an embedding's parameter is in the row that one run declares to be padding: it is
    zeros there at the start, and gets no gradient.
    """
    pair = scene.diff.pair
    declared = [one for one in scene.declared if one.kind == "layer_setting" and one.name == "padding_idx"]
    one = next((one for one in declared if pair.anchor.layer in one.layers.reference), None)
    if one is None or pair.stage not in PARAMETER_STAGES or not pair.complete:
        return None
    sides = whole_of(pair)
    if sides is None or sides.reference.shape != sides.candidate.shape or sides.reference.ndim != 2:
        return None
    off = np.abs(sides.reference - sides.candidate).max(axis=1) > _NEAR * np.abs(sides.reference).max()
    rows = set(np.flatnonzero(off).tolist())
    if not rows or not rows <= {index for index in one.values if isinstance(index, int)}:
        return None
    text = " and ".join(f"row {row}" for row in sorted(rows))
    return replace(one.cause(), proven=True, evidence=f"only {text} of {len(off)} differs, and that is the padding")
