"""The default policy: rounding noise by dtype and stage, and the drift of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff import equivalents
from padiff.compare.measure import loaded
from padiff.compare.tolerance import judged_together
from padiff.errors import UsageError
from padiff.records import LOOP, STAGES, Diff, Figures

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
_COARSENESS = ("float64", "float32", "float16", "bfloat16")
# What the halves of a complex number are.
_HALVES = {"complex64": "float32", "complex128": "float64"}

# How much of the relative error that a step starts with (weights, inputs) may be found again at each stage.
_GAIN = {
    "input": 0.0,
    "weight": 0.0,
    "forward": 100.0,
    "loss": 100.0,
    "backward": 300.0,
    "grad": 300.0,
    "update": 300.0,
}
# Where rounding moves a value across the kink of a ReLU, or to another maximum of a pool, a whole element of the
# gradient changes. The share of such elements goes with the error of forward, their L2 error with its root.
_KINKS = {"backward": 4.0, "grad": 4.0}
# However much is inherited, an error beyond this share is told: a step that far off has nothing left to compare.
_AT_MOST = {"forward": 0.1, "loss": 0.1, "backward": 0.3, "grad": 0.3, "update": 0.5}
# Weights may drift by this much of their norm with every step, up to the end of the ramp.
_DRIFT_PER_STEP, _DRIFT_STEPS = 1e-3, 100
# Two unrelated vectors of one norm are sqrt(2) of it apart: the size of an update that rounding noise steered.
_UNRELATED = 2.5
# A gradient whose bulk agrees may be off by this share in its few other elements.
_FEW_AT_MOST = 0.5
# Standard deviations by which an estimate has to be beyond its limit.
_SURE = 3.0
# Noise differs by at least this share of itself from one side to the other.
_DIFFERENT = 1e-2
# How much larger than in the step compared before the diffs of a stage may be: rounding that training amplifies.
# Up to the last: two gradients of a converged training may have nothing left in common but their size.
_GROWTH, _GROWN_AT_MOST = 5.0, 3.0
_RUNNING = frozenset({"running_mean", "running_var"})


@dataclass(frozen=True)
class NoisePolicy:
    """The default: relative L2 error against the rounding noise of dtype and stage, and the drift of the run.

    * Each stage has a limit by the coarsest floating dtype seen so far in the step.
    * A step that starts from slightly different weights or inputs (rounding noise of the steps before) may differ
      accordingly: the relative error of all weights together, and of the inputs, enters the limits of later stages.
    * Limits of gradients and updates grow with the root of the error of the outputs: kinks (ReLU, max pooling).
    * Weights may drift by the share of their updates that the update's own limit allows.
    * A gradient is judged against the largest gradient of its layer: that of a convolution's bias before a BatchNorm,
      or of an attention's key bias, is pure rounding noise. The update that an adaptive optimizer makes from such a
      gradient can't be judged, and passes unless it is of another size.
    * Diffs that grow from one compared step to the next by less than five times are rounding that training amplifies.
    * A BatchNorm's running variance: torch feeds it the unbiased, paddle the biased estimate, ``n / (n - 1)`` apart.

    Args:
        factor: all limits are multiplied by it.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise UsageError(f"factor has to be a number above 0, got {self.factor!r}")

    @property
    def elementwise(self) -> tuple[float, float] | None:
        return None

    def describe(self) -> str:
        times = "" if self.factor == 1.0 else f" times {self.factor:g}"
        return f"rounding noise by dtype, stage and drift (relative L2){times}"

    def judge(self, diffs: Sequence[Diff], before: Mapping[str, float] | None = None) -> list[Diff]:
        context = _Context(diffs, self.factor, before or {})
        return judged_together([context.judge(diff) for diff in diffs])


