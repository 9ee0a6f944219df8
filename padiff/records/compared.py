"""What a comparison makes of it: pairs, diffs, the report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from padiff.records.both import SIDES, Both
from padiff.records.frozen import quickly_made
from padiff.records.judgement import SUSPICIOUS, Figure, Grade, Judgement, Problem, Rule
from padiff.records.layout import SAME, Layout
from padiff.records.recorded import Record

#: Scales of what is compared as it is.
UNSCALED = Both(1.0, 1.0)
_ZEROS = Both(0.0, 0.0)


@quickly_made
@dataclass(frozen=True, slots=True)
class Pair:
    """Two records that stand for the same quantity; one side may be missing.

    Attributes:
        step: the step's number.
        reference, candidate: the records, `None` where that side has none.
        layout: how the candidate's values are brought into the reference's layout.
        scales: what each side's values are divided by before comparing (loss scaling).
        optional: whether it is no diff that a side is missing: a buffer that only one model keeps.
        anchor: the record that names the pair: the reference's, or the candidate's where it stands alone.
        stage: the anchor's.
        complete: whether both sides are there.
    """

    step: int
    reference: Record | None
    candidate: Record | None
    layout: Layout = SAME
    scales: Both[float] = UNSCALED
    optional: bool = False

    # Kept, as judging asks for them a hundred times for each pair.
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
        """Both records."""
        return Both(self.reference, self.candidate)


@dataclass(frozen=True, slots=True)
class Third:
    """How far both sides are from the step in float64.

    Attributes:
        errors: of each side, its relative L2 distance.
        code: whose code was run in float64, ``reference`` or ``candidate``: what is wrong with that side's code, and
            not with its rounding, is wrong in float64, too.
    """

    errors: Both[float]
    code: str

    @property
    def farther(self) -> str:
        """The side that is farther from it; empty: neither is."""
        if self.errors.reference == self.errors.candidate:
            return ""
        return "reference" if self.errors.reference > self.errors.candidate else "candidate"

    @property
    def times(self) -> float:
        """How many times as far the farther side is."""
        least, most = sorted(self.errors)
        return most / least if least > 0 else (1.0 if most == 0 else math.inf)

    @property
    def text(self) -> str:
        """It in words."""
        far = " and ".join(f"{error:.2g} from the {side}" for side, error in zip(SIDES, self.errors))
        return f"the {self.code}'s code in float64 is {far}"


@quickly_made
@dataclass(frozen=True, slots=True)
class Figures:
    """How far two tensors are apart, computed in float64 over positions where both are finite.

    Attributes:
        max_abs: largest ``|c - r|``.
        max_rel: largest ``|c - r| / |r|`` over ``r != 0``.
        mean_abs: mean of ``|c - r|``.
        mean_reference: mean of ``|r|``.
        l2: ``||c - r||``.
        reference_l2, candidate_l2: ``||r||`` and ``||c||``.
        bulk_l2: ``||c - r||`` without its few largest elements (`measure` says how many); `None` if not looked at.
        size: number of elements.
        index: where ``max_abs`` is.
        values: reference's and candidate's value there.
        mismatched: how many elements are beyond an elementwise tolerance (0 if none was asked for).
        nonfinite: how many positions are NaN or infinite on one side only, or unequally.
        overflowed: how many positions are NaN or infinite on both sides, alike or not.
        basis: what was measured: ``tensors``, ``sketches`` (L2 norms are estimates, ``max_abs``, ``max_rel`` and
            ``mismatched`` lower bounds, ``mean_abs`` the root of the mean square), or ``moments`` (lower bounds).
        spread: relative standard deviation of ``l2``, where it is an estimate.
        third: how far both are from float64; `None`: not known.
        floor: what ``l2`` may be by rounding alone, as it was measured (`padiff.records.floors`); `None`: it was not.
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
    third: Third | None = None

    @property
    def rel_l2(self) -> float:
        """``||c - r|| / ||r||``; against a reference of zeros 0 or infinity."""
        if self.reference_l2 > 0:
            return self.l2 / self.reference_l2
        return 0.0 if self.l2 == 0 else float("inf")


@quickly_made
@dataclass(frozen=True, slots=True)
class Diff:
    """A pair, measured and judged.

    Attributes:
        pair: what was compared.
        figures: how far apart; `None` where nothing could be measured (see ``problem``).
        passed: whether the tolerance policy accepts it.
        judgement: which figure was judged, its limit, and the rule that allowed it; `None` before it is judged, and
            where there is nothing to judge.
        problem: why the values could not be compared or are wrong whatever the tolerance, else `None`.
    """

    pair: Pair
    figures: Figures | None = None
    passed: bool = True
    judgement: Judgement | None = None
    problem: Problem | None = None

    @property
    def compared(self) -> bool:
        """Whether both sides were there, and could be measured."""
        return self.pair.complete and (self.figures is not None or not self.passed)

    @property
    def counts(self) -> bool:
        """Whether the verdict counts it: it was compared, or a side is missing that should be there."""
        return self.compared or not self.passed

    @property
    def excess(self) -> float:
        """Judged figure as a multiple of its limit; infinite where a problem or a limit of 0 stands."""
        if self.judgement is not None:
            return self.judgement.excess
        return 0.0 if self.passed else float("inf")

    @property
    def floors(self) -> float | None:
        """How far apart in multiples of the floor; `None` where none was measured, or nothing was compared."""
        figures = self.figures
        if figures is None or figures.floor is None or not self.compared:
            return None
        if not figures.floor:
            return 0.0 if figures.l2 == 0 else math.inf
        return figures.l2 / figures.floor

    @property
    def grade(self) -> Grade | None:
        """What it is, in one word; `None` where nothing was compared."""
        if not self.passed:
            return Grade.WRONG
        if not self.compared or self.figures is None:
            return None
        if self.figures.l2 == 0 and not self.figures.nonfinite:
            return Grade.EQUAL
        return Grade.SUSPICIOUS if (self.floors or 0.0) > SUSPICIOUS else Grade.NOISE

    def judged(self, passed: bool, figure: Figure, value: float, limit: float, rule: Rule) -> Diff:
        """The diff, with what was judged. (Not by `replace`, which takes longer than the judging.)"""
        return Diff(self.pair, self.figures, passed, Judgement(figure, value, limit, rule), self.problem)

    def __str__(self) -> str:
        return f"step {self.pair.step}  {self.pair.anchor.site}: {figures_text(self)}"

    def __repr__(self) -> str:
        return f"<Diff step {self.pair.step} {self.pair.anchor.site} {'passed' if self.passed else 'failed'}>"


def figures_text(diff: Diff) -> str:
    """What was measured against what was allowed, in words."""
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
            text += f", {judged.excess:.3g} times the {judged.figure} allowed ({judged.limit:.2g})"
        else:
            text += f", where {judged.figure} has to be 0 (got {judged.value:.3g})"
    floors = diff.floors
    if floors is not None and not diff.problem and math.isfinite(floors):
        text += f"; {floors:.3g} times its floor"
    if figures.third is not None and not diff.problem:
        text += f"; {figures.third.text}"
    if figures.max_abs and figures.basis == "tensors":
        at = f" at {list(figures.index)}" if figures.index else ""
        text += f"; worst {figures.values.reference:.7g} against {figures.values.candidate:.7g}{at}"
    return text
