"""Policies: a fixed tolerance, and limits that follow rounding noise; both excuse what losses may do."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.drift import NONE, Drift, Form, Site, ratio_of, site_of, was_excused, without_systematic
from padiff.compare.judge.site_facts import SiteFacts, coarsest, is_nothing, noted, rounding_gradients
from padiff.compare.judge.step_limits import StepLimits
from padiff.compare.measure.operands import elements, labels_by_call, same_labels
from padiff.errors import RunFolderError, SketchOnlyError, UsageError
from padiff.model import equivalents
from padiff.records import (
    LOOP,
    PARAMETER_STAGES,
    ROOT,
    Both,
    Diff,
    Figure,
    Figures,
    Judgement,
    Kind,
    Problem,
    Rule,
    is_below,
    is_loss,
    is_of_loss,
)
from padiff.records.step_diffs import StepDiffs

# Share of a difference that shows in gradients if it has an effect. Chosen: another way to write a loss leaves none.
_SHOWN = 0.1
# Share of an output's difference that the gradients may be off by if the loss makes up for it. Chosen: rounding leaves
# a millionth.
_MADE_UP = 0.01
# Largest relative error of a tensor that is a multiple of another one. Chosen: rounding leaves a hundredth of it.
_SCALED = 1e-4
# Relative distance from a number of two digits, as limits of clipping are, within which a norm is one. Chosen.
_ROUND = 2e-5
# How often each value of an input has to occur on average, where each side has values of its own. Chosen.
_OFTEN = 4
# Largest number that hides a score to which it is added.
_HIDING = -1e3
# Slots of labels among a model's inputs.
_LABELS = frozenset({"input.labels", "input.label"})


def confirmed(diffs: StepDiffs, losses: Collection[tuple[str, int]] = (), forms: bool = True) -> StepDiffs:
    """Return a step's judged diffs, with harmless differences in arguments and results of loss functions passed.

    Labels that the model receives also pass, if its loss functions receive equal labels: language models of one library
    shift labels themselves, those of another library expect shifted labels. A loss that is written in another way
    differs in each step: a tensor that agreed in the first one has to show in no gradient.

    Args:
        losses: slots and calls of the tensors that agreed in the first step.
        forms: True to pass outputs that the losses take in another form, too; not where a user defines equality.
    """
    if diffs.passed:
        return diffs
    diffs = _with_prepared(diffs)
    if forms:
        diffs = _with_scales(_with_forms(_with_inputs(diffs)))
    facts = diffs.sites.fact(SiteFacts)
    if not (facts.of_loss & ~diffs.rows["passed"]).any():
        return diffs
    # The gradient of an output that the loss takes in another form says nothing.
    compared = [diff for diff in diffs if diff.compared and not was_excused(diff)]
    after = [*(diff for diff in compared if is_loss(diff.pair.anchor)), *_first_gradients(compared)]
    grads = [diff for diff in compared if diff.pair.stage == "grad" and diff.pair.anchor.layer != LOOP]
    after = after or grads
    noise = limits.allowed(coarsest(facts.dtypes, ("input", "weight", "forward")), "forward")
    exact = facts.exact.tolist()

    def counts(place: int, diff: Diff) -> bool:
        if diff.passed or not is_of_loss(diff.pair.anchor):
            return True
        evidence = grads if diff.pair.stage == "grad" else after
        if not evidence:
            return diff.pair.stage == "loss"
        if diff.pair.stage == "grad" and _hidden(diff, grads):
            return True
        if any(not witness.passed for witness in evidence):
            return not exact[place] or _other_labels(diff) > 0
        agreed = (diff.pair.anchor.slot, diff.pair.anchor.call) in losses
        if not exact[place] and (agreed or not any(is_loss(witness.pair.anchor) for witness in evidence)):
            return diff.pair.stage == "loss" and _shows(diff, evidence, noise)
        return diff.pair.stage == "loss" and exact[place] and _tells(_other_labels(diff), evidence, noise)

    return diffs.replaced(
        [diff if counts(place, diff) else written_otherwise(diff) for place, diff in enumerate(diffs)]
    )


def _earlier_forms(judged: StepDiffs, forms: Mapping[Site, Form]) -> dict[int, Rule]:
    """Return the failed diffs, by position, of what both sides write in different ways since an earlier step."""
    rules = {}
    for place in np.flatnonzero(~judged.rows["passed"] & judged.measured).tolist() if forms else []:
        diff = judged[place]
        form = forms.get(site_of(diff))
        if form is None or (is_loss(diff.pair.anchor) and form.rule is not Rule.SCALED):
            continue
        # A sketch does not show the values: what is computed with them does.
        sketched = diff.pair.anchor.source.sketched
        if form.rule is Rule.GIVEN_OTHERWISE and not (sketched or is_in_another_form(diff)):
            continue
        if form.rule is Rule.SCALED and not abs(ratio_of(diff) - form.ratio) <= _SCALED * form.ratio:
            continue
        rules[place] = form.rule
    return rules


def _inputs_in_other_forms(judged: StepDiffs) -> dict[int, Rule]:
    """Return the rule of each input that holds the same in another form: its error is no distance at the start."""
    places = (place for place in judged.sites.places["input"].tolist() if judged.rows["l2"][place] > 0)
    return {
        place: Rule.GIVEN_OTHERWISE
        for place in places
        if (judgement := judged[place].judgement) is not None and judgement.rule is Rule.GIVEN_OTHERWISE
    }


def forms_of(diffs: StepDiffs) -> list[int]:
    """Return the positions of the failed outputs of whole models, of what layers inside return beside their first
    output, and of their gradients.

    Returns:
        The positions; none if a weight, an input or an output of a layer inside fails, too, or a gradient alone.
    """
    sites = diffs.sites
    failed = np.flatnonzero(~diffs.rows["passed"]).tolist()
    models = _models(sites.layers) if failed else set()
    places = [
        place
        for place in failed
        if sites.stages[place] in ("forward", "backward")
        and diffs.measured[place]
        and (sites.layers[place] in models or _is_further(sites.layers, place, sites.slots[place]))
    ]
    if any(sites.stages[place] in ("input", "weight", "forward") for place in {*failed} - {*places}):
        return []
    if any(sites.stages[place] == "forward" for place in places):
        return places
    # One author takes the positive part of an output: few elements differ, so that it passes, its gradient does not.
    kinked = {
        (sites.layers[place], sites.slots[place], sites.calls[place])
        for place in sites.places["forward"].tolist()
        if sites.layers[place] in models and _is_of_bulk(diffs[place])
    }
    is_kinked = ((sites.layers[place], sites.slots[place], sites.calls[place]) in kinked for place in places)
    return places if all(is_kinked) else []


def _is_further(layers: Sequence[str], place: int, slot: str) -> bool:
    """Return True for an output beside the first one of a layer that holds other layers."""
    further = slot.startswith("output.") and not slot.startswith("output.0")
    return further and any(is_below(path, layers[place]) for path in {*layers} - {LOOP})


def _is_of_bulk(diff: Diff) -> bool:
    return diff.judgement is not None and diff.judgement.figure is Figure.BULK


def _with_inputs(diffs: StepDiffs) -> StepDiffs:
    """Pass inputs that hold the same in another form, if all outputs agree.

    One author masks places with True, another one with 0, or with -1e9 for the others.
    """
    sites = diffs.sites
    failed = np.flatnonzero(~diffs.rows["passed"]).tolist()
    computed = [diffs.compared[sites.places[stage]].any() for stage in ("forward", "grad")]
    if not all(computed):
        return diffs
    inputs = [k for k in failed if sites.stages[k] == "input" and diffs.measured[k]]
    others = [k for k in inputs if is_in_another_form(diffs[k])]
    # What is added to scores, such as -1e9, is a mask whatever else differs.
    if any(sites.stages[k] in ("weight", "forward") for k in failed):
        others = [k for k in others if _is_added_to_scores(diffs[k])]
    passing = list(diffs) if others else []
    for place in others:
        passing[place] = written_otherwise(passing[place], Rule.GIVEN_OTHERWISE)
    return diffs.replaced(passing) if passing else diffs


def _is_added_to_scores(diff: Diff) -> bool:
    """Return True if one of two inputs of two values hides scores by a large negative number, the other does not."""
    sides = elements(diff.pair)
    if sides is None or any(len(np.unique(side)) != 2 for side in sides):
        return False
    hides = sides.map(lambda side: float(side.min()) <= _HIDING)
    return hides.reference != hides.candidate


def is_in_another_form(diff: Diff, most: int = 0) -> bool:
    """Return True if each value of one side stands for one value of the other, and each of them occurs often.

    Args:
        diff: a diff of two tensors.
        most: the most values that a tensor may have; any number if 0.
    """
    try:
        sides = elements(diff.pair)
    except (RunFolderError, SketchOnlyError):
        return False
    if sides is None or sides.reference.size != sides.candidate.size:
        return False
    counts = [len(np.unique(side)) for side in sides]
    together = len(np.unique(np.stack(tuple(sides)), axis=1).T)
    return (
        counts[0] == counts[1] == together > 1
        and together <= (most or together)
        and _OFTEN * together <= sides.reference.size
    )


def _with_forms(diffs: StepDiffs) -> StepDiffs:
    """Pass outputs of whole models, and their gradients, if the loss and all gradients of parameters agree.

    One author takes the last function (a logarithm, a softmax, an exponential) in the model, another one in the loss.
    A block of one author returns scores, of another one their softmax, beside what the next layer takes.
    """
    places, sites, rows = forms_of(diffs), diffs.sites, diffs.rows
    if not places:
        return diffs
    failed = {place for place in np.flatnonzero(~rows["passed"]).tolist() if not is_of_loss(diffs[place].pair.anchor)}
    failed = {place for place in failed if sites.stages[place] != "update"}  # which comes after the gradients
    losses, grads = np.flatnonzero(sites.fact(SiteFacts).losses), sites.places["grad"]
    counted = grads[diffs.compared[grads]]
    size = float(np.linalg.norm(rows["reference_l2"][counted]))
    # The sum of what several backwards begin at is not recorded, nor is the output of a loss function recorded as the
    # loss: the gradients tell.
    if failed - {*places} or not size or not (diffs.compared | ~sites.complete)[losses].all():
        return diffs
    off = float(np.linalg.norm(rows["l2"][counted])) / size
    passing = list(diffs)
    for place in places:
        figures = passing[place].figures
        if figures is None or not off <= _MADE_UP * figures.rel_l2:
            return diffs
        passing[place] = written_otherwise(passing[place])
    return diffs.replaced(passing)


def _with_scales(diffs: StepDiffs) -> StepDiffs:
    """Pass losses and gradients of outputs that are one multiple of the reference's if all gradients of parameters
    agree.

    One author divides the loss (by a loss scale, by the count of micro-batches), the other one the gradients. Gradients
    that are clipped to a norm agree whatever the loss is multiplied by, so that they say nothing, unless the norms that
    clipping measured agree, too.
    """
    sites, rows = diffs.sites, diffs.rows
    failed = np.flatnonzero(~rows["passed"])
    measured = sites.places["backward"][diffs.measured[sites.places["backward"]]]
    measured = measured[rows["reference_l2"][measured] > 0]
    grads = sites.places["grad"]
    if not len(failed) or not {sites.stages[place] for place in failed.tolist()} <= {"backward", "loss"}:
        return diffs
    if not len(measured) or not diffs.measured[failed].all() or not diffs.compared[grads].all():
        return diffs
    if diffs.troubled[failed].any():
        return diffs  # what overflowed is no multiple of anything
    layers_grads = grads[[sites.layers[place] != LOOP for place in grads.tolist()]]
    norm, each = float(np.linalg.norm(rows["reference_l2"][layers_grads])), rows["reference_l2"][layers_grads].tolist()
    norms_agree = any(rows["passed"][place] for place in grads.tolist() if sites.layers[place] == LOOP)
    if not norm or (not norms_agree and (_is_round(norm) or all(map(_is_round, each)))):
        return diffs
    # A sum for a mean is another multiple: what a loss function gives may be divided before it is the loss.
    of_functions = [sites.stages[place] == "loss" and sites.slots[place] != "loss" for place in failed.tolist()]
    scaled = np.unique(np.concatenate([measured, failed[~np.array(of_functions)]]))
    factors = rows["candidate_l2"][scaled] / np.maximum(rows["reference_l2"][scaled], 1e-300)
    ratio = float(np.median(factors)) - 1.0
    # Of sketches, the norms are exact and the distances are estimates.
    off = np.abs(diffs.relative[scaled] - np.abs(factors - 1)) - limits.SURE * rows["spread"][scaled] * np.abs(ratio)
    is_multiple = (np.abs(factors - 1 - ratio) <= _SCALED * (1 + ratio)).all() and (off <= _SCALED * abs(ratio)).all()
    if not is_multiple or not float(np.linalg.norm(rows["l2"][layers_grads])) <= _MADE_UP * abs(ratio) * norm:
        return diffs
    excused = list(diffs)
    for place in failed.tolist():
        excused[place] = written_otherwise(excused[place], Rule.SCALED)
    return diffs.replaced(excused)


def _is_round(norm: float) -> bool:
    """Return True if a norm has two digits, as limits of clipping do."""
    return math.isclose(norm, float(f"{norm:.2g}"), rel_tol=_ROUND)


def _models(layers: Sequence[str]) -> set[str]:
    """Return the paths of the layers that hold other layers and are in no layer themselves."""
    paths = {path for path in layers if path != LOOP}
    tops = {path for path in paths if path == ROOT or not any(is_below(path, other) for other in paths)}
    return {path for path in tops if any(is_below(other, path) for other in paths)}


def _with_prepared(diffs: StepDiffs) -> StepDiffs:
    exact = diffs.sites.fact(SiteFacts).exact
    label_places = [
        place for place in np.flatnonzero(exact & ~diffs.rows["passed"]).tolist() if _is_given(diffs[place])
    ]
    if not label_places:
        return diffs
    sides = zip(*(diff.pair.sides for diff in diffs if is_of_loss(diff.pair.anchor)))
    used = [labels_by_call([record for record in side if record is not None]) for side in sides]
    if len(used) != 2:
        return diffs
    alike = {call for call in used[0].keys() & used[1].keys() if same_labels(used[0][call], used[1][call])}
    result = list(diffs)
    for place in label_places:
        if result[place].pair.anchor.call in alike:
            result[place] = written_otherwise(result[place], Rule.PREPARED)
    return diffs.replaced(result)


def _is_given(diff: Diff) -> bool:
    """Return True if the diff is of integer labels that the model receives."""
    anchor = diff.pair.anchor
    return anchor.stage == "input" and anchor.slot in _LABELS and diff.compared


def _hidden(diff: Diff, grads: Sequence[Diff]) -> bool:
    """Return True if a norm before clipping differs, and clipping on both sides hides this in the gradients."""
    figures = diff.figures
    if figures is None or not all(diff_of_grad.passed and diff_of_grad.figures for diff_of_grad in grads):
        return False
    sides = [diff_of_grad.figures for diff_of_grad in grads if diff_of_grad.figures is not None]
    norms_after = Both(math.hypot(*(f.reference_l2 for f in sides)), math.hypot(*(f.candidate_l2 for f in sides)))
    before = Both(figures.reference_l2, figures.candidate_l2)
    return all(norm > limits.CLIPPED * after > 0 for norm, after in zip(before, norms_after))


def _first_gradients(diffs: Iterable[Diff]) -> list[Diff]:
    """Return for each call the gradient that backward computes first: it depends on the loss alone."""
    first: dict[int, Diff] = {}
    for diff in diffs:
        if diff.pair.stage == "backward":
            first.setdefault(diff.pair.anchor.call, diff)
    return list(first.values())


def _other_labels(diff: Diff) -> float:
    """Return the share of labels that differ; all negative numbers count as one ignored label."""
    try:
        sides: Both[np.ndarray] | None = elements(diff.pair)
    except (RunFolderError, SketchOnlyError):
        return 1.0
    if sides is None or not sides.reference.size:
        return 1.0
    differ = (sides.reference != sides.candidate) & ~((sides.reference < 0) & (sides.candidate < 0))
    return float(differ.mean())


def _tells(share: float, diffs: Sequence[Diff], noise: float) -> bool:
    """Return True if a gradient that is within its limit is off by as much as a share of different labels explains."""
    least = max(limits.OF_LABELS * math.sqrt(share), noise)
    gradients = [diff.figures for diff in diffs if diff.pair.stage == "backward"]
    return share > 0 and any(figures is not None and figures.rel_l2 >= least for figures in gradients)


def _shows(diff: Diff, gradients: Sequence[Diff], noise: float) -> bool:
    """Return True if gradients that are within their limits are off about as far as what went into the loss."""
    least = max(_SHOWN * diff.figures.rel_l2, noise) if diff.figures is not None else math.inf
    return any(gradient.figures is not None and gradient.figures.rel_l2 >= least for gradient in gradients)


def written_otherwise(diff: Diff, rule: Rule = Rule.WRITTEN_OTHERWISE) -> Diff:
    """Return a failed diff as one that passes, because both sides write the same in another way."""
    judged = diff.judgement
    figure, value = (judged.figure, judged.value) if judged is not None else (Figure.REL_L2, 0.0)
    limit = max(value, judged.limit if judged is not None else 0.0)
    figures = diff.figures
    if figures is not None and (figures.floor is not None or figures.third is not None):
        figures = replace(figures, floor=None, third=None)  # measured for another quantity
    return Diff(diff.pair, figures, True, Judgement(figure, value, limit, rule), diff.problem)


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

    A gradient that is rounding noise around a true value of zero (`padiff.compare.judge.site_facts`) passes, and is
    listed.

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
        rounding = step.figure_fact(rounding_gradients).tolist()
        alone = [self._judge(diff) for diff in step]
        judged = [noted(diff) if noise and not diff.passed else diff for diff, noise in zip(alone, rounding)]
        return judged_together(step.replaced(judged), before, forms=False)

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


def judged_together(diffs: StepDiffs, before: Drift = NONE, forms: bool = True) -> StepDiffs:
    """Return a step's individually judged diffs, corrected by rules that need the other diffs; see `confirmed`."""
    return _missing_fail(_overflows_pass(confirmed(diffs, before.losses, forms)))


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


