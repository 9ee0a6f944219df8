"""How far two runs have drifted apart by a step: what the next step that is compared may start from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from padiff.compare.judge.block_facts import apart_at_start, is_sampled
from padiff.compare.judge.limits import (
    GROWN_AT_MOST,
    GROWTH,
    SURE,
    TYPICAL_KINKS,
    TYPICALLY_OFF,
    UNRELATED,
    UNSEEN_KINKS,
)
from padiff.compare.judge.siblings import offs
from padiff.compare.judge.site_facts import SiteFacts
from padiff.compare.measure.arrays import few
from padiff.records import Coverage, Diff, Figure, FirstDiff
from padiff.records.block import Block
from padiff.records.rows import FIGURE_NUMBERS, FIGURES
from padiff.records.sites import Key, Sites
from padiff.records.step_diffs import StepDiffs

# From so many steps on updates may be unrelated.
_LONG = math.ceil(UNRELATED / UNSEEN_KINKS)
#: Figures that are relative L2 errors.
RELATIVE = frozenset({Figure.REL_L2, Figure.BULK, Figure.WITHOUT_NOISE, Figure.AROUND_ZERO})
_IS_RELATIVE = np.array([figure in RELATIVE for figure in FIGURES])
_REL_L2 = FIGURE_NUMBERS[Figure.REL_L2]


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

    def remembered(self, key: Key, step: int, weight: float | None) -> float:
        """How far off (L2) an update may be in a later step for what its optimizer remembers of the steps before.

        Momentum hands on what the last updates were off by. What those of steps that were not compared were off by
        shows in the weight, which they changed.

        Args:
            weight: how far off (L2) the weight is in the later step; `None`: not known.
        """
        update = self.updates.get(key, NO_UPDATE)
        # What was not allowed then excuses nothing now.
        error = update.error if update.passed else 0.0
        if weight is not None and step - self.step > 1 and key in self.weights:
            error += max(weight - self.weights[key], 0.0)
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


@np.errstate(all="ignore")
def drift(diffs: Sequence[Diff], before: Drift = NONE, known: bool = True) -> Drift:
    """How far the runs are apart in a step, given its judged diffs and the step that was compared before it.

    Args:
        known: see `Drift`.
    """
    diffs = StepDiffs.of(diffs)
    sites, rows, facts = diffs.sites, diffs.rows, diffs.sites.fact(SiteFacts)
    step = diffs.number if diffs.number is not None else before.step
    moved, number = diffs.block.fact(_Moved), diffs.in_block
    used = moved.used[number]
    followed = ~(facts.running | facts.of_loss)
    passed = used & rows["passed"] & _IS_RELATIVE[rows["figure"]]
    # Without what an estimate was allowed beyond its limit.
    ordinary = passed & followed & (rows["limit"] <= GROWN_AT_MOST * (1 + SURE * rows["spread"]))
    largest = sites.largest_of_stages(np.where(ordinary, np.fmax(rows["value"], 0.0), -1.0))
    stages = {stage: error for stage, error in largest.items() if error >= 0 and stage != "input"}
    places = sites.places["forward"]
    places = places[(passed & (rows["figure"] == _REL_L2))[places]]
    outputs = float(rows["value"][places].max(initial=0.0))
    rounding = float(facts.rounding[places].max(initial=0.0))

    places = sites.places["weight"]
    places = places[used[places]]
    weights: dict[Key, float] = {}
    for place, error in zip(places.tolist(), rows["l2"][places].tolist()):
        key = sites.keys[place]
        weights[key] = max(weights.get(key, 0.0), error)
    scale, began = moved.scale[number], before.began
    if any(key not in began for key in weights):
        new = [place for place in places[followed[places]].tolist() if sites.keys[place] not in began]
        began = {**{sites.keys[place]: float(rows["reference_l2"][place]) for place in reversed(new)}, **began}

    places = sites.places["update"]
    places = places[(used & ~facts.of_loop)[places]]
    unseen = moved.unseen[number]
    updates = _updates([sites.keys[place] for place in places.tolist()], rows[places], moved.sizes[number, places])

    each = math.sqrt(unseen / scale) if scale > 0 else 0.0
    unseen = before.unseen_in(step)
    start = rounding + diffs.block.fact(apart_at_start)[number].error(unseen)
    gain = before.gain
    if start > 0 and (known or before.step < 0):
        gain = max(gain, outputs / start)
    found = {stage: offs(diffs, stage) for stage in ("forward", "grad", "update")}
    typical = {stage: found[stage].typical_error for stage in ("forward", "update")}
    inner = found["forward"].size[sites.fact(_inner)[found["forward"].places]]
    element = math.sqrt(1 / inner.min()) if len(inner) else before.element
    ratio = max(before.ratio, *(abs(found[stage].typical_ratio) for stage in ("grad", "update")))
    return Drift(step, stages, weights, updates, gain, known, unseen, each, typical, rounding, element, ratio, began)


class _Moved:
    """How far weights were moved in each of several steps.

    Attributes:
        used: which diffs are known, and finite.
        scale: squared norm of all weights.
        sizes: the larger norm of the two sides of each diff.
        unseen: squared norm of what rounding may have made of updates where no sample looks.
    """

    def __init__(self, block: Block) -> None:
        rows, facts = block.rows, block.sites.fact(SiteFacts)
        self.used = block.known & np.isfinite(rows["l2"])
        weights = block.of_stage("weight", self.used & ~(facts.running | facts.of_loss))
        squares = block.of_stage("weight", rows["reference_l2"] ** 2)
        self.scale: list[float] = np.where(weights, squares, 0.0).sum(axis=-1).tolist()
        self.sizes = np.maximum(rows["reference_l2"], rows["candidate_l2"])
        # An adaptive optimizer turns rounding in a few elements into updates of full size.
        sampled = self.used & ~facts.of_loop & is_sampled(block) & (facts.rounding > 0)
        noise = np.where(sampled, (facts.update_noise * self.sizes) ** 2, 0.0)
        self.unseen: list[float] = block.of_stage("update", noise).sum(axis=-1).tolist()


def _updates(keys: list[Key], rows: np.ndarray, sizes: np.ndarray) -> dict[Key, Update]:
    """What optimizers did to parameters; several times to one of them in one step, all together."""
    some = map(Update, rows["l2"].tolist(), sizes.tolist(), rows["passed"].tolist())
    found: dict[Key, Update] = {}
    for key, update in zip(keys, some):
        first = found.get(key)
        if first is not None:
            update = Update(first.error + update.error, first.size + update.size, first.passed and update.passed)
        found[key] = update
    return found


def _inner(sites: Sites) -> np.ndarray:
    """Which outputs have another shape than the last one."""
    forward = sites.places["forward"].tolist()
    last = sites.shapes[forward[-1]] if forward else ()
    return np.array([shape != last for shape in sites.shapes], np.bool_)


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
