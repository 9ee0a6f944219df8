"""How far two runs have drifted apart by a step: what the next step that is compared may start from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from padiff.compare.measure.arrays import few
from padiff.model import equivalents
from padiff.records import LOOP, STAGES, Coverage, Diff, Figure, Figures, FirstDiff
from padiff.sketches.sketch import ELEMENTS

# Relative L2 error that two correct implementations may show in a step that starts from equal weights, by the
# coarsest dtype of the step. Measured on clean torch / paddle pairs (see benchmarks/noise.py), with room to spare.
_ALLOWED = {
    #            input   weight  forward loss    backward grad   update
    "float64": (1e-12, 1e-12, 1e-10, 1e-10, 1e-9, 1e-9, 1e-6),
    "float32": (1e-6, 1e-6, 2e-5, 2e-5, 1e-2, 3e-2, 1e-2),
    "float16": (1e-3, 1e-3, 5e-3, 5e-3, 2e-2, 2e-2, 1e-1),
    "bfloat16": (8e-3, 8e-3, 4e-2, 4e-2, 1e-1, 1e-1, 3e-1),
}
_STAGE = {name: k for k, name in enumerate(STAGES)}
#: Dtypes with the relative error of rounding one number.
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
COARSENESS = tuple(_ROUNDING)
# What the halves of a complex number are.
_HALVES = {"complex64": "float32", "complex128": "float64"}

#: How much larger than in the step compared before the diffs of a stage may be: rounding that training amplifies.
#: Up to the last: two gradients of a converged training may have nothing left in common but their size.
GROWTH, GROWN_AT_MOST = 5.0, 3.0
#: Two unrelated vectors of one norm are sqrt(2) of it apart: the size of an update that rounding noise steered.
UNRELATED = 2.5
# Share of itself by which an update may be off, besides, for each step since the last one that was compared. In nets
# with ReLUs, rounding moves a value across a kink in some step, and what follows drifts apart: over gaps of 2, 3, 5, 10
# and 15 steps, weights of clean twins were off by 0.05, 0.12, 0.22, 2.7 and 4.5 updates more than the step before the
# gap says.
_UNSEEN_KINKS = 0.2
# From so many steps on updates may be unrelated.
_LONG = math.ceil(UNRELATED / _UNSEEN_KINKS)
#: Standard deviations by which an estimate has to be beyond its limit.
SURE = 3.0
#: A BatchNorm's statistics of the training so far. What training computes does not come from them.
RUNNING = frozenset({"running_mean", "running_var"})

#: Figures that are relative L2 errors.
RELATIVE = frozenset({Figure.REL_L2, Figure.BULK, Figure.WITHOUT_NOISE, Figure.AROUND_ZERO})
#: Relative error of all weights together beyond which runs do not drift any more: they are apart.
MOST = 1e-2

#: A parameter: its layer and slot.
Key = tuple[str, str]


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
    """

    step: int = -1
    stages: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[Key, float] = field(default_factory=dict)
    updates: Mapping[Key, Update] = field(default_factory=dict)
    gain: float = 0.0
    known: bool = True
    unseen: float = 0.0
    unseen_each: float = 0.0

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
        error, before, _ = self.updates.get(key, Update())
        if before > 0:
            share, largest = error / before, max(before, size)
            # In each step a few elements may be wholly different.
            own += (steps - 1) * UNRELATED * largest * math.sqrt(min(few(elements) / max(elements, 1), 1.0))
            own += sum(
                min(GROWTH * share + _UNSEEN_KINKS * k, UNRELATED) * largest for k in range(1, min(steps, _LONG))
            )
            own += max(steps - _LONG, 0) * UNRELATED * largest
        return own + error, key in self.updates

    def remembered(self, key: Key, step: int, weight: Figures | None) -> float:
        """How far off (L2) an update may be in a later step for what its optimizer remembers of the steps before.

        Momentum hands on what the last updates were off by. What those of steps that were not compared were off by
        shows in the weight, which they changed.

        Args:
            weight: the weight's figures in the later step.
        """
        update = self.updates.get(key, Update())
        # What was not allowed then excuses nothing now.
        error = update.error if update.passed else 0.0
        if weight is not None and step - self.step > 1 and key in self.weights:
            error += max(weight.l2 - self.weights[key], 0.0)
        return error

    def unseen_in(self, step: int) -> float:
        """`unseen`, in a later step."""
        return self.unseen + self.unseen_each * max(step - self.step, 0)


#: Of a comparison's first step.
NONE = Drift()


