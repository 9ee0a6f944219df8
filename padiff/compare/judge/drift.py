"""Drift of two runs up to a step, and systematic errors, which are no drift."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.block_facts import apart_at_start, is_sampled, statistics_apart
from padiff.compare.judge.limits import (
    GROWN_AT_MOST,
    GROWTH,
    SURE,
    TYPICAL_KINKS,
    TYPICALLY_OFF,
    UNRELATED,
    UNSEEN_KINKS,
)
from padiff.compare.judge.site_facts import ScaleErrors, SiteFacts, ratios_of, scale_errors
from padiff.compare.measure.pairs import few
from padiff.records import Coverage, Diff, Figure, FirstDiff, Rule
from padiff.records.pair_table import Key, PairSchema
from padiff.records.step_diffs import FIGURE_NUMBERS, FIGURES, RULE_NUMBERS, StepDiffs

# Number of steps after which updates may be unrelated.
_LONG = math.ceil(UNRELATED / UNSEEN_KINKS)
#: Figures that express a relative L2 error.
RELATIVE = frozenset({Figure.REL_L2, Figure.BULK, Figure.WITHOUT_NOISE, Figure.AROUND_ZERO})
_IS_RELATIVE = np.array([figure in RELATIVE for figure in FIGURES])
_REL_L2 = FIGURE_NUMBERS[Figure.REL_L2]
_OTHERWISE = RULE_NUMBERS[Rule.WRITTEN_OTHERWISE]


class Update(NamedTuple):
    """Change of a parameter by an optimizer in a step, both sides.

    Attributes:
        error: ``||c - r||``.
        size: the larger norm of the two sides.
        passed: True if the error was allowed.
    """

    error: float = 0.0
    size: float = 0.0
    passed: bool = True


NO_UPDATE = Update()


class Form(NamedTuple):
    """Two ways to write a tensor.

    Attributes:
        rule: the rule by which the tensor passed.
        ratio: the candidate's norm as a multiple of the reference's.
    """

    rule: Rule
    ratio: float


#: The key of a tensor in every step: layer, stage, slot, call.
Site = tuple[str, str, str, int]
_FORMS = frozenset({Rule.WRITTEN_OTHERWISE, Rule.GIVEN_OTHERWISE, Rule.SCALED})


@dataclass(frozen=True)
class Drift:
    """Distance of two runs in a compared step.

    Attributes:
        step: number of the step.
        stages: largest relative L2 error of each stage but ``input``, over passed diffs whose limit is at most
            `GROWN_AT_MOST`; running statistics and tensors of loss functions are left out.
        weights: ``||c - r||`` of each weight.
        updates: error of each update; several updates in one step are added up.
        gain: largest ratio so far of the outputs' error to the error at the start of the step. For equal weights, the
            amplification of the rounding of single numbers by the layers.
        known: True if all trainable weights are recorded; otherwise the error at the start of a step is unknown.
        unseen: relative error of all weights together that may lie outside their samples.
        unseen_each: contribution of this step to `unseen`, assumed for each later step, too.
        typical: median relative L2 error of the outputs (``forward``) and of the updates (``update``).
        rounding: relative error of rounding one number of the coarsest outputs.
        element: root of the share of one element in the smallest output whose shape differs from the last output's.
        ratio: largest absolute median ratio, less 1, of the gradients or updates of a step so far
            (`ScaleErrors.ratio`).
        began: norm of each of the reference's weights in the first compared step that has the weight.
        numbers: norm that each gradient, input and output of one number had lately.
        equal: True if both sides begin the next step equal, whatever its number: the step is judged as step 0.
        inputs: largest relative L2 error of the inputs that passed.
        losses: slots and calls of the tensors of loss functions that were within their limits in the first step.
        forms: tensors that both sides write in different ways, as steps showed in which all gradients agreed.
    """

    step: int = -1
    stages: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[Key, float] = field(default_factory=dict)
    updates: Mapping[Key, Update] = field(default_factory=dict)
    gain: float = 0.0
    known: bool = True
    unseen: float = 0.0
    unseen_each: float = 0.0
    typical: Mapping[str, float] = field(default_factory=dict)
    rounding: float = 0.0
    element: float = 0.0
    ratio: float = 0.0
    began: Mapping[Key, float] = field(default_factory=dict)
    numbers: Mapping[Key, float] = field(default_factory=dict)
    equal: bool = False
    inputs: float = 0.0
    losses: frozenset[tuple[str, int]] = frozenset()
    forms: Mapping[Site, Form] = field(default_factory=dict)

    def steps_before(self, step: int) -> int:
        """Return the number of steps, compared or not, that may have moved the runs apart before this step."""
        return 0 if self.equal else step

    def weight_error(self, key: Key, step: int, size: float, elements: int) -> tuple[float, bool]:
        """Return the allowed L2 error of a weight in a later step, given its error and its update's error in this step.

        Only this step limits the uncompared steps in between: the weight's error in the later step must not excuse
        itself.

        Args:
            size: norm of the reference's update in the later step.
            elements: number of elements of the weight.

        Returns:
            The error; and True if the error is the complete limit, because weight and update are both known in this
            step.
        """
        weight_error, steps = self.weights.get(key), step - self.step
        if weight_error is None or steps < 1:
            return 0.0, False
        error, before, _ = self.updates.get(key, NO_UPDATE)
        if before > 0:
            share, largest = error / before, max(before, size)
            # In each step a few elements may be wholly different.
            weight_error += (steps - 1) * UNRELATED * largest * math.sqrt(min(few(elements) / max(elements, 1), 1.0))
            weight_error += sum(
                min(GROWTH * share + UNSEEN_KINKS * k, UNRELATED) * largest for k in range(1, min(steps, _LONG))
            )
            weight_error += max(steps - _LONG, 0) * UNRELATED * largest
        return weight_error + error, key in self.updates

    def remembered(self, key: Key, step: int, weight: float | None) -> float:
        """Return the allowed L2 error of an update in a later step, due to the optimizer's memory of earlier steps.

        Momentum carries on the errors of the last updates. Errors of updates in uncompared steps show in the weight
        that these updates changed.

        Args:
            weight: L2 error of the weight in the later step; `None` if unknown.
        """
        update = self.updates.get(key, NO_UPDATE)
        # An error that failed in its step does not excuse later errors.
        error = update.error if update.passed else 0.0
        if weight is not None and step - self.step > 1 and key in self.weights:
            error += max(weight - self.weights[key], 0.0)
        return error

    def typical_gap(self, step: int) -> float:
        """Return the typical error of weights in a later step, in updates, beyond the error explained by this step."""
        share, outputs = self.typical.get("update", 0.0), max(self.typical.get("forward", 0.0), self.rounding)
        total = 0.0
        for k in range(1, min(step - self.step, _LONG)):
            growth = GROWTH**k
            kinks = self.element + TYPICAL_KINKS * math.sqrt(min(growth * outputs, 1.0))
            total += min(growth * share + TYPICALLY_OFF + kinks, UNRELATED)
        return total + max(step - self.step - _LONG, 0) * UNRELATED

    def unseen_in(self, step: int) -> float:
        """Return `unseen` for a later step."""
        return self.unseen + self.unseen_each * max(step - self.step, 0)


#: Drift before the first step of a comparison.
NONE = Drift()
#: Drift before a step that both sides begin equal.
EQUAL = Drift(equal=True)


@np.errstate(all="ignore")
def drift(diffs: Sequence[Diff], before: Drift = NONE, known: bool = True) -> Drift:
    """Return the drift at a step, given its judged diffs and the drift at the step compared before.

    Args:
        known: see `Drift`.
    """
    diffs = StepDiffs.from_diffs(diffs)
    sites, rows, facts = diffs.sites, diffs.rows, diffs.sites.fact(SiteFacts)
    step = diffs.number if diffs.number is not None else before.step
    used = diffs.known & np.isfinite(rows["l2"])
    followed = ~(facts.running | facts.of_loss)
    # What is written in another way says nothing about rounding.
    passed = used & rows["passed"] & _IS_RELATIVE[rows["figure"]] & (rows["rule"] != _OTHERWISE)
    # Limits of estimates include a multiple of their spread.
    ordinary = passed & followed & (rows["limit"] <= GROWN_AT_MOST * (1 + SURE * rows["spread"]))
    largest = sites.largest_of_stages(np.where(ordinary, np.fmax(rows["value"], 0.0), -1.0))
    stages = {stage: error for stage, error in largest.items() if error >= 0 and stage != "input"}
    places = sites.places["forward"]
    places = places[(passed & (rows["figure"] == _REL_L2))[places]]
    outputs = float(rows["value"][places].max(initial=0.0))
    rounding = float(facts.rounding[places].max(initial=0.0))

    batches = sites.places["input"]
    batches = batches[(ordinary & ~sites.derived)[batches]]
    places = sites.places["weight"]
    places = places[used[places]]
    weights: dict[Key, float] = {}
    for place, error in zip(places.tolist(), rows["l2"][places].tolist()):
        key = sites.keys[place]
        weights[key] = max(weights.get(key, 0.0), error)
    began = before.began
    scale = float((rows["reference_l2"][places[~(facts.running | facts.of_loss)[places]]] ** 2).sum())
    if any(key not in began for key in weights):
        new = [place for place in places[followed[places]].tolist() if sites.keys[place] not in began]
        began = {**{sites.keys[place]: float(rows["reference_l2"][place]) for place in reversed(new)}, **began}

    places = sites.places["update"]
    places = places[(used & ~facts.of_loop)[places]]
    sizes = np.maximum(rows["reference_l2"], rows["candidate_l2"])[places]
    updates = _updates([sites.keys[place] for place in places.tolist()], rows[places], sizes)
    # An adaptive optimizer turns rounding in a few elements into updates of full size.
    sampled = is_sampled(diffs)[places] & (facts.rounding[places] > 0)
    unseen = float(((facts.update_noise[places] * sizes)[sampled] ** 2).sum())

    each = math.sqrt(unseen / scale) if scale > 0 else 0.0
    unseen = before.unseen_in(step)
    start = rounding + diffs.figure_fact(apart_at_start).error(unseen)
    gain = before.gain
    if start > 0 and (known or before.step < 0):
        gain = max(gain, outputs / start)
    errors_by_stage = {stage: scale_errors(diffs, stage) for stage in ("forward", "grad", "update")}
    typical = {stage: errors_by_stage[stage].typical_error for stage in ("forward", "update")}
    inner = errors_by_stage["forward"].size[sites.fact(_inner)[errors_by_stage["forward"].places]]
    element = math.sqrt(1 / inner.min()) if len(inner) else before.element
    ratio = max(before.ratio, *(abs(errors_by_stage[stage].typical_ratio) for stage in ("grad", "update")))
    return Drift(
        step,
        stages,
        weights,
        updates,
        gain,
        known,
        unseen,
        each,
        typical,
        rounding,
        element,
        ratio,
        began,
        numbers_of(diffs, before.numbers),
        inputs=float(rows["value"][batches].max(initial=0.0)),
        losses=before.losses if before.step >= 0 else _losses_within(diffs, facts.of_loss),
        forms=_forms(diffs, before.forms),
    )


def site_of(diff: Diff) -> Site:
    """Return the key of a diff's tensor, which is the same in every step."""
    anchor = diff.pair.anchor
    return anchor.layer, anchor.stage, anchor.slot, anchor.call


