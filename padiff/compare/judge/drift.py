"""How far two runs have drifted apart by a step: what the next step that is compared may start from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from padiff.compare.judge.limits import (
    COARSENESS,
    GROWN_AT_MOST,
    GROWTH,
    MOST,
    ROUNDING,
    SURE,
    TYPICAL_KINKS,
    TYPICALLY_OFF,
    UNRELATED,
    UNSEEN_KINKS,
    allowed,
    coarse,
    is_running,
)
from padiff.compare.judge.siblings import Key, by_stage, key_of, offs, typical_error, typical_ratio
from padiff.compare.measure.arrays import few
from padiff.records import LOOP, Coverage, Diff, Figure, Figures, FirstDiff, is_of_loss
from padiff.sketches.sketch import ELEMENTS

# From so many steps on updates may be unrelated.
_LONG = math.ceil(UNRELATED / UNSEEN_KINKS)
#: Figures that are relative L2 errors.
RELATIVE = frozenset({Figure.REL_L2, Figure.BULK, Figure.WITHOUT_NOISE, Figure.AROUND_ZERO})


class Update(NamedTuple):
    """What an optimizer did to a parameter in a step, both sides.

    Attributes:
        error: ``||c - r||``.
        size: the larger norm of the two sides.
        passed: whether that was allowed.
    """

    error: float = 0.0
    size: float = 0.0
    passed: bool = True


NO_UPDATE = Update()


@dataclass(frozen=True)
class Drift:
    """How far two runs are apart in a step that was compared.

    Attributes:
        step: its number.
        stages: largest relative L2 error of each stage, over what passed and is more than noise of its own.
        weights: ``||c - r||`` of each weight.
        updates: how far each update is off; of several in one step, all together.
        gain: how many times larger outputs were off than what the step started from; the largest so far. From equal
            weights it is what the layers make of the rounding of single numbers.
        known: whether all weights that train are recorded: else what a step starts from is not known.
        unseen: relative error of all weights together that may be where no sample of them looks.
        unseen_each: by how much a step may have added to it.
        typical: median relative L2 error of the outputs, and of the updates, that passed.
        rounding: relative error of rounding one number of the coarsest outputs.
        element: root of the share that one element is of the smallest output before the last.
        ratio: the largest ratio, less 1, that gradients or updates of a step had in common so far.
        began: norms of the reference's weights in the first step that was compared.
        equal: whether both sides began the step that comes equal, whatever its number is: it is judged as step 0.
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
    equal: bool = False

    def steps_before(self, step: int) -> int:
        """How many steps, compared or not, may have moved the runs apart before this one."""
        return 0 if self.equal else step

    def weight_error(self, key: Key, step: int, size: float, elements: int) -> tuple[float, bool]:
        """How far off (L2) a weight may be in a later step, given how far off it and its update were in this one.

        Of steps in between, which were not compared, only this one says anything: how far off it is by then must not
        excuse itself.

        Args:
            size: norm of the reference's update in the later step.
            elements: how many elements the weight has.

        Returns:
            The error, and whether that is all there is to it, as it is where both are known of this step.
        """
        own, steps = self.weights.get(key), step - self.step
        if own is None or steps < 1:
            return 0.0, False
        error, before, _ = self.updates.get(key, NO_UPDATE)
        if before > 0:
            share, largest = error / before, max(before, size)
            # In each step a few elements may be wholly different.
            own += (steps - 1) * UNRELATED * largest * math.sqrt(min(few(elements) / max(elements, 1), 1.0))
            own += sum(min(GROWTH * share + UNSEEN_KINKS * k, UNRELATED) * largest for k in range(1, min(steps, _LONG)))
            own += max(steps - _LONG, 0) * UNRELATED * largest
        return own + error, key in self.updates

    def remembered(self, key: Key, step: int, weight: Figures | None) -> float:
        """How far off (L2) an update may be in a later step for what its optimizer remembers of the steps before.

        Momentum hands on what the last updates were off by. What those of steps that were not compared were off by
        shows in the weight, which they changed.

        Args:
            weight: the weight's figures in the later step.
        """
        update = self.updates.get(key, NO_UPDATE)
        # What was not allowed then excuses nothing now.
        error = update.error if update.passed else 0.0
        if weight is not None and step - self.step > 1 and key in self.weights:
            error += max(weight.l2 - self.weights[key], 0.0)
        return error

    def typical_gap(self, step: int) -> float:
        """How far off most weights may be in a later step, in updates, beyond what this step explains."""
        share, outputs = self.typical.get("update", 0.0), max(self.typical.get("forward", 0.0), self.rounding)
        total = 0.0
        for k in range(1, min(step - self.step, _LONG)):
            growth = GROWTH**k
            kinks = self.element + TYPICAL_KINKS * math.sqrt(min(growth * outputs, 1.0))
            total += min(growth * share + TYPICALLY_OFF + kinks, UNRELATED)
        return total + max(step - self.step - _LONG, 0) * UNRELATED

    def unseen_in(self, step: int) -> float:
        """`unseen`, in a later step."""
        return self.unseen + self.unseen_each * max(step - self.step, 0)


