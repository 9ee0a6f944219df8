"""Results of a comparison: pairs, figures, judgements, diffs and causes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from padiff.records.both import SIDES, Both
from padiff.records.recorded import Record
from padiff.records.sources import SAME, Layout
from padiff.system.frames import Frame


class Figure(Enum):
    """A quantity that is compared with a limit; the value is its name in reports."""

    REL_L2 = "rel_l2"
    L2 = "l2"
    MAX_ABS = "max_abs"
    MEAN_ABS = "mean_abs"
    #: Number of elements beyond an elementwise tolerance.
    MISMATCHED = "elements beyond"
    #: Without the few largest elements, or the worst samples.
    BULK = "rel_l2 of the bulk"
    #: Without elements whose gradients are rounding noise.
    WITHOUT_NOISE = "rel_l2 where gradients are no noise"
    #: Without elements that are off by a unit in the last place of their weight.
    BEYOND_LAST_PLACE = "rel_l2 beyond the last place of the weights"
    #: Relative difference in size between the candidate's tensor and the reference's.
    RATIO = "share by which it is larger or smaller"
    #: Shift of the mean, as a share of the root mean square.
    MEAN = "shift of the mean"
    #: For a gradient whose true value is zero, and that a fixed tolerance accepts.
    AROUND_ZERO = "rel_l2 of rounding noise around zero"
    #: Without the rows (tokens, samples) that chose otherwise on the two sides.
    OTHER_ROWS = "rel_l2 of the rows that chose alike"

    def __str__(self) -> str:
        return self.value

    # Sufficient, as a member equals only itself. Enum's own hash is computed in Python, several times for each diff.
    __hash__ = object.__hash__


#: Multiple of a measured floor above which a diff that passes is graded suspicious instead of noise. This value was
#: measured: see `padiff.compare.judge.limits.FLOORS`.
SUSPICIOUS = 10.0


class Grade(Enum):
    """Grade of a diff."""

    EQUAL = "equal to the bit"
    NOISE = "noise"
    #: Allowed, although larger than the measured rounding error.
    SUSPICIOUS = "suspicious"
    WRONG = "wrong"

    def __str__(self) -> str:
        return self.value


class Rule(Enum):
    """The rule that set a limit; the value gives the reason for the limit."""

    TOLERANCE = "a fixed tolerance was asked for"
    EQUAL = "integers and booleans have to be equal"
    ROUNDING = "rounding noise of the coarsest dtype up to this stage"
    SCALAR = "rounding noise of a scalar"
    INHERITED = "the step starts from weights or inputs that already differ, within their limits"
    OUTPUTS = "the outputs that enter the loss differ, within their limits"
    HANDED_ON = "the outputs before this one differ, within their limits"
    ACTIVATION = "the input of the activation differs, within its limit"
    HANDED_BACK = "rounding moved values across a kink (ReLU, max pooling), which changes this gradient"
    GROWN = "the same stage differed in the previous step, within its limit"
    MADE_OF = "the tensors that this gradient is computed from differ, within their limits"
    LAYER = "this gradient is rounding noise beside the layer's largest gradient"
    OF_GRADIENT = "the gradient or the optimizer's state differs, within its limit"
    NOISE_DRIVEN = "the gradient is rounding noise, so that its update may have any direction"
    UPDATES = "the updates of previous steps differ, within their limits"
    DRIFT = "steps before this one are not known: weights drift by a share of themselves, or of their updates, in each"
    GROUPS = "each parameter is stepped with the same rate: the groups stand in another order"
    STATISTICS = "running statistics follow the outputs; torch uses the unbiased variance, paddle the biased one"
    ELEMENTS = "all of it is in elements whose gradients are rounding noise"
    LAST_PLACE = "the update is a few units in the last place of the weight, which rounding moves it by"
    WRITTEN = "a weight has to be the weight of the step before plus its update: nothing else writes to it"
    SYSTEMATIC = "many tensors of the stage are off alike, which rounding never is"
    MEASURED = "measured: n runs moved by units in the last place"
    AROUND_ZERO = "the true gradient is zero, and what was computed is rounding noise"
    PREPARED = "loss functions are called with the same labels: one side prepares them in the model, one in the data"
    AVERAGE = "an average of another weight follows it by the same share"
    CHOICES = "rows (tokens, samples) choose otherwise, by scores that agree within rounding"
    SCALED = "the gradients of parameters agree: one side scales its loss, and its gradients by the inverse"
    WRITTEN_OTHERWISE = "losses and gradients agree: the loss is the same, written in another way"
    GIVEN_OTHERWISE = "all that is computed from this input agrees: the same is given in another form"

    def __str__(self) -> str:
        return self.value

    __hash__ = object.__hash__  # see `Figure`


@dataclass(frozen=True, slots=True)
class Judgement:
    """A figure compared with its limit.

    Attributes:
        figure: the judged quantity.
        value: value of the figure.
        limit: largest allowed value.
        rule: the rule that set the limit.
    """

    figure: Figure
    value: float
    limit: float
    rule: Rule

    @property
    def excess(self) -> float:
        """Return the value as a multiple of its limit; infinity if the limit is 0 and the value is not."""
        if not self.limit:
            return 0.0 if self.value == 0 else float("inf")
        return self.value / self.limit


class Kind(Enum):
    """A reason why two tensors cannot be compared, or are wrong at any tolerance."""

    MISSING = "a side is missing"
    SHAPES = "the shapes differ"
    NONFINITE = "NaN or infinite on one side only"
    #: For runs with different numbers of processes.
    OWN_SAMPLES = "each process saw samples of its own"
    UNMEASURABLE = "a sketch does not tell"


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why two tensors could not be compared or are wrong at any tolerance; the text states it in words."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text


#: Scales of a pair that is compared without scaling.
UNSCALED = Both(1.0, 1.0)
_ZEROS = Both(0.0, 0.0)


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
        floor: the ``l2`` that rounding alone can cause, as measured; `None` if not measured.
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


#: Stands for lines of code that are not known.
UNKNOWN_LINES: Both[Frame | None] = Both(None, None)


@dataclass(frozen=True, slots=True)
class Cause:
    """Explanation of a first diff.

    Attributes:
        kind: a machine-readable name that is stable across versions, e.g. ``learning_rate``; ``unknown`` if nothing
            explains the diff.
        sentence: the cause in words, without a full stop; `str` returns it.
        proven: True if a computation with the cause reproduces the recorded values, and one without it does not.
            Otherwise the cause is likely.
        evidence: the evidence in words: what was computed, and how close the result is. May be empty.
        fix: the line of code that fixes the cause, in the candidate's framework. May be empty.
        excluded: causes that were computed as well, and do not explain the recorded values.
        lines: the lines of both sides' code that the cause is about; `None` where not known.
        remaining: error that is left with the cause, as a multiple of the rounding noise; `None` if not computed.
        values: what either side has: an activation, a function or the path of a layer (empty: none), learning rates,
            micro-batches, the scale and offset of an input (a row for each channel) or the axis of its flip, calls
            (each the function and its arguments); `None` if the cause is about no such values.
    """

    kind: str
    sentence: str
    proven: bool = False
    evidence: str = ""
    fix: str = ""
    excluded: tuple[str, ...] = ()
    lines: Both[Frame | None] = UNKNOWN_LINES
    remaining: float | None = None
    values: Both[Any] | None = None

    def __str__(self) -> str:
        return self.sentence

    @property
    def text(self) -> str:
        """Return the cause, its evidence and its fix as sentences that follow a message."""
        return " ".join(self.sentences)

    @property
    def sentences(self) -> list[str]:
        """Return the cause with its evidence, its fix, and the excluded causes, as sentences that follow a message."""
        certainty = "Cause" if self.kind == "unknown" else "Cause, proven" if self.proven else "Likely cause"
        sentences = [f"{certainty}: {self.sentence}{f' ({self.evidence})' if self.evidence else ''}."]
        sentences += [f"Fix: {self.fix}."] if self.fix else []
        if self.excluded and not self.proven:
            sentences.append(f"Tried and excluded: {', '.join(self.excluded)}.")
        return sentences