def ratio_of(diff: Diff) -> float:
    """Return the candidate's norm as a multiple of the reference's; NaN if one of them is not known, or zero."""
    figures = diff.figures
    return figures.candidate_l2 / figures.reference_l2 if figures is not None and figures.reference_l2 else math.nan


def _forms(diffs: StepDiffs, before: Mapping[Site, Form]) -> Mapping[Site, Form]:
    """Return the tensors that both sides write in different ways, if the rest of the step agrees."""
    if not diffs.passed:
        return before
    numbers = [RULE_NUMBERS[rule] for rule in _FORMS]
    # Labels that differ where the loss agrees are chosen anew in each step.
    facts = diffs.sites.fact(SiteFacts)
    is_written = np.isin(diffs.rows["rule"], numbers) & ~(facts.exact & facts.of_loss)
    written = [diffs[place] for place in np.flatnonzero(is_written).tolist()]
    new = {site_of(d): Form(d.judgement.rule, ratio_of(d)) for d in written if d.judgement is not None}
    return {**before, **new} if new else before


def _losses_within(diffs: StepDiffs, of_loss: np.ndarray) -> frozenset[tuple[str, int]]:
    """Return the slots and calls of the tensors of loss functions that passed by their own limits."""
    places = np.flatnonzero(of_loss & diffs.rows["passed"] & diffs.compared)
    anchors = [diff.pair.anchor for diff in map(diffs.__getitem__, places.tolist()) if not was_excused(diff)]
    return frozenset((anchor.slot, anchor.call) for anchor in anchors)


