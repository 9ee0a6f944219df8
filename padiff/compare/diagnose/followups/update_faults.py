"""Updates that differ from the reference's optimizer rule applied to the candidate's own gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from padiff.compare.declared.optimizers import Optimizers
from padiff.compare.diagnose.followups.fault import Fault
from padiff.compare.diagnose.followups.same_fault import families
from padiff.compare.diagnose.hypotheses import optimizers
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, Place, place_of
from padiff.compare.diagnose.hypotheses.engine import explain
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis
from padiff.compare.diagnose.hypotheses.proof import explains, weigh
from padiff.errors import PadiffError
from padiff.records import Cause, settings_at

# Families of causes that may concern a single parameter group; all others concern the whole optimizer.
_OF_GROUPS = frozenset({"learning", "weight"})
# The most hypotheses that are tried to find the parameters of the first cause.
_TRIED = 40


def own_fault(scene: DiffContext, among: Collection[Place] | None = None) -> Fault | None:
    """Return a proven fault of the optimizer that is independent of its gradients; `None` if there is none.

    Args:
        scene: the scene of the first diff, in a step whose updates differ.
        among: the parameters to check. Default: all.
    """
    wrong = [d for d in scene.diffs("update") if not d.passed and d.pair.complete]
    if among is not None:
        wrong = [d for d in wrong if place_of(d.pair) in among]
    if not wrong or any(side.source.sketched for d in wrong for side in d.pair.sides if side is not None):
        return None  # with sketches, only a few small parameters could be checked
    step_diffs = [d for d in scene.step if d.pair.stage != "update" or among is None or place_of(d.pair) in among]
    try:
        cause = explain(replace(scene, diff=wrong[0], step=step_diffs, _pairs={})).cause
    except (PadiffError, OSError):
        return None
    if cause is None or not cause.proven or (among is not None and not families(cause) <= _OF_GROUPS):
        return None
    if cause.kind.count("+") > ("learning" in families(cause)):
        return None  # two settings together may fit a diff that neither of them causes
    return Fault(wrong[0], cause, kind="update")


def unexplained(scene: DiffContext) -> set[Place]:
    """Return the parameters whose updates differ and that the proven cause of the first diff does not cover.

    Args:
        scene: the scene of a first diff that is an update.
    """
    wrong = {place_of(d.pair) for d in scene.diffs("update") if not d.passed and d.pair.complete}
    if not _has_groups(scene):
        return set()  # all parameters are set alike
    explained = _explained(scene)
    if explained is None or not explained:
        return set()
    return {place for place in wrong if f"{place[0]}/update/{place[1]}" not in explained}


def _has_groups(scene: DiffContext) -> bool:
    """Return True if an optimizer has several parameter groups."""
    sides = scene.sides(scene.number)
    if sides is None:
        return False
    settings = sides.zip(scene.runs).map(lambda side: settings_at(side[1].info.settings, side[0].settings))
    return max(len(Optimizers.from_settings(side).groups) for side in settings) > 1


def _explained(scene: DiffContext) -> set[str] | None:
    """Return the sites of the tensors that the first proven hypothesis predicts; `None` if none is proven."""
    try:
        with np.errstate(all="ignore"):
            for hypothesis in _some(scene):
                predictions = list(hypothesis.predict())
                if hypothesis.telling and explains(weigh(predictions), hypothesis):
                    return {prediction.site for prediction in predictions}
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None
    return None


def _some(scene: DiffContext) -> Iterator[Hypothesis]:
    for number, hypothesis in enumerate(optimizers.hypotheses(scene)):
        if number >= _TRIED or isinstance(hypothesis, Cause):
            return
        yield hypothesis