class _Context:
    """What has to be known of a whole step before one of its diffs can be judged."""

    def __init__(self, diffs: Sequence[Diff], factor: float, before: Mapping[str, float]) -> None:
        self._factor = factor
        self._before = before
        self._dtypes = self._coarsest(diffs)
        self._grad_scale = _rms(diffs, "grad")
        self._updates = {_key(d): d for d in diffs if d.pair.stage == "update" and d.figures is not None}
        self._update_scale = max(_rms(diffs, "update").values(), default=0.0)
        self._samples = _samples(diffs)
        grads = [d for d in diffs if d.pair.stage == "grad" and d.compared and d.figures is not None and not d.problem]
        self._steered = {_key(d) for d in grads if self._is_noise(d)}
        self._grads = {_key(d): d for d in grads}
        # What noise steered (a bias before a normalisation) shows in outputs, and cancels out before the loss.
        self._inherited = {
            "forward": _inherited(diffs),
            "later": _inherited([d for d in diffs if _key(d) not in self._steered]),
        }
        self._forward_error = self._largest_forward(diffs)
        self._kinks = self._largest_kink(diffs)
        self._grad_errors = {
            _key(d): d.figures.rel_l2 for d in grads if d.figures is not None and d.figures.l2 <= self._grad_limit(d)
        }

    @staticmethod
    def _coarsest(diffs: Sequence[Diff]) -> dict[str, str]:
        """The coarsest floating dtype up to and with each stage. Weights that are stored coarsely count too."""
        coarsest, seen = {}, 0
        for stage in _STAGE:
            for diff in diffs:
                for record in (diff.pair.reference, diff.pair.candidate):
                    dtype = _HALVES.get(record.dtype, record.dtype) if record is not None else ""
                    if record is not None and record.stage == stage and dtype in _COARSENESS:
                        seen = max(seen, _COARSENESS.index(dtype))
            coarsest[stage] = _COARSENESS[seen]
        return coarsest

    def _largest_forward(self, diffs: Sequence[Diff]) -> float:
        """Largest relative L2 error of an output, as far as it is allowed."""
        errors = (d.figures.rel_l2 for d in diffs if d.pair.stage == "forward" and d.figures and d.compared)
        limit = self._allowed("forward") + _GAIN["forward"] * self._inherited["later"]
        return max((error for error in errors if error <= limit), default=0.0)

    def _largest_kink(self, diffs: Sequence[Diff]) -> float:
        """Largest relative L2 error of an activation gradient that is off in a few elements only."""
        limit = self._relative("backward")
        errors = (
            d.figures.rel_l2
            for d in diffs
            if d.pair.stage == "backward" and d.figures is not None and d.figures.bulk_l2 is not None
            if d.figures.bulk_l2
            <= limit * d.figures.reference_l2
            < d.figures.l2
            <= _FEW_AT_MOST * d.figures.reference_l2
        )
        return max(errors, default=0.0)

    def _allowed(self, stage: str) -> float:
        return _ALLOWED[self._dtypes[stage]][_STAGE[stage]]

    def _is_noise(self, diff: Diff) -> bool:
        """Whether a gradient is nothing but rounding: tiny beside its layer's, and another on either side."""
        figures = diff.figures
        assert figures is not None
        own = max(figures.reference_l2, figures.candidate_l2)
        layer = self._grad_scale.get(diff.pair.anchor.layer, 0.0) * math.sqrt(figures.size)
        return own <= self._allowed("forward") * layer and figures.l2 > _DIFFERENT * own

    def _grad_limit(self, diff: Diff) -> float:
        assert diff.figures is not None
        scale = self._grad_scale.get(diff.pair.anchor.layer, 0.0) * math.sqrt(diff.figures.size)
        # The few elements of an activation gradient that are off are in every gradient that is made of it.
        relative = self._relative("grad") + 2 * self._factor * self._kinks
        return relative * max(diff.figures.reference_l2, scale)

    def _steered_limit(self, figures: Figures) -> float:
        # Of any direction, but not larger than the reference's updates are.
        return _UNRELATED * max(figures.reference_l2, self._update_scale * math.sqrt(figures.size))

    def _relative(self, stage: str) -> float:
        own = self._allowed(stage)
        inherited = self._inherited["forward" if stage == "forward" else "later"]
        more = _GAIN[stage] * inherited + _KINKS.get(stage, 0.0) * math.sqrt(self._forward_error)
        return self._factor * max(own, min(own + more, _AT_MOST.get(stage, own)))

    def judge(self, diff: Diff) -> Diff:
        if diff.problem or diff.figures is None:
            return diff
        figures, stage = diff.figures, diff.pair.stage
        anchor = diff.pair.anchor
        if _exact(diff):
            return replace(diff, passed=figures.max_abs == 0, limit=0.0, judged=("max_abs", figures.max_abs))
        limit = self._relative(stage) * figures.reference_l2
        if anchor.layer == LOOP:
            # A scalar that should go to zero (a loss) has no scale of its own there.
            relative = self._factor * 1e-6 if stage == "update" else self._relative(stage)
            limit = relative * max(figures.reference_l2, 1e-2 if stage == "loss" else 0.0)
        elif stage == "weight":
            limit = self._weight_limit(diff)
        elif stage == "grad":
            limit = self._grad_limit(diff)
        elif stage == "update":
            steered = _key(diff) in self._steered
            # What a gradient was allowed to be off by, its update may be, too.
            relative = self._relative(stage) + 5 * self._factor * self._grad_errors.get(_key(diff), 0.0)
            limit = self._steered_limit(figures) if steered else relative * figures.reference_l2
        if anchor.layer != LOOP or stage == "loss":
            grown = min(_GROWTH * self._before.get(stage, 0.0), _GROWN_AT_MOST)
            limit = max(limit, grown * figures.reference_l2)
        judged = self._verdict(diff, limit)
        if not judged.passed and stage in ("update", "weight"):
            return self._without_noise(judged, limit)
        return judged

    def _without_noise(self, diff: Diff, limit: float) -> Diff:
        """A diff that passes if it is all in elements whose gradients are nothing but rounding.

        A bias of query, key and value in one: the attention does not depend on the key's.
        """
        gradient = self._grads.get(_key(diff))
        steps = diff.pair.step if diff.pair.stage == "weight" else 1
        if gradient is None or not steps or gradient.figures is None or diff.figures is None:
            return diff
        if {gradient.figures.basis, diff.figures.basis} != {"tensors"}:
            return diff  # which elements are noise, a sketch does not tell
        if gradient.figures.size != diff.figures.size or len(diff.pair.anchor.shape) != 1:
            return diff
        scale = self._allowed("forward") * self._grad_scale.get(diff.pair.anchor.layer, 0.0)
        largest = np.maximum(*(np.abs(side) for side in loaded(gradient.pair)))
        noise = (largest > 0) & (largest <= scale)  # a gradient of zero on both sides is no rounding
        reference, candidate = loaded(diff.pair)
        error = candidate - reference
        count = int(noise.sum())
        allowed = _UNRELATED * self._update_scale * math.sqrt(count) * self._factor * steps
        rest = float(np.linalg.norm(error[~noise]))
        if not count or rest > limit or float(np.linalg.norm(error[noise])) > allowed:
            return diff
        size = diff.figures.reference_l2 or 1.0
        return replace(
            diff, passed=True, limit=limit / size, judged=("rel_l2 where gradients are no noise", rest / size)
        )

    def _weight_limit(self, diff: Diff) -> float:
        figures = diff.figures
        assert figures is not None
        number = diff.pair.step
        limit = self._relative("weight") * figures.reference_l2
        if number:
            ramp = min(number, _DRIFT_STEPS) * _DRIFT_PER_STEP * self._allowed("forward") / _ALLOWED["float32"][2]
            limit += self._factor * min(ramp, 0.1) * figures.reference_l2
            update = self._updates.get(_key(diff))
            if update is not None and update.figures is not None:
                steered = _key(diff) in self._steered
                # Adam's updates from noise shrink with time; those of the steps before were as large as the others'.
                each = self._steered_limit(update.figures) if steered else 0.0
                size = max(update.figures.reference_l2, update.figures.candidate_l2)
                limit += self._factor * number * max(each, _DIFFERENT * size)
        slot = equivalents.slot(diff.pair.anchor.slot)
        if slot in _RUNNING and number:
            limit += self._relative("forward") * figures.reference_l2
        if slot == "running_var" and number:
            samples = self._samples.get(diff.pair.anchor.layer, 0)
            if samples > 1:
                limit += 1.05 / (samples - 1) * figures.reference_l2
        return limit

    @staticmethod
    def _verdict(diff: Diff, limit: float) -> Diff:
        figures = diff.figures
        assert figures is not None
        scale = figures.reference_l2
        bulk = figures.bulk_l2
        # An estimate is told only where chance does not explain it.
        limit *= 1 + _SURE * figures.spread
        if bulk is not None and bulk <= limit < figures.l2 <= _FEW_AT_MOST * scale:
            return replace(diff, passed=True, limit=limit / scale, judged=("rel_l2 of the bulk", bulk / scale))
        if scale > 0:
            return replace(diff, passed=figures.l2 <= limit, limit=limit / scale, judged=("rel_l2", figures.rel_l2))
        return replace(diff, passed=figures.l2 <= limit, limit=limit, judged=("l2", figures.l2))