@dataclass(frozen=True)
class NoisePolicy(ByNoise):
    """Default policy: limits of the relative L2 error by the rounding noise of dtype and stage, and the run's drift.

    * Each stage has a limit by the coarsest floating dtype seen so far in the step.
    * An output may have five times the error of the outputs before it, because deep networks add rounding up.
    * A step that starts from slightly different weights or inputs (rounding noise of the steps before) may differ
      accordingly: the relative error of all weights together, and of the inputs, enters the limits of later stages.
    * Limits of gradients and updates grow with the root of the error of the outputs: kinks (ReLU, max pooling).
    * If some trainable weights are not recorded, the error at the start of later steps is unknown: only large errors
      are reported there.
    * Weights may drift by the share of their updates that the limit of updates allows.
    * A gradient is judged against the largest gradient of its layer, because the gradient of a convolution's bias
      before a BatchNorm, or of an attention's key bias, is pure rounding noise. The update that an adaptive optimizer
      makes from such a gradient can't be judged, and passes unless its size differs, too.
    * Diffs that grow from one compared step to the next by less than five times are rounding that training amplifies.
    * A BatchNorm's running variance: torch feeds it the unbiased, paddle the biased estimate, ``n / (n - 1)`` apart.

    Args:
        factor: multiplier of all limits.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise UsageError(f"factor has to be a number above 0, got {self.factor!r}")

    def describe(self) -> str:
        times = "" if self.factor == 1.0 else f" times {self.factor:g}"
        return f"rounding noise by dtype, stage and drift (relative L2){times}"

    def judge(self, diffs: Sequence[Diff], before: Drift = NONE) -> StepDiffs:
        judged = self._judged(diffs, before)
        rules = _earlier_forms(judged, before.forms) | _inputs_in_other_forms(judged)
        if not rules:
            return judged
        # A fault of this step shows elsewhere, and the difference of the forms excuses no other tensor.
        judged_rest = iter(self._judged([diff for place, diff in enumerate(diffs) if place not in rules], before))
        all_judged = [
            written_otherwise(diff, rules[place]) if place in rules else next(judged_rest)
            for place, diff in enumerate(judged)
        ]
        return judged.replaced(all_judged)

    def _judged(self, diffs: Sequence[Diff], before: Drift) -> StepDiffs:
        with np.errstate(all="ignore"):
            limits = StepLimits(StepDiffs.from_diffs(diffs), self.factor, before)
            return judged_together(without_systematic(limits.judged(), limits.context.start()), before)
