"""Updates that the reference's rule does not make of the candidate's own gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from padiff.compare.declared.optimizers import Optimizers
from padiff.compare.diagnose.aftermath.fault import Fault
from padiff.compare.diagnose.aftermath.same import families
from padiff.compare.diagnose.hypotheses import optimizers
from padiff.compare.diagnose.hypotheses.engine import explain
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis
from padiff.compare.diagnose.hypotheses.proof import explains, weigh
from padiff.compare.diagnose.hypotheses.scene import Place, Scene, place_of
from padiff.errors import PadiffError
from padiff.records import settings_at

# What some parameters may have for themselves; all else an optimizer has for all.
_OF_GROUPS = frozenset({"learning", "weight"})
# Hypotheses that are looked through for what the first cause speaks of.
_TRIED = 40


def own_fault(scene: Scene, among: Collection[Place] | None = None) -> Fault | None:
    """Of a step whose updates differ: what is proven to be wrong with the optimizer, whatever its gradients are.

    Args:
        scene: of the first diff.
        among: which parameters are looked at. Default: all.
    """
    wrong = [d for d in scene.diffs("update") if not d.passed and d.pair.complete]
    if among is not None:
        wrong = [d for d in wrong if place_of(d.pair) in among]
    if not wrong or any(side.source.sketched for d in wrong for side in d.pair.sides if side is not None):
        return None  # of sketches a few small parameters tell, which is too little
    kept = [d for d in scene.step if d.pair.stage != "update" or among is None or place_of(d.pair) in among]
    try:
        cause = explain(replace(scene, diff=wrong[0], step=kept, _pairs={})).cause
    except (PadiffError, OSError):
        return None
    if cause is None or not cause.proven or (among is not None and not families(cause) <= _OF_GROUPS):
        return None
    if cause.kind.count("+") > ("learning" in families(cause)):
        return None  # two settings together may explain what is neither
    return Fault(wrong[0], cause, kind="update")


def unexplained(scene: Scene) -> set[Place]:
    """Of a first diff that is an update: parameters that differ, and that its proven cause does not speak of."""
    wrong = {place_of(d.pair) for d in scene.diffs("update") if not d.passed and d.pair.complete}
    if not _has_groups(scene):
        return set()  # all parameters are set alike
    explained = _explained(scene)
    if explained is None or not explained:
        return set()
    return {place for place in wrong if f"{place[0]}/update/{place[1]}" not in explained}


def _has_groups(scene: Scene) -> bool:
    """Whether an optimizer has several groups of parameters."""
    sides = scene.sides(scene.number)
    if sides is None:
        return False
    settings = sides.zip(scene.runs).map(lambda side: settings_at(side[1].info.settings, side[0].settings))
    return max(len(Optimizers.of(side).groups) for side in settings) > 1


def _explained(scene: Scene) -> set[str] | None:
    """The sites of the tensors that the first proven hypothesis predicts."""
    try:
        with np.errstate(all="ignore"):
            for one in _some(scene):
                predictions = list(one.predict())
                if one.telling and explains(weigh(predictions), one):
                    return {prediction.site for prediction in predictions}
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None
    return None


def _some(scene: Scene) -> Iterator[Hypothesis]:
    for number, one in enumerate(optimizers.hypotheses(scene)):
        if number >= _TRIED:
            return
        yield one
