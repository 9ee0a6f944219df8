"""Protocol of policies, and the policy with a fixed tolerance."""

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
    """Rule that passes or fails the measured diffs of one step."""

    @property
    def elementwise(self) -> tuple[float, float] | None:
        """``(atol, rtol)`` for which the measurement must count mismatched elements, or `None`."""

    @property
    def in_context(self) -> bool:
        """True if the policy judges a stage by other stages: all records are measured then, also unreported ones."""

    @property
    def settings_count(self) -> bool:
        """True if a hyper-parameter that differs between layers that ran is a diff even if every tensor passes."""

    def judge(self, diffs: Sequence[Diff], before: Drift = NONE) -> StepDiffs:
        """Return the same diffs in the same order, judged.

        The diffs must be those of one rank's step in causal order, as `padiff.pair.steps.pair_steps` returns them: the
        limit of a diff depends on the errors of earlier diffs.

        Args:
            before: drift of the runs at the step that was compared before this one.
        """

    def describe(self) -> str:
        """Return the policy in words."""


class ByNoise:
    """Base of policies whose limits follow rounding noise, and which judge a stage by the stages before."""

    @property
    def elementwise(self) -> tuple[float, float] | None:
        return None

    @property
    def in_context(self) -> bool:
        return True

    @property
    def settings_count(self) -> bool:
        return True


@dataclass(frozen=True)
class Tolerance:
    """One fixed tolerance for all tensors.

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
            object.__setattr__(self, name, float(value))  # comparisons with numpy's floats return numpy's booleans

    @classmethod
    def from_options(cls, atol: float | None, rtol: float | None, mode: str | None) -> Tolerance | None:
        """Return the tolerance of a command's options; `None` if none is given.

        One bound alone sets the other one to 0; a mode alone has the default bounds.
        """
        if (atol, rtol, mode) == (None, None, None):
            return None
        has_bounds = atol is not None or rtol is not None
        return cls(
            atol=atol if atol is not None else (0.0 if has_bounds else cls.atol),
            rtol=rtol if rtol is not None else (0.0 if has_bounds else cls.rtol),
            mode=mode or cls.mode,
        )

    @property
    def elementwise(self) -> tuple[float, float] | None:
        return (self.atol, self.rtol)

    @property
    def in_context(self) -> bool:
        return False

    @property
    def settings_count(self) -> bool:
        return False  # with a tolerance the user defines equality

    def judge(self, diffs: Sequence[Diff], before: Drift = NONE) -> StepDiffs:
        step = StepDiffs.from_diffs(diffs)
        rounding = step.measured_fact(rounding_gradients).tolist()
        alone = [self._judge(diff) for diff in step]
        judged = [noted(diff) if noise and not diff.passed else diff for diff, noise in zip(alone, rounding)]
        return judged_together(step.replaced(judged))

    def passes(self, figures: Figures) -> bool:
        """Return True if two tensors, measured with `elementwise`, are within the tolerance."""
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
    """Return a step's individually judged diffs, corrected by rules that need the other diffs."""
    return _missing_fail(_overflows_pass(confirmed(diffs)))


def _overflows_pass(diffs: StepDiffs) -> StepDiffs:
    """Pass diffs of gradients behind a gradient that has overflowed on both sides.

    A scaler skips such a step. After an overflow the frameworks differ legitimately: a ReLU's backward blocks NaN in
    one framework, and multiplies by NaN in the other.
    """
    if not diffs.rows["overflowed"].any():
        return diffs
    result, overflowed = [], False
    for diff in diffs:
        figures = diff.figures
        if diff.pair.stage in ("backward", "grad", "update") and figures is not None:
            if overflowed and figures.nonfinite:
                problem = Problem(Kind.NONFINITE, f"{diff.problem}; gradients had overflowed on both")
                diff = replace(diff, passed=True, problem=problem)
            overflowed = overflowed or figures.overflowed > 0
        result.append(diff)
    return diffs.replaced(result)


def _missing_fail(diffs: StepDiffs) -> StepDiffs:
    """Fail a parameter, gradient or update that only one of two paired layers has.

    The pair's neighbours show that the layers are paired; a stage that one side did not record at all (a dump of
    weights only) is a gap.
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
