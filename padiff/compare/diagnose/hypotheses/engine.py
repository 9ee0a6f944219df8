"""Trials of all hypotheses that apply to a first diff, and the choice of the one that explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff.compare.diagnose.hypotheses import (
    averages,
    batch_content,
    buffer_rows,
    clipping,
    code_edits,
    detaching,
    external_weight_write,
    gradients,
    half_weights,
    loss_code,
    loss_schedule,
    optimizers,
    outputs,
    start,
    statistics,
)
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis
from padiff.compare.diagnose.hypotheses.proof import (
    LIKELY,
    NEAR,
    Fit,
    evidence,
    explains,
    is_likely,
    is_vague,
    weigh,
)
from padiff.records import Cause, Rule

#: A group of hypotheses: a function that yields those that apply to a scene, the simplest first. A cause that is
#: recorded as such needs no computing, and ends the search.
Group = Callable[[DiffContext], Iterable["Hypothesis | Cause"]]

#: The groups that apply to a first diff, by its stage.
GROUPS: Mapping[str, tuple[Group, ...]] = {
    "input": (batch_content.hypotheses,),
    "weight": (
        start.hypotheses,
        averages.hypotheses,
        buffer_rows.hypotheses,
        statistics.hypotheses,
        external_weight_write.hypotheses,
        optimizers.hypotheses,
        external_weight_write.unrecorded,
    ),
    "forward": (loss_code.hypotheses, code_edits.hypotheses, outputs.hypotheses),
    "loss": (loss_code.hypotheses, loss_schedule.hypotheses, gradients.backward_hypotheses),
    "backward": (
        detaching.not_detached,
        loss_code.hypotheses,
        loss_schedule.hypotheses,
        gradients.backward_hypotheses,
        detaching.causes,
    ),
    "grad": (detaching.one_sided, clipping.hypotheses, gradients.hypotheses, detaching.causes),
    "update": (half_weights.hypotheses, optimizers.hypotheses),
}
# Largest ratio of the residuals of two equal explanations: a difference by chance.
_EQUAL = 1.5


@dataclass(frozen=True)
class Trial:
    """A hypothesis with its measurements against the record."""

    hypothesis: Hypothesis
    weight: Fit

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
        """Return the assumptions as numbers to sort by: the count of faults, then of numbers solved for."""
        return self.hypothesis.changes, self.hypothesis.free


@dataclass(frozen=True)
class Finding:
    """The result of the trials.

    Attributes:
        cause: the cause of the first diff; `None` if no hypothesis explains it.
        excluded: names of the hypotheses that were tried and do not explain it.
    """

    cause: Cause | None = None
    excluded: tuple[str, ...] = ()


def explain(scene: DiffContext) -> Finding:
    """Try all hypotheses that apply to a scene's first diff."""
    tried: list[Trial] = []
    recorded: Cause | None = None
    # A hypothesis that is far off may divide by zero; it then explains nothing, and needs no warning.
    with np.errstate(all="ignore"):
        for group in GROUPS.get(scene.stage, ()):
            try:
                recorded = _tried(group(scene), tried)
            except Exception:
                continue  # e.g. tensors were deleted; an error in a group never changes the verdict
            # After a difference in the code explains the diff, a description of its effect adds nothing.
            if recorded is not None or any(trial.hypothesis.code and trial.explains for trial in tried):
                break
    finding = _finding(tried, recorded)
    by_rows = any(diff.judgement is not None and diff.judgement.rule is Rule.CHOICES for diff in scene.step)
    return _unproven(finding, tried) if by_rows else finding


def _unproven(finding: Finding, tried: Sequence[Trial]) -> Finding:
    """Return the finding, not proven if rows that chose otherwise may stand for a number that its cause assumes."""
    cause = finding.cause
    if cause is None or not cause.proven:
        return finding
    vague = any(is_vague(t.weight, t.hypothesis) for t in tried if t.hypothesis.sentence == cause.sentence)
    return replace(finding, cause=replace(cause, proven=False)) if vague else finding