def was_excused(diff: Diff) -> bool:
    """Return True if a tensor passed as the same in another form: its error is no rounding."""
    return diff.judgement is not None and diff.judgement.rule in (Rule.WRITTEN_OTHERWISE, Rule.GIVEN_OTHERWISE)


def _updates(keys: list[Key], rows: np.ndarray, sizes: np.ndarray) -> dict[Key, Update]:
    """Return the change of each parameter; several updates of one parameter in a step are added up."""
    values = map(Update, rows["l2"].tolist(), sizes.tolist(), rows["passed"].tolist())
    by_key: dict[Key, Update] = {}
    for key, update in zip(keys, values):
        first = by_key.get(key)
        if first is not None:
            update = Update(first.error + update.error, first.size + update.size, first.passed and update.passed)
        by_key[key] = update
    return by_key


def _inner(sites: PairSchema) -> np.ndarray:
    """Return a mask of the outputs whose shape differs from the last output's shape."""
    forward = sites.places["forward"].tolist()
    last = sites.shapes[forward[-1]] if forward else ()
    return np.array([shape != last for shape in sites.shapes], np.bool_)


def with_caveat(first: FirstDiff, coverage: Coverage) -> FirstDiff:
    """Return the first diff, with a caveat if the runs had drifted far apart before.

    Weights need no caveat, because the step before explains them, nor do inputs, which come from outside.
    """
    since = coverage.amplified
    if since is None or since >= first.step or first.stage in ("input", "weight"):
        return first
    caveat = (
        f"But from step {since} on outputs are more than a tenth of themselves apart, as this training amplifies "
        "rounding: this may be more of that."
    )
    return replace(first, caveat=caveat)


