"""Tries the hypotheses that apply to a first diff, and says which explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff.compare.diagnose.hypotheses import (
    clipping,
    data,
    detaching,
    gradients,
    loss_code,
    optimizers,
    outputs,
    rewritten,
    start,
    statistics,
    written,
)
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis
from padiff.compare.diagnose.hypotheses.proof import (
    NEAR,
    Weight,
    evidence,
    explains,
    is_likely,
    weigh,
)
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.records import Cause

#: A group of hypotheses: those that apply to a scene, the simplest first. A cause that is recorded as such needs no
#: computing, and ends the search.
Group = Callable[[Scene], Iterable["Hypothesis | Cause"]]

#: The groups that apply to a first diff, by its stage.
GROUPS: Mapping[str, tuple[Group, ...]] = {
    "input": (data.hypotheses,),
    "weight": (
        start.hypotheses,
        statistics.hypotheses,
        written.hypotheses,
        optimizers.hypotheses,
        written.unrecorded,
    ),
    "forward": (rewritten.hypotheses, outputs.hypotheses),
    "loss": (loss_code.hypotheses, gradients.backward_hypotheses),
    "backward": (loss_code.hypotheses, gradients.backward_hypotheses, detaching.causes),
    "grad": (clipping.hypotheses, gradients.hypotheses, detaching.causes),
    "update": (optimizers.hypotheses,),
}
# Residuals of two that explain equally: one is not nearer than the other by more than chance.
_EQUAL = 1.5


@dataclass(frozen=True)
class Tried:
    """A hypothesis, and how well it explains what was recorded."""

    hypothesis: Hypothesis
    weight: Weight

    @property
    def explains(self) -> bool:
        return explains(self.weight, self.hypothesis)

    @property
    def proven(self) -> bool:
        return self.explains and self.hypothesis.telling

    @property
    def likely(self) -> bool:
        return is_likely(self.weight, self.hypothesis)

    @property
    def cost(self) -> tuple[int, int]:
        """How much it assumes."""
        return self.hypothesis.changes, self.hypothesis.free


@dataclass(frozen=True)
class Finding:
    """What came of all that was tried.

    Attributes:
        cause: what explains the first diff; `None` if nothing does.
        excluded: what was tried and does not, by name.
    """

    cause: Cause | None = None
    excluded: tuple[str, ...] = ()


def explain(scene: Scene) -> Finding:
    """Try all hypotheses that apply to a scene's first diff."""
    tried: list[Tried] = []
    recorded: Cause | None = None
    # A hypothesis that is far off may divide by zero; that it explains nothing is all there is to it.
    with np.errstate(all="ignore"):
        for group in GROUPS.get(scene.stage, ()):
            try:
                recorded = _tried(group(scene), tried)
            except Exception:
                continue  # tensors that are no longer there explain nothing; the verdict stands whatever one meets
            # Beside what is other in the code, how its outcome differs is no news.
            if recorded is not None or any(one.hypothesis.code and one.explains for one in tried):
                break
    return _finding(tried, recorded)


def explained(hypotheses: Iterable[Hypothesis]) -> Finding:
    """Try some hypotheses, whatever applies to a scene."""
    tried: list[Tried] = []
    with np.errstate(all="ignore"):
        recorded = _tried(hypotheses, tried)
    return _finding(tried, recorded)


def _tried(hypotheses: Iterable[Hypothesis | Cause], tried: list[Tried]) -> Cause | None:
    """Try some hypotheses one after the other; a cause that is recorded as such ends it."""
    for one in hypotheses:
        if isinstance(one, Cause):
            return one
        # What assumes more is not looked at once something simpler explains it.
        if any(known.explains and known.cost[0] < one.changes for known in tried):
            return None
        tried.append(Tried(one, weigh(one.predict())))
    return None


def _finding(tried: Sequence[Tried], recorded: Cause | None = None) -> Finding:
    """What came of what was tried; else what is recorded as such."""
    # A simpler one that explains as much stands before one that tells more.
    best = _best([one for one in tried if one.explains])
    if not best and recorded is None:
        best = _best([one for one in tried if one.likely])
    names = [one.hypothesis.name for one in tried if one not in best and one.hypothesis.changes == 1]
    excluded = tuple(dict.fromkeys(name for name in names if name not in {one.hypothesis.name for one in best}))
    if not best:
        return Finding(None if recorded is None else replace(recorded, excluded=excluded), excluded)
    first, *others = best
    # Of two that explain it equally, neither is proven.
    proven = first.proven and not others
    text = "; or, which explains it as well: ".join(one.hypothesis.sentence for one in best)
    shown = evidence(first.weight, first.hypothesis)
    cause = Cause(first.hypothesis.kind, text, proven, shown, first.hypothesis.fix, () if proven else excluded)
    return Finding(cause, excluded)


def _best(some: Sequence[Tried]) -> list[Tried]:
    """Those that explain most, of these those that assume least."""
    if not some:
        return []
    least = min(max(one.weight.residual, NEAR if one.explains else 0.0) for one in some)
    nearest = [one for one in some if max(one.weight.residual, NEAR if one.explains else 0.0) <= _EQUAL * least]
    cost = min(one.cost for one in nearest)
    found = [one for one in nearest if one.cost[0] == cost[0]]
    found = [one for one in found if one.hypothesis.code] or found
    # That something is scaled is no cause beside one that says by what, with less solved for.
    said = [one for one in found if one.hypothesis.telling]
    found = [one for one in found if one in said or all(one.cost <= other.cost for other in said)]
    kept: list[Tried] = []
    for one in sorted(found, key=lambda one: one.cost):
        # Of what says the same, or a part of it, the first is reported.
        if not any(_says_as_much(known, one) for known in kept):
            kept.append(one)
    return kept[:3]


def _says_as_much(known: Tried, other: Tried) -> bool:
    parts = [{*one.hypothesis.kind.split("+")} for one in (known, other)]
    return parts[0] >= parts[1] or parts[1] >= parts[0]
