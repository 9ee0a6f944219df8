"""Trials of all hypotheses that apply to a first diff, the choice of one, and the share that an edit explains."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff.compare.diagnose.hypotheses import (
    averages,
    batch_content,
    clipping,
    code_edits,
    gradients,
    loss_code,
    loss_schedule,
    missing_gradient,
    optimizers,
    outputs,
    unowned_weights,
)
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.hypothesis import (
    LIKELY,
    NEAR,
    Fit,
    Hypothesis,
    evidence,
    explains,
    is_likely,
    is_vague,
    weigh,
)
from padiff.records import Cause, Rule
from padiff.records.diagnostic import named_at

#: A group of hypotheses: a function that yields those that apply to a scene, the simplest first. A cause that is
#: recorded as such needs no computing, and ends the search.
Group = Callable[[DiffContext], Iterable["Hypothesis | Cause"]]

#: The groups that apply to a first diff, by its stage.
GROUPS: Mapping[str, tuple[Group, ...]] = {
    "input": (code_edits.hypotheses, batch_content.hypotheses),
    "weight": (
        unowned_weights.start_hypotheses,
        averages.hypotheses,
        unowned_weights.row_hypotheses,
        unowned_weights.statistic_hypotheses,
        unowned_weights.write_hypotheses,
        optimizers.hypotheses,
        unowned_weights.unrecorded,
    ),
    "forward": (
        loss_code.hypotheses,
        code_edits.hypotheses,
        averages.within_step,
        unowned_weights.clamped_within_step,
        outputs.hypotheses,
    ),
    "loss": (clipping.while_scaled, loss_code.hypotheses, loss_schedule.hypotheses, gradients.backward_hypotheses),
    "backward": (
        missing_gradient.not_detached,
        clipping.while_scaled,
        loss_code.unreduced_mean,
        loss_code.hypotheses,
        loss_schedule.hypotheses,
        gradients.backward_hypotheses,
        missing_gradient.detach_causes,
        loss_code.unreduced,
    ),
    "grad": (
        missing_gradient.one_sided,
        loss_code.gradient_hypotheses,
        clipping.hypotheses,
        loss_code.gradient_code,
        loss_code.hypotheses,
        gradients.hypotheses,
        missing_gradient.detach_causes,
        loss_code.gradient_besides,
    ),
    "update": (optimizers.half_weight_hypotheses, optimizers.hypotheses),
}
# An argument of a call, with its value.
_ARGUMENT = re.compile(r"\b([A-Za-z_]\w*)\s*=")
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
        first.hypothesis.values,
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


@dataclass(frozen=True)
class Explanation:
    """An edit that was computed.

    Attributes:
        kind, text, fix: the cause that the edit would remove, and the line of code; the line may be empty.
        share: share of the difference that the cause explains, 0 to 1: 1 minus the error that is left, over the error
            without it.
        remaining: error that is left, as a multiple of the rounding noise; `None` if nothing is explained.
        proven: True if what is left is rounding, and not by chance.
        without: error without the edit, in the same unit; `None` if not known.
        declared: True if the runs declare the difference, or the report proves it otherwise.
    """

    kind: str
    text: str
    fix: str
    share: float
    remaining: float | None
    proven: bool
    without: float | None = None
    declared: bool = False


def explanations(scene: DiffContext, cause: Cause | None = None) -> list[Explanation]:
    """Return every edit that applies to a scene's first diff, the one that explains most first.

    Args:
        scene: the first diff, and the records around it.
        cause: the cause that the report names; its fix is that of an explanation without one, of the same kind or
            about the same argument. If a computation of its own has proven it, it is an explanation itself.
    """
    answers = [_explanation(trial) for trial in trials(scene)]
    is_new = cause is not None and not any(each.proven and each.text == cause.sentence for each in answers)
    if is_new and cause is not None and cause.proven and cause.remaining is not None:
        # The limit is at least the rounding noise, so this is the smallest share.
        share = max(0.0, 1.0 - cause.remaining / max(scene.diff.excess, 1.0))
        answers.append(Explanation(cause.kind, cause.sentence, cause.fix, share, cause.remaining, True))
    if cause is not None and cause.fix:
        fix = cause.fix
        names = _ARGUMENT.findall(fix)
        for k, each in enumerate(answers):
            is_named = any(named_at(f"{each.kind} {each.text}".replace("_", " "), name) is not None for name in names)
            if not each.fix and (each.kind == cause.kind or is_named):
                answers[k] = replace(each, fix=fix)
    return sorted(answers, key=lambda each: (not each.proven, -each.share))


def _explanation(trial: Trial) -> Explanation:
    weight, hypothesis = trial.weight, trial.hypothesis
    known = math.isfinite(weight.residual) and weight.without > 0
    share = max(0.0, 1.0 - weight.residual / weight.without) if known else 0.0
    try:
        fix = hypothesis.fix_line
    except Exception:  # a fix that has to be computed from tensors that are gone
        fix = ""
    return Explanation(
        hypothesis.kind,
        hypothesis.sentence,
        fix,
        share,
        weight.residual if known else None,
        trial.proven,
        weight.without if known else None,
    )