_NOWHERE = np.zeros(0, np.intp)


def agreeing(found: ScaleErrors, floor: float) -> tuple[np.ndarray, float]:
    """Return the indices of the tensors that share a ratio above ``floor``, and the ratio.

    There are no indices unless most tensors of the stage share the ratio.
    """
    ratio = found.typical_ratio
    if len(found.places) < 2 or abs(ratio) <= floor:
        return _NOWHERE, ratio
    alike = found.mostly_ratio & (np.abs(found.ratio - ratio) <= limits.ALIKE * abs(ratio))
    return (found.places[alike] if alike.sum() >= limits.MOST_OF_THEM * len(found.places) else _NOWHERE), ratio


class Decay(NamedTuple):
    """Common relative growth of weights on one side.

    Attributes:
        places: indices of the weights.
        ratio: the relative growth.
        limit: growth that chance explains.
    """

    places: np.ndarray
    ratio: float
    limit: float


def common_growth(found: ScaleErrors, floor: float) -> Decay | None:
    """Return a common growth of the weights that chance does not explain, or `None`.

    The standard error of each weight's growth is its error over the root of its number of elements; the best common
    growth is the mean weighted by these. A different weight decay causes such a growth; rounding and different
    gradients do not.
    """
    # The mean can't exceed the largest ratio.
    if not len(found.places) or np.abs(found.ratio).max() <= floor:
        return None
    found = found.where(found.error > 0)
    if len(found.places) < limits.FEWEST:
        return None
    sigma = found.error / np.sqrt(found.size) + limits.NORMS
    total = float((sigma**-2).sum())
    ratio = float((found.ratio / sigma**2).sum()) / total
    # If the values scatter more than their standard errors say, the mean is less certain, too.
    squares = float((((found.ratio - ratio) / sigma) ** 2).sum())
    scatter = max(1.0, math.sqrt(squares / (len(found.places) - 1)))
    limit = max(floor, limits.DECAY_SURE * scatter / math.sqrt(total))
    alike = np.abs(found.ratio - ratio) <= np.maximum(limits.SURE * sigma, abs(ratio) / 2)
    if abs(ratio) <= limit or alike.sum() < limits.MOST_OF_THEM * len(found.places):
        return None
    return Decay(found.places[alike & (found.ratio * ratio > 0)], ratio, limit)