def drift(diffs: Sequence[Diff]) -> dict[str, float]:
    """Largest relative error of each stage in a step, over what passed and is more than noise of its own."""
    largest: dict[str, float] = {}
    for diff in diffs:
        name, figure = diff.judged
        limited = diff.limit is not None and diff.limit <= _GROWN_AT_MOST
        ordinary = equivalents.slot(diff.pair.anchor.slot) not in _RUNNING and diff.pair.stage != "input"
        if diff.passed and diff.compared and name.startswith("rel_l2") and limited and ordinary:
            largest[diff.pair.stage] = max(largest.get(diff.pair.stage, 0.0), figure)
    return largest


def _key(diff: Diff) -> tuple[str, str]:
    return diff.pair.anchor.layer, diff.pair.anchor.slot


def _exact(diff: Diff) -> bool:
    """Whether both sides are integers or booleans (token ids, masks, counters)."""
    floating = ("float", "bfloat", "complex")
    sides = (diff.pair.reference, diff.pair.candidate)
    return all(side is not None and not side.dtype.startswith(floating) for side in sides)


def _inherited(diffs: Sequence[Diff]) -> float:
    """Relative L2 error of all weights together, plus the largest of an input."""
    squares = scale = inputs = 0.0
    for diff in diffs:
        dtype = diff.pair.anchor.dtype
        if diff.figures is None or not diff.compared or _HALVES.get(dtype, dtype) not in _COARSENESS:
            continue
        if equivalents.slot(diff.pair.anchor.slot) in _RUNNING:
            continue  # what training computes does not come from them, and they may be n / (n - 1) apart
        if diff.pair.stage == "weight":
            squares += diff.figures.l2**2
            scale += diff.figures.reference_l2**2
        elif diff.pair.stage == "input" and math.isfinite(diff.figures.rel_l2):
            inputs = max(inputs, diff.figures.rel_l2)
    weights = math.sqrt(squares / scale) if scale > 0 else 0.0
    return min(weights + inputs, 1e-2)


def _rms(diffs: Sequence[Diff], stage: str) -> dict[str, float]:
    """Largest root mean square of the reference's gradients or updates, by layer."""
    scales: dict[str, float] = {}
    for diff in diffs:
        layer = diff.pair.anchor.layer
        if diff.pair.stage == stage and layer != LOOP and diff.figures and diff.figures.size and diff.compared:
            rms = diff.figures.reference_l2 / math.sqrt(diff.figures.size)
            scales[layer] = max(scales.get(layer, 0.0), rms)
    return scales


def _samples(diffs: Sequence[Diff]) -> dict[str, int]:
    """How many values each channel of a layer's output has: what a BatchNorm takes its statistics over."""
    counts: dict[str, int] = {}
    for diff in diffs:
        record = diff.pair.reference
        if diff.pair.stage == "forward" and record is not None and len(record.shape) > 1 and record.shape[1]:
            counts.setdefault(record.layer, math.prod(record.shape) // record.shape[1])
    return counts
