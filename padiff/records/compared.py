"""What a comparison makes of it: pairs, diffs, the report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from padiff.records.aftermath import Standing
from padiff.records.both import SIDES, Both
from padiff.records.cause import Cause
from padiff.records.extent import Extent
from padiff.records.judgement import SUSPICIOUS, Figure, Grade, Judgement, Problem, Rule
from padiff.records.layout import SAME, Layout
from padiff.records.picture import Picture
from padiff.records.recomputed import Recomputed
from padiff.records.recorded import Record, is_below

#: Scales of what is compared as it is.
UNSCALED = Both(1.0, 1.0)
_ZEROS = Both(0.0, 0.0)
_NO_PARAMETERS: Both[tuple[str, ...]] = Both((), ())


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


@dataclass(frozen=True, slots=True)
class FirstDiff:
    """Where two runs part, first in causal order: step, stage, execution order of the reference.

    Attributes:
        step, stage: where in the run.
        reference, candidate: paths of the two layers, `None` where there is no such layer.
        slot: which tensor of the layer.
        diff: what was measured there; `None` where no tensor shows it.
        cause: why; `None` where nothing speaks for a cause.
        caveat: why it may be no diff at all, as a sentence; else empty.
        statement: what is wrong where no tensor shows it.
        extent: how far it reaches; `None` where no tensor shows it.
        parameters: of what the runs declare differently, which parameters it concerns, by ``layer/slot``; empty: all.
        last_agreeing: of an output, the last layer before it whose output agrees, by the reference's path; empty where
            that is not known.
        inside: whether what goes into the layer agrees, so that the diff comes from inside of it; `None` where that is
            not known. If it does not, it comes from the code between the last layer that agrees and this one, and
            ``slot`` and ``diff`` are what goes in.
        call: which call of a function it comes from, in words; empty where that is not known.
        recomputed: whose figures agree with float64; `None` where that can't be computed.
        standing: whether it is the first diff of the run, follows from it (of a later step's report), or is a fault by
            itself.
        picture: what both tensors look like; `None` where they are not there in full.
        rank: of which process; `None` where there is one, or where what all of them share parts.
        stacks: lines of either side's code that the call comes from, ``file:line function``, the innermost first; empty
            where they were not recorded.
    """

    step: int
    stage: str
    reference: str | None
    candidate: str | None
    slot: str = ""
    diff: Diff | None = None
    cause: Cause | None = None
    caveat: str = ""
    statement: str = ""
    extent: Extent | None = None
    parameters: Both[tuple[str, ...]] = _NO_PARAMETERS
    last_agreeing: str = ""
    inside: bool | None = None
    call: str = ""
    recomputed: Recomputed | None = None
    standing: Standing = Standing.FIRST
    picture: Picture | None = None
    rank: int | None = None
    stacks: Both[tuple[str, ...]] = _NO_PARAMETERS

    @property
    def max_abs(self) -> float:
        """Largest ``|c - r|``; NaN where nothing was measured."""
        return self._figures.max_abs

    @property
    def max_rel(self) -> float:
        """Largest ``|c - r| / |r|``; NaN where nothing was measured."""
        return self._figures.max_rel

    @property
    def _figures(self) -> Figures:
        measured = self.diff is not None and self.diff.compared and self.diff.figures
        return measured or Figures(max_abs=math.nan, max_rel=math.nan)

    @property
    def message(self) -> str:
        """All of it in words."""
        if self.standing is Standing.NEW:
            return self._by_itself
        if self.diff is None:
            mending = f" To mend it: {self.cause.fix}" if self.cause is not None and self.cause.fix else ""
            return f"{self.statement}{mending}"
        because = f" {self.cause.text}" if self.cause is not None else ""
        caveat = f" {self.caveat}" if self.caveat else ""
        reach = f" {self.extent.text}" if self.extent is not None and self.extent.text else ""
        whose = f" {self.recomputed.text}" if self.recomputed is not None else ""
        parts = (
            "This follows from the first diff: the runs differ"
            if self.standing is Standing.FOLLOWS
            else "The runs part"
        )
        return f"{parts} at {self.place_text}.{self._place}{reach}{whose}{because}{caveat}"

    @property
    def _by_itself(self) -> str:
        """A fault that does not follow from the first one, in short."""
        because = f" {self.cause.text}" if self.cause is not None else ""
        whose = f" {self.recomputed.text}" if self.recomputed is not None else ""
        where = self.statement or f"at {self.where if self.recomputed is not None else self.place_text}"
        return f"A second fault, which does not follow from the first: {where}.{whose}{because}"

    @property
    def place_text(self) -> str:
        """Where a tensor parts, and how far."""
        return self.where if self.diff is None else f"{self.where}: {figures_text(self.diff)}"

    @property
    def where(self) -> str:
        """Where a tensor parts."""
        step = f"step {self.step}" + ("" if self.rank is None else f", rank {self.rank}")
        if self.diff is None:
            return f"{step}, stage {self.stage}"
        call = f" (call {self.diff.pair.anchor.call})" if self.diff.pair.anchor.call else ""
        return f"{step}, stage {self.stage}, {self._layers(self.diff.pair)}, {self.slot}{call}"

    @property
    def _place(self) -> str:
        """Where in the code it is, in words, as far as that is known."""
        last, layer = self.last_agreeing, self.reference
        call = f": {self.call}" if self.call else ""
        if last and layer is not None and is_below(last, layer):
            return f" It is in the code of `{layer}` after `{last}`, the last layer that agrees{call}."
        if self.inside is None and not call:
            return ""
        if self.inside:
            return f" It is inside of this layer, as what goes in agrees{call}."
        if last:
            return f" It is in the code between `{last}`, the last layer that agrees, and `{layer}`{call}."
        return f" It is in the code before `{layer}`, the first layer that is called{call}."

    def _layers(self, pair: Pair) -> str:
        names = [
            f"{path} ({record.layer_type})" if record is not None and record.layer_type else str(path or "nothing")
            for path, record in zip((self.reference, self.candidate), pair.sides)
        ]
        return f"layer {names[0]} against {names[1]}"

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of each run was compared.

    Attributes:
        compared: how many pairs the verdict counts (`Diff.counts`); "5 of 343 pairs differ" is of these 343.
        missing: how many of them fail because a side is missing.
        reference_records, candidate_records: all records of the compared steps.
        reference_layers, candidate_layers: unmatched layers that own parameters or have no sublayers, by path.
        reference_containers, candidate_containers: unmatched layers that only hold others: another nesting.
        reference_parts, candidate_parts: layers without a partner of their own whose parameters were compared as parts
            of another layer's (query, key and value in one): only their outputs were not.
        reference_parameters, candidate_parameters: unmatched parameters and buffers, by ``layer/slot``.
        reference_sites, candidate_sites: unmatched records of matched layers, by site.
        uncalled: layers whose forward was never called, by path with the side in front.
        steps: numbers of the compared steps.
        reference_steps, candidate_steps: steps that only one run has.
        notes: further sentences (settings that differ, calls that were left out, ...).
        ambiguous: pairs that another partner would fit nearly as well, with it.
        assumed: how something is stored that neither names nor shapes tell.
        views: layers whose tensors lie in another layout, and which.
        cut_elsewhere: pairs of layers that end at other places of the computation: what is inside of them is compared,
            their own outputs are not.
        sketched: how many of the pairs were judged from sketches, whose relative L2 error is an estimate.
        bounded: how many of those from norms and means only: one side lies in another layout.
        ranks: what is compared where the runs have different numbers of processes, in words.
        amplified: the first step whose outputs are more than a tenth of themselves apart, though nothing has parted:
            rounding that the training amplified. `None` if there is none.
        unmeasured: sites of pairs of which sketches are all there is, and say nothing: parts of a fused tensor.
        reference_unrecorded, candidate_unrecorded: parameters that train, that the lists let be recorded, and that no
            compared step has a record of, by ``layer/slot``.
        left_out: why something was not recorded, as the first compared steps note it, with the side in front.
        zeros: sites of gradients that are rounding noise around a true value of zero, which a fixed tolerance let pass.
    """

    compared: int = 0
    missing: int = 0
    reference_records: int = 0
    candidate_records: int = 0
    reference_layers: tuple[str, ...] = ()
    candidate_layers: tuple[str, ...] = ()
    reference_containers: tuple[str, ...] = ()
    candidate_containers: tuple[str, ...] = ()
    reference_parts: tuple[str, ...] = ()
    candidate_parts: tuple[str, ...] = ()
    reference_parameters: tuple[str, ...] = ()
    candidate_parameters: tuple[str, ...] = ()
    reference_sites: tuple[str, ...] = ()
    candidate_sites: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    reference_steps: tuple[int, ...] = ()
    candidate_steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    ambiguous: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    cut_elsewhere: tuple[str, ...] = ()
    sketched: int = 0
    bounded: int = 0
    unmeasured: tuple[str, ...] = ()
    ranks: str = ""
    amplified: int | None = None
    reference_unrecorded: tuple[str, ...] = ()
    candidate_unrecorded: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()

    @property
    def unrecorded(self) -> int:
        """How many parameters that train have no record, on either side."""
        return len(self.reference_unrecorded) + len(self.candidate_unrecorded)

    @property
    def share(self) -> float:
        """Paired records as a share of all that both runs should have recorded, 0 to 1.

        A parameter that trains and has no record counts as one record of each compared step.
        """
        total = self.reference_records + self.candidate_records + self.unrecorded * max(len(self.steps), 1)
        return 2 * (self.compared - self.missing) / total if total else 0.0

    @property
    def complete(self) -> bool:
        """Whether nothing was left out."""
        paired = self.compared - self.missing
        return self.reference_records == self.candidate_records == paired and not self.unrecorded