def numbers_of(diffs: StepDiffs, before: Mapping[Key, float]) -> dict[Key, float]:
    """Return the norm of each gradient, input and output of one number, or half of what it was if that is larger.

    A sum passes zero, and the rounding of its terms does not. Of several calls, the largest number counts.
    """
    numbers = diffs.figure_fact(_numbers_here)
    return {**numbers, **{key: max(numbers.get(key, 0.0), number / 2) for key, number in before.items()}}


def _numbers_here(diffs: StepDiffs) -> dict[Key, float]:
    sites = diffs.sites
    places = np.concatenate([sites.places[stage] for stage in ("input", "forward", "grad")])
    of_loop = sites.fact(SiteFacts).of_loop[places]
    places = places[diffs.known[places] & (diffs.rows["size"][places] == 1) & ~of_loop]
    numbers: dict[Key, float] = {}
    for place, norm in zip(places.tolist(), diffs.rows["reference_l2"][places].tolist()):
        key = sites.keys[place]
        numbers[key] = max(numbers.get(key, 0.0), norm)
    return numbers


def failed(diffs: StepDiffs, places: np.ndarray, limit: float) -> StepDiffs:
    """Return the diffs, with those at the given indices failed for their common ratio."""
    if not len(places):
        return diffs
    places = places[(diffs.rows["passed"] & diffs.measured)[places]]
    ratios = np.abs(ratios_of(diffs.rows[places]))
    return diffs.with_failures(
        {place: (Figure.RATIO, ratio, limit, Rule.SYSTEMATIC) for place, ratio in zip(places.tolist(), ratios.tolist())}
    )


class Start(NamedTuple):
    """Facts about a step that the search for systematic errors needs.

    Attributes:
        factor: multiplier of all limits.
        noise: mask of the diffs of parameters whose gradients are rounding noise.
        inherited: relative error at the start of the step.
        before: drift at the step before.
    """

    factor: float
    noise: np.ndarray
    inherited: float
    before: Drift


def without_systematic(diffs: StepDiffs, start: Start) -> StepDiffs:
    """Return a step's judged diffs, with diffs that share a systematic error failed."""
    if not (diffs.rows["passed"] & diffs.measured & (diffs.rows["l2"] != 0)).any():
        return diffs
    dtypes = diffs.sites.fact(SiteFacts).coarsest
    result = _apart_alike(_grown_alike(diffs, start), start)
    if start.inherited < limits.MOST:
        result = _outputs(result, start, dtypes["forward"])
    larger, explained = 0.0, limits.OF_OUTPUTS * _last_error(result)
    # Steps that were not compared move the losses apart, and with them all gradients alike.
    gap = max(1, (diffs.number or 0) - start.before.step) if start.before.step >= 0 else 1
    for stage in ("backward", "grad", "update"):
        stage_offs = scale_errors(result, stage, start.noise)
        # The ratio of earlier stages, and of momentum from earlier steps, is not new in this stage.
        inherited_ratio = max(explained, 2 * larger, 2 * start.before.ratio if stage == "update" else 0.0)
        floor = start.factor * (min(gap, limits.MOST_GAP) * limits.ratio_floor(dtypes[stage]) + inherited_ratio)
        alike, ratio = agreeing(stage_offs, floor)
        result = failed(result, alike, floor)
        larger = max(larger, abs(ratio))
        if len(stage_offs.places):
            # Clipping by a norm hands the norm's error on to all gradients as one ratio.
            explained = limits.OF_NORM * stage_offs.typical_error if start.inherited else 0.0
    return result