def drift(diffs: Sequence[Diff], before: Drift = NONE, known: bool = True) -> Drift:
    """How far the runs are apart in a step, given its judged diffs and the step that was compared before it.

    Args:
        known: see `Drift`.
    """
    stages: dict[str, float] = {}
    weights: dict[Key, float] = {}
    updates: dict[Key, Update] = {}
    scale = unseen = outputs = 0.0
    rounding = 0.0
    for diff in diffs:
        figures, stage, key = diff.figures, diff.pair.stage, key_of(diff)
        if figures is None or not diff.compared or not math.isfinite(figures.l2):
            continue
        judged = diff.judgement
        # Without what an estimate was allowed beyond its limit.
        limited = judged is not None and judged.limit <= GROWN_AT_MOST * (1 + SURE * figures.spread)
        ordinary = equivalents.slot(diff.pair.anchor.slot) not in RUNNING and stage != "input"
        if judged is not None and diff.passed and judged.figure in RELATIVE and limited and ordinary:
            stages[stage] = max(stages.get(stage, 0.0), judged.value)
        if judged is not None and stage == "forward" and diff.passed and judged.figure is Figure.REL_L2:
            outputs = max(outputs, judged.value)
            rounding = max(rounding, _ROUNDING.get(coarse(diff.pair.anchor.dtype), 0.0))
        if stage == "weight":
            weights[key] = max(weights.get(key, 0.0), figures.l2)
            if ordinary:
                scale += figures.reference_l2**2
        elif stage == "update" and key[0] != LOOP:
            size = max(figures.reference_l2, figures.candidate_l2)
            before_it = updates.get(key, Update())
            passed = before_it.passed and diff.passed
            updates[key] = Update(before_it.error + figures.l2, before_it.size + size, passed)
            if is_sampled(diff) and coarse(diff.pair.anchor.dtype) in COARSENESS:
                # An adaptive optimizer turns rounding in a few elements into updates of full size.
                unseen += (allowed(coarse(diff.pair.anchor.dtype), "update") * size) ** 2
    step = diffs[0].pair.step if diffs else before.step
    each = math.sqrt(unseen / scale) if scale > 0 else 0.0
    unseen = before.unseen_in(step)
    start = rounding + inherited(diffs, unseen)
    gain = before.gain
    if start > 0 and (known or before.step < 0):
        gain = max(gain, outputs / start)
    return Drift(step, stages, weights, updates, gain, known, unseen, each)


def inherited(diffs: Iterable[Diff], unseen: float = 0.0) -> float:
    """Relative L2 error that a step starts with: of all weights together, plus the largest of an input.

    Args:
        unseen: what to add where samples are all that is known of a weight.
    """
    squares = scale = inputs = 0.0
    sampled = False
    for diff in diffs:
        if diff.figures is None or not diff.compared or coarse(diff.pair.anchor.dtype) not in COARSENESS:
            continue
        if equivalents.slot(diff.pair.anchor.slot) in RUNNING:
            continue  # they may be n / (n - 1) apart
        if diff.pair.stage == "weight":
            squares += diff.figures.l2**2
            scale += diff.figures.reference_l2**2
            sampled = sampled or is_sampled(diff)
        elif diff.pair.stage == "input" and math.isfinite(diff.figures.rel_l2):
            inputs = max(inputs, diff.figures.rel_l2)
    weights = math.sqrt(squares / scale) if scale > 0 else 0.0
    return min(weights + (unseen if sampled else 0.0) + inputs, MOST)


def doubted(first: FirstDiff, coverage: Coverage) -> FirstDiff:
    """The first diff, with a word that it may be nothing but drift where the runs were far apart before.

    Weights are explained by the step before, however far apart the runs are, and inputs come from outside.
    """
    since = coverage.amplified
    if since is None or since >= first.step or first.stage in ("input", "weight"):
        return first
    doubt = (
        f"But from step {since} on outputs are more than a tenth of themselves apart, as this training amplifies "
        "rounding: this may be more of that."
    )
    return replace(first, doubt=doubt)


def allowed(dtype: str, stage: str) -> float:
    """Relative L2 error that rounding explains in a step that starts from equal weights."""
    return _ALLOWED[dtype][_STAGE[stage]]


def coarse(dtype: str) -> str:
    """The real dtype that a dtype's numbers are."""
    return _HALVES.get(dtype, dtype)


def is_sampled(diff: Diff) -> bool:
    """Whether only some of the tensor's elements were looked at."""
    figures = diff.figures
    return figures is not None and figures.basis != "tensors" and figures.size > ELEMENTS


def key_of(diff: Diff) -> Key:
    """The parameter that a diff is of."""
    return diff.pair.anchor.layer, diff.pair.anchor.slot