def trials(scene: DiffContext) -> list[Trial]:
    """Try every hypothesis that applies to a scene's first diff, also after one has explained it."""
    tried: list[Trial] = []
    with np.errstate(all="ignore"):
        for group in GROUPS.get(scene.stage, ()):
            try:
                for hypothesis in group(scene):
                    if not isinstance(hypothesis, Cause):
                        tried.append(Trial(hypothesis, weigh(hypothesis.predict())))
            except Exception:
                continue  # as in `explain`
    return tried


def explained(hypotheses: Iterable[Hypothesis]) -> Finding:
    """Try the given hypotheses, instead of the groups of a scene."""
    tried: list[Trial] = []
    with np.errstate(all="ignore"):
        recorded = _tried(hypotheses, tried)
    return _finding(tried, recorded)


def _tried(hypotheses: Iterable[Hypothesis | Cause], tried: list[Trial]) -> Cause | None:
    """Append a trial of each hypothesis to ``tried``; return a recorded cause as soon as one comes, else `None`."""
    for hypothesis in hypotheses:
        if isinstance(hypothesis, Cause):
            return hypothesis
        # Hypotheses that assume more faults are not tried once a simpler one explains the diff.
        if any(trial.explains and trial.cost[0] < hypothesis.changes for trial in tried):
            return None
        tried.append(Trial(hypothesis, weigh(hypothesis.predict())))
    return None


def _finding(tried: Sequence[Trial], recorded: Cause | None = None) -> Finding:
    """Return the cause that the trials show; else the recorded cause."""
    # Explanations come before likely causes, so that a simpler one is not hidden by a more detailed likely one.
    best = _best([trial for trial in tried if trial.explains])
    if not best and recorded is None:
        best = _best([trial for trial in tried if trial.likely])
    # A trial that removes most of the error is true of the diff, though it does not explain all of it.
    false = [trial for trial in tried if trial not in best and trial.weight.gain < LIKELY]
    names = [trial.hypothesis.name for trial in false if trial.hypothesis.changes == 1]
    excluded = tuple(dict.fromkeys(name for name in names if name not in {trial.hypothesis.name for trial in best}))
    if not best:
        return Finding(None if recorded is None else replace(recorded, excluded=excluded), excluded)
    first, *others = best
    # If two explain the diff equally, neither is proven.
    proven = first.proven and not others
    text = "; or, which explains it as well: ".join(trial.hypothesis.sentence for trial in best)
    shown = "; ".join(filter(None, (evidence(first.weight, first.hypothesis), first.hypothesis.lines_text)))
    try:
        fix = first.hypothesis.fix_line if proven or not first.hypothesis.code else ""
    except Exception:  # as in `explain`
        fix = ""
    cause = Cause(
        first.hypothesis.kind,
        text,
        proven,
        shown,
        fix,
        () if proven else excluded,
        first.hypothesis.lines,
        first.weight.residual,
    )
    return Finding(cause, excluded)


def _best(trials: Sequence[Trial]) -> list[Trial]:
    """Return at most three trials with the smallest residuals, and of these the ones that assume least."""
    if not trials:
        return []
    least = min(max(trial.weight.residual, NEAR if trial.explains else 0.0) for trial in trials)
    nearest = [
        trial for trial in trials if max(trial.weight.residual, NEAR if trial.explains else 0.0) <= _EQUAL * least
    ]
    cost = min(trial.cost for trial in nearest)
    candidates = [trial for trial in nearest if trial.cost[0] == cost[0]]
    candidates = [trial for trial in candidates if trial.hypothesis.code] or candidates
    # A bare scale is dropped beside a cause that names the reason with fewer numbers solved for.
    telling = [trial for trial in candidates if trial.hypothesis.telling]
    candidates = [
        trial for trial in candidates if trial in telling or all(trial.cost <= rival.cost for rival in telling)
    ]
    distinct: list[Trial] = []
    for trial in sorted(candidates, key=lambda trial: trial.cost):
        # Of trials whose kinds are equal or contained in each other, the first is reported.
        if not any(_says_as_much(better, trial) for better in distinct):
            distinct.append(trial)
    return distinct[:3]


def _says_as_much(first: Trial, second: Trial) -> bool:
    parts = [{*trial.hypothesis.kind.split("+")} for trial in (first, second)]
    return parts[0] >= parts[1] or parts[1] >= parts[0]