#: Of a comparison's first step.
NONE = Drift()
#: Of a step that both sides began equal.
EQUAL = Drift(equal=True)


def drift(diffs: Sequence[Diff], before: Drift = NONE, known: bool = True) -> Drift:
    """How far the runs are apart in a step, given its judged diffs and the step that was compared before it.

    Args:
        known: see `Drift`.
    """
    stages: dict[str, float] = {}
    weights: dict[Key, float] = {}
    updates: dict[Key, Update] = {}
    began = dict(before.began)
    scale = unseen = outputs = 0.0
    rounding = 0.0
    for diff in diffs:
        figures, pair = diff.figures, diff.pair
        if figures is None or not diff.compared or not math.isfinite(figures.l2):
            continue
        judged, stage, anchor = diff.judgement, pair.stage, pair.anchor
        ordinary = stage != "input" and not is_running(anchor.slot) and not is_of_loss(anchor)
        if judged is not None and diff.passed and judged.figure in RELATIVE:
            # Without what an estimate was allowed beyond its limit.
            if ordinary and judged.limit <= GROWN_AT_MOST * (1 + SURE * figures.spread):
                stages[stage] = max(stages.get(stage, 0.0), judged.value)
            if stage == "forward" and judged.figure is Figure.REL_L2:
                outputs = max(outputs, judged.value)
                rounding = max(rounding, ROUNDING.get(coarse(anchor.dtype), 0.0))
        if stage == "weight":
            key = key_of(diff)
            weights[key] = max(weights.get(key, 0.0), figures.l2)
            if ordinary:
                scale += figures.reference_l2**2
                began.setdefault(key, figures.reference_l2)
        elif stage == "update" and anchor.layer != LOOP:
            key = key_of(diff)
            size = max(figures.reference_l2, figures.candidate_l2)
            before_it = updates.get(key, NO_UPDATE)
            passed = before_it.passed and diff.passed
            updates[key] = Update(before_it.error + figures.l2, before_it.size + size, passed)
            if is_sampled(diff) and coarse(anchor.dtype) in COARSENESS:
                # An adaptive optimizer turns rounding in a few elements into updates of full size.
                unseen += (allowed(coarse(anchor.dtype), "update") * size) ** 2
    step = diffs[0].pair.step if diffs else before.step
    each = math.sqrt(unseen / scale) if scale > 0 else 0.0
    unseen = before.unseen_in(step)
    start = rounding + inherited(diffs, unseen)
    gain = before.gain
    if start > 0 and (known or before.step < 0):
        gain = max(gain, outputs / start)
    places = by_stage(diffs)
    found = {stage: offs(diffs, places, stage) for stage in ("forward", "grad", "update")}
    typical = {stage: typical_error(found[stage]) for stage in ("forward", "update")}
    last = diffs[places["forward"][-1]].pair.anchor.shape if places["forward"] else ()
    inner = [off.size for off in found["forward"] if diffs[off.place].pair.anchor.shape != last]
    element = math.sqrt(1 / min(inner)) if inner else before.element
    ratio = max(before.ratio, *(abs(typical_ratio(found[stage])) for stage in ("grad", "update")))
    return Drift(step, stages, weights, updates, gain, known, unseen, each, typical, rounding, element, ratio, began)


def inherited(diffs: Iterable[Diff], unseen: float = 0.0) -> float:
    """Relative L2 error that a step starts with: of all weights together, plus the largest of an input.

    Args:
        unseen: what to add where samples are all that is known of a weight.
    """
    squares = scale = inputs = 0.0
    sampled = False
    for diff in diffs:
        stage, figures = diff.pair.stage, diff.figures
        if stage not in ("weight", "input") or figures is None or not diff.compared:
            continue
        if coarse(diff.pair.anchor.dtype) not in COARSENESS:
            continue
        if is_running(diff.pair.anchor.slot):
            continue  # they may be n / (n - 1) apart
        if stage == "weight":
            squares += figures.l2**2
            scale += figures.reference_l2**2
            sampled = sampled or is_sampled(diff)
        elif math.isfinite(figures.rel_l2):
            inputs = max(inputs, figures.rel_l2)
    weights = math.sqrt(squares / scale) if scale > 0 else 0.0
    return min(weights + (unseen if sampled else 0.0) + inputs, MOST)


def with_caveat(first: FirstDiff, coverage: Coverage) -> FirstDiff:
    """The first diff, with a word that it may be nothing but drift where the runs were far apart before.

    Weights are explained by the step before, however far apart the runs are, and inputs come from outside.
    """
    since = coverage.amplified
    if since is None or since >= first.step or first.stage in ("input", "weight"):
        return first
    caveat = (
        f"But from step {since} on outputs are more than a tenth of themselves apart, as this training amplifies "
        "rounding: this may be more of that."
    )
    return replace(first, caveat=caveat)


def is_sampled(diff: Diff) -> bool:
    """Whether only some of the tensor's elements were looked at."""
    figures = diff.figures
    return figures is not None and figures.basis != "tensors" and figures.size > ELEMENTS
