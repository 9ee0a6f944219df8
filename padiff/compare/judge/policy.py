"""When a diff passes: what a policy is, and the fixed one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from padiff.compare.judge.drift import NONE, Drift
from padiff.compare.judge.losses import confirmed
from padiff.compare.judge.zero import is_nothing, noted, rounding_gradients
from padiff.errors import UsageError
from padiff.model import equivalents
from padiff.records import LOOP, PARAMETER_STAGES, Both, Diff, Figure, Figures, Kind, Problem, Rule
from padiff.records.step_diffs import StepDiffs

COMPARE_MODES = ("mean", "strict")


class Policy(Protocol):
    """Judges the measured diffs of one step."""

    @property
    def elementwise(self) -> tuple[float, float] | None:
        """``(atol, rtol)`` that `measure` has to count elements by, if any."""

    @property
    def in_context(self) -> bool:
        """Whether it judges a stage by others: all that is recorded is then measured, whatever is asked for."""

    @property
    def settings_count(self) -> bool:
        """Whether a hyper-parameter that differs between layers that ran is a diff even where every tensor passes."""

    def judge(self, diffs: Sequence[Diff], before: Drift = NONE) -> StepDiffs:
        """The same diffs in the same order, judged.

        They have to be those of one rank's step in causal order, as `padiff.pair.steps.pair_steps` gives them: what is
        allowed to one depends on what those before it were off.

        ``before`` says how far the runs had drifted apart in the step that was compared before this one.
        """

    def describe(self) -> str:
        """The policy in words."""


@dataclass(frozen=True)
class Tolerance:
    """One tolerance for everything, as the seeds have it.

    Args:
        atol, rtol: absolute and relative tolerance.
        mode: ``mean``: ``mean(|c - r|) <= atol + rtol * mean(|r|)``, the mean of the error, so that a permuted
            tensor does not pass; ``strict``: ``|c - r| <= atol + rtol * |r|`` for every element.

    A gradient that is rounding noise around a true value of zero (`padiff.compare.judge.zero`) passes, and is listed.

    Raises:
        UsageError: an unknown mode, a negative or non-finite tolerance.
    """

    atol: float = 1e-4
    rtol: float = 1e-7
    mode: str = "mean"

    def __post_init__(self) -> None:
        if self.mode not in COMPARE_MODES:
            raise UsageError(f"compare_mode is one of {', '.join(COMPARE_MODES)}, got {self.mode!r}")
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 <= value < math.inf):
                raise UsageError(f"{name} has to be a number of at least 0, got {value!r}")
            object.__setattr__(self, name, float(value))  # not numpy's, whose answers are no plain booleans

    @property
    def elementwise(self) -> tuple[float, float] | None:
        return (self.atol, self.rtol)

    @property
    def in_context(self) -> bool:
        return False

    @property
    def settings_count(self) -> bool:
        return False  # who gives a tolerance says what counts as equal

    def judge(self, diffs: Sequence[Diff], before: Drift = NONE) -> StepDiffs:
        step = StepDiffs.of(diffs)
        rounding = step.measured_fact(rounding_gradients).tolist()
        alone = [self._judge(diff) for diff in step]
        found = [noted(diff) if noise and not diff.passed else diff for diff, noise in zip(alone, rounding)]
        return judged_together(step.replaced(found))

    def passes(self, figures: Figures) -> bool:
        """Whether two tensors, measured with `elementwise`, are within the tolerance."""
        if self.mode == "mean":
            return figures.mean_abs <= self.atol + self.rtol * figures.mean_reference
        return figures.mismatched == 0

    def _judge(self, diff: Diff) -> Diff:
        if diff.problem or diff.figures is None:
            return diff
        figures = diff.figures
        passed = self.passes(figures)
        if self.mode == "mean":
            limit = self.atol + self.rtol * figures.mean_reference
            return diff.judged(passed, Figure.MEAN_ABS, figures.mean_abs, limit, Rule.TOLERANCE)
        limit = self.atol + self.rtol * abs(figures.values.reference)
        if figures.mismatched and figures.max_abs <= limit:
            # The largest error is within its own element's limit; smaller ones, at smaller elements, are not.
            return diff.judged(False, Figure.MISMATCHED, float(figures.mismatched), 0.0, Rule.TOLERANCE)
        return diff.judged(passed, Figure.MAX_ABS, figures.max_abs, limit, Rule.TOLERANCE)

    def describe(self) -> str:
        return f"{self.mode}, atol {self.atol:g}, rtol {self.rtol:g}"


def judged_together(diffs: StepDiffs) -> StepDiffs:
    """What can be said of a step's diffs, judged one by one, only with a look at the others."""
    return _missing_fail(_overflows_pass(confirmed(diffs)))


def _overflows_pass(diffs: StepDiffs) -> StepDiffs:
    """Where a gradient has overflowed on both sides, what becomes of it in the layers before is no diff.

    A scaler skips such a step. A ReLU's backward keeps NaN back in one framework, as it chooses, and lets it pass in
    the other, where it multiplies.
    """
    if not diffs.rows["overflowed"].any():
        return diffs
    found, overflowed = [], False
    for diff in diffs:
        figures = diff.figures
        if diff.pair.stage in ("backward", "grad", "update") and figures is not None:
            if overflowed and figures.nonfinite:
                problem = Problem(Kind.NONFINITE, f"{diff.problem}; gradients had overflowed on both")
                diff = replace(diff, passed=True, problem=problem)
            overflowed = overflowed or figures.overflowed > 0
        found.append(diff)
    return diffs.replaced(found)


def _missing_fail(diffs: StepDiffs) -> StepDiffs:
    """A parameter, gradient or update that only one of two paired layers has is a diff, not a gap.

    Whether the layers are paired shows in the pair's neighbours; a stage that one side did not record at all
    (a dump of weights only) is a gap.
    """
    sites = diffs.sites
    if sites.complete.all():
        return diffs
    recorded: Both[set[str]] = Both(
        *({s for s, d in zip(sites.stages, side) if d is not None} for side in sites.dtypes)
    )
    compared = np.flatnonzero(diffs.compared).tolist()
    paired = Both({sites.layers[place] for place in compared}, {sites.candidates[place][0] for place in compared})
    failed = []
    for place in np.flatnonzero(~sites.complete).tolist():
        diff = diffs[place]
        record, alone = diff.pair.anchor, diff.pair.candidate is None
        layers, stages = (paired.reference, recorded.candidate) if alone else (paired.candidate, recorded.reference)
        if (
            not diff.pair.optional
            and record.stage in PARAMETER_STAGES
            and record.layer in layers
            and record.layer != LOOP
            and record.slot not in equivalents.ONE_SIDED
            and record.stage in stages
            and not is_nothing(diff)
        ):
            failed.append(place)
    return diffs.passing(failed, False)
