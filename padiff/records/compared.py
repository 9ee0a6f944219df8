"""Results of a comparison: pairs, figures and diffs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from padiff.records.both import SIDES, Both
from padiff.records.frozen import fast_frozen_init
from padiff.records.judgement import SUSPICIOUS, Figure, Grade, Judgement, Problem, Rule
from padiff.records.layout import SAME, Layout
from padiff.records.recorded import Record

#: Scales of a pair that is compared without scaling.
UNSCALED = Both(1.0, 1.0)
_ZEROS = Both(0.0, 0.0)


@fast_frozen_init
@dataclass(frozen=True, slots=True)
class Pair:
    """Two records that stand for the same quantity; one side may be missing.

    Attributes:
        step: the step's number.
        reference, candidate: the records; `None` if that side has none.
        layout: conversion of the candidate's values to the reference's layout.
        scales: divisors of each side's values before the comparison (loss scaling).
        optional: True if a missing side is no diff: a buffer that only one model has.
        derived: True for an input that is computed from an output of a recorded layer; it is judged like an output.
        anchor: the record that names the pair: the reference's, or the candidate's if there is no other.
        stage: the stage of the anchor.
        complete: True if both sides are present.
    """

    step: int
    reference: Record | None
    candidate: Record | None
    layout: Layout = SAME
    scales: Both[float] = UNSCALED
    optional: bool = False
    derived: bool = False

    # Stored, as judging reads them a hundred times for each pair.
    anchor: Record = field(init=False, repr=False, compare=False)
    stage: str = field(init=False, repr=False, compare=False)
    complete: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        anchor = self.reference if self.reference is not None else self.candidate
        assert anchor is not None, "a pair has at least one side"
        set_ = object.__setattr__
        set_(self, "anchor", anchor)
        set_(self, "stage", anchor.stage)
        set_(self, "complete", self.reference is not None and self.candidate is not None)

    @property
    def sides(self) -> Both[Record | None]:
        """Return both records."""
        return Both(self.reference, self.candidate)


@dataclass(frozen=True, slots=True)
class Float64Reference:
    """Distances of both sides from the same step computed in float64.

    Attributes:
        errors: the relative L2 distance of each side.
        code: the side whose code was run in float64, ``reference`` or ``candidate``. An error in that side's code,
            unlike its rounding, is present in float64 too.
    """

    errors: Both[float]
    code: str

    @property
    def farther(self) -> str:
        """Return the side that is farther from float64; empty if both are equally far."""
        if self.errors.reference == self.errors.candidate:
            return ""
        return "reference" if self.errors.reference > self.errors.candidate else "candidate"

    @property
    def times(self) -> float:
        """Return the ratio of the larger distance to the smaller one; infinity if only the smaller one is 0, 1 if
        both are.
        """
        least, most = sorted(self.errors)
        return most / least if least > 0 else (1.0 if most == 0 else math.inf)

    @property
    def text(self) -> str:
        """Return the distances in words."""
        far = " and ".join(f"{error:.2g} from the {side}" for side, error in zip(SIDES, self.errors))
        return f"the {self.code}'s code in float64 is {far}"


@fast_frozen_init
@dataclass(frozen=True, slots=True)
class Figures:
    """Distances between two tensors, computed in float64 over the positions where both are finite.

    Attributes:
        max_abs: largest ``|c - r|``.
        max_rel: largest ``|c - r| / |r|`` over ``r != 0``.
        mean_abs: mean of ``|c - r|``.
        mean_reference: mean of ``|r|``.
        l2: ``||c - r||``.
        reference_l2, candidate_l2: ``||r||`` and ``||c||``.
        bulk_l2: ``||c - r||`` without its few largest elements (`measure` says how many); `None` if not computed.
        size: number of elements.
        index: position of ``max_abs``.
        values: the reference's and the candidate's value at ``index``.
        mismatched: number of elements beyond an elementwise tolerance (0 without such a tolerance).
        nonfinite: number of positions that are NaN or infinite on one side only, or unequally on both.
        overflowed: number of positions that are NaN or infinite on both sides, equal or not.
        basis: the measured values: ``tensors``, ``sketches`` (L2 norms are estimates, ``max_abs``, ``max_rel`` and
            ``mismatched`` lower bounds, ``mean_abs`` the root of the mean square), or ``moments`` (lower bounds).
        spread: relative standard deviation of ``l2``, if it is an estimate.
        third: distances of both sides from float64; `None` if not known.
        floor: the ``l2`` that rounding alone can cause, as measured (`padiff.records.floors`); `None` if not measured.
    """

    max_abs: float = 0.0
    max_rel: float = 0.0
    mean_abs: float = 0.0
    mean_reference: float = 0.0
    l2: float = 0.0
    reference_l2: float = 0.0
    candidate_l2: float = 0.0
    size: int = 0
    index: tuple[int, ...] = ()
    values: Both[float] = _ZEROS
    mismatched: int = 0
    nonfinite: int = 0
    overflowed: int = 0
    bulk_l2: float | None = None
    basis: str = "tensors"
    spread: float = 0.0
    floor: float | None = None
    third: Float64Reference | None = None

    @property
    def rel_l2(self) -> float:
        """Return ``||c - r|| / ||r||``; if the reference is all zeros, 0 or infinity."""
        if self.reference_l2 > 0:
            return self.l2 / self.reference_l2
        return 0.0 if self.l2 == 0 else float("inf")


@fast_frozen_init
@dataclass(frozen=True, slots=True)
class Diff:
    """A pair with its measured figures and its judgement.

    Attributes:
        pair: the records that were compared.
        figures: the measured distances; `None` if nothing could be measured (see ``problem``).
        passed: True if the tolerance policy accepts the pair.
        judgement: the judged figure, its limit, and the rule that set the limit; `None` before judging, and if there is
            nothing to judge.
        problem: the reason why the values could not be compared or are wrong at any tolerance, else `None`.
    """

    pair: Pair
    figures: Figures | None = None
    passed: bool = True
    judgement: Judgement | None = None
    problem: Problem | None = None

    @property
    def compared(self) -> bool:
        """Return True if both sides are present and could be measured."""
        return self.pair.complete and (self.figures is not None or not self.passed)

    @property
    def counts(self) -> bool:
        """Return True if the verdict counts the diff: it was compared, or a required side is missing."""
        return self.compared or not self.passed

    @property
    def excess(self) -> float:
        """Return the judged figure as a multiple of its limit; infinity for a problem, and beyond a limit of 0."""
        if self.judgement is not None:
            return self.judgement.excess
        return 0.0 if self.passed else float("inf")

    @property
    def floors(self) -> float | None:
        """Return the L2 distance as a multiple of the floor; `None` without a measured floor or a comparison."""
        figures = self.figures
        if figures is None or figures.floor is None or not self.compared:
            return None
        if not figures.floor:
            return 0.0 if figures.l2 == 0 else math.inf
        return figures.l2 / figures.floor

    @property
    def grade(self) -> Grade | None:
        """Return the grade of the diff; `None` if nothing was compared."""
        if not self.passed:
            return Grade.WRONG
        if not self.compared or self.figures is None:
            return None
        if self.figures.l2 == 0 and not self.figures.nonfinite:
            return Grade.EQUAL
        return Grade.SUSPICIOUS if (self.floors or 0.0) > SUSPICIOUS else Grade.NOISE

    def judged(self, passed: bool, figure: Figure, value: float, limit: float, rule: Rule) -> Diff:
        """Return the diff with a judgement. (`dataclasses.replace` would take longer than the judging.)"""
        return Diff(self.pair, self.figures, passed, Judgement(figure, value, limit, rule), self.problem)

    def __str__(self) -> str:
        return f"step {self.pair.step}  {self.pair.anchor.site}: {figures_text(self)}"

    def __repr__(self) -> str:
        return f"<Diff step {self.pair.step} {self.pair.anchor.site} {'passed' if self.passed else 'failed'}>"


def figures_text(diff: Diff) -> str:
    """Return the measured figures and the limit in words."""
    figures = diff.figures
    if diff.problem and (figures is None or not diff.compared):
        return str(diff.problem)
    if figures is None:
        return "not measured"
    text = f"{diff.problem}; " if diff.problem else ""
    if figures.basis == "tensors":
        text += f"max |diff| {figures.max_abs:.3g}, relative L2 {figures.rel_l2:.3g}"
    elif figures.basis == "moments":
        text += f"relative L2 at least {figures.rel_l2:.3g} (from norms and means: the layouts differ)"
    else:
        sure = f" +- {figures.spread:.0%}" if figures.spread else ""
        text += f"relative L2 {figures.rel_l2:.3g}{sure} (from sketches)"
    judged = diff.judgement
    if judged is not None and not diff.problem:
        if judged.limit > 0:
            text += f", {factor_text(judged.excess)} times the {judged.figure} allowed ({judged.limit:.2g})"
        else:
            text += f", where {judged.figure} has to be 0 (got {judged.value:.3g})"
    floors = diff.floors
    if floors is not None and not diff.problem and math.isfinite(floors):
        text += f"; {factor_text(floors)} times its floor"
    if figures.third is not None and not diff.problem:
        text += f"; {figures.third.text}"
    if figures.max_abs and figures.basis == "tensors":
        at = f" at {list(figures.index)}" if figures.index else ""
        text += f"; largest difference{at}: {_values_text(figures.values)}"
    return text


def _values_text(values: Both[float]) -> str:
    """Return both values with three digits, or as many as show that they differ."""
    for digits in range(3, 10):
        reference, candidate = f"{values.reference:.{digits}g}", f"{values.candidate:.{digits}g}"
        if reference != candidate:
            break
    return f"reference {reference}, candidate {candidate}"


def factor_text(number: float) -> str:
    """Return a factor with three digits: ``33.8``, ``17,500``."""
    if not math.isfinite(number) or number < 1000:
        return f"{number:.3g}"
    return f"{float(f'{number:.3g}'):,.0f}" if number < 1e9 else "more than a billion"