def _apart_alike(diffs: StepDiffs, start: Start) -> StepDiffs:
    """Fail weights that, over uncompared steps, mostly moved further apart than updates of such a run can explain.

    A single weight may do so: in some step a value crosses a kink, or a few elements of an adaptive optimizer's update
    flip. If most weights do so at once, the updates differ.
    """
    before, step, rows, keys = start.before, diffs.number or 0, diffs.rows, diffs.sites.keys
    if before.step < 0 or step - before.step < 2:
        return diffs
    places = diffs.sites.places["update"]
    places = places[diffs.known[places]]
    sizes = dict(zip([keys[place] for place in places.tolist()], rows["reference_l2"][places].tolist()))
    shares: dict[int, tuple[float, float, float]] = {}
    weight_offs = scale_errors(diffs, "weight", start.noise)
    errors = rows["l2"][weight_offs.places] / (1 + limits.SURE * weight_offs.spread)
    for place, error in zip(weight_offs.places.tolist(), errors.tolist()):
        key = keys[place]
        update = before.updates.get(key)
        if update is None or key not in before.weights:
            continue
        explained, size = before.weights[key] + update.error, max(update.size, sizes.get(key, 0.0))
        if size > 0:
            shares[place] = max(error - explained, 0.0) / size, explained, size
    if len(shares) < limits.FEWEST:
        return diffs
    most = start.factor * before.typical_gap(step)
    if statistics.median(share for share, _, _ in shares.values()) <= most:
        return diffs
    apart = {}
    for place, (share, explained, size) in shares.items():
        if rows["passed"][place] and share > most:
            reference = float(rows["reference_l2"][place])
            value, limit = float(rows["l2"][place]) / reference, (explained + most * size) / reference
            apart[place] = Figure.REL_L2, value, limit, Rule.SYSTEMATIC
    return diffs.with_failures(apart)


def _outputs(diffs: StepDiffs, start: Start, dtype: str) -> StepDiffs:
    """Fail outputs that are a multiple of the reference's outputs, beyond rounding and the error at the start."""
    floor = start.factor * (limits.ratio_floor(dtype) + limits.GAIN["forward"] * start.inherited)
    output_offs = scale_errors(diffs, "forward")
    places, ratios = output_offs.places, np.abs(output_offs.ratio)
    # A limit of 1 or more means that the tensor is rounding noise; other variances make outputs larger or smaller.
    rounding = diffs.rows["limit"][places] >= 1
    untaught, layers = diffs.sites.fact(SiteFacts).untaught, diffs.sites.layers
    of_statistics = limits.GROWTH * diffs.figure_fact(statistics_apart)
    explained = np.array([layers[place] in untaught for place in places.tolist()], bool) & (ratios <= of_statistics)
    return failed(diffs, places[output_offs.mostly_ratio & (ratios > floor) & ~rounding & ~explained], floor)


def _last_error(diffs: StepDiffs) -> float:
    """Return the relative error of the step's last output, the input of the loss and of the loss's gradient."""
    places = diffs.sites.places["forward"]
    places = places[diffs.known[places]]
    error = float(diffs.relative[places[-1]]) if len(places) else 0.0
    return error if math.isfinite(error) else 0.0


def _grown_alike(diffs: StepDiffs, start: Start) -> StepDiffs:
    """Fail weights that grew or shrank by a common share on one side; matrices and vectors are checked separately."""
    if not diffs.number:
        return diffs
    weight_offs = scale_errors(diffs, "weight", start.noise)
    are_vectors = diffs.sites.fact(SiteFacts).vectors[weight_offs.places]
    result = diffs
    for which in (~are_vectors, are_vectors):
        subset = weight_offs.where(which)
        decay = common_growth(subset, start.factor * _growth_floor(diffs, subset, start))
        if decay is not None:
            result = failed(result, decay.places, decay.limit)
    return result


def _growth_floor(diffs: StepDiffs, weights: ScaleErrors, start: Start) -> float:
    """Return the common growth that rounding explains.

    Causes are the rounding of the decay factor in each step, and updates with a common ratio on growing weights.
    """
    before, number = start.before, diffs.number or 0
    explained = 2 * number * float(diffs.sites.fact(SiteFacts).rounding[weights.places].max(initial=0.0))
    ratio = max(before.ratio, limits.BIAS_CORRECTION if number > before.step + 1 else 0.0)
    if not ratio:
        return explained
    keys = diffs.sites.keys
    sizes = zip(weights.places.tolist(), diffs.rows["reference_l2"][weights.places].tolist())
    grown = [(size, before.began[keys[place]]) for place, size in sizes if keys[place] in before.began]
    # A weight that began at zero is the sum of its updates, and has their ratio.
    shares = [abs(math.log(size / began)) if began > 0 else 1.0 for size, began in grown]
    return explained + limits.OF_GROWTH * ratio * (statistics.median(shares) if shares else 0.0)
