"""Distance of two runs in a step, in two numbers: their weight updates, and their loss."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from padiff.align import Alignment, RuntimeEvidence, align, resolved
from padiff.compare.judge.scale_errors import key_of
from padiff.compare.judge.zero import rounding_gradients
from padiff.compare.measure.pairs import measure_pair
from padiff.model.given_map import GivenMap
from padiff.pair.steps import pair_steps
from padiff.records import LOOP, Both, RunInfo, Step, is_loss, is_of_loss, loss_role
from padiff.records.step_diffs import StepDiffs

_STAGES = frozenset({"backward", "grad", "update", "loss"})


class StepDistance(NamedTuple):
    """Relative distances of two runs in one step, as shares of the reference's norms; NaN where nothing was recorded.

    Attributes:
        updates: distance of the updates of all parameters together, without parameters whose gradients are rounding
            noise.
        loss: distance of the losses of all micro-batches together.
    """

    updates: float
    loss: float


class Distance:
    """Meter of the distance of two runs, step by step.

    Args:
        infos: the runs.
        layer_map: layers to pair, in the form that `compare_runs` accepts.
    """

    def __init__(self, infos: Both[RunInfo], layer_map: Any = None) -> None:
        self._infos, self._map = infos, GivenMap.from_value(layer_map)
        self._alignment: Alignment | None = None

    def measure(self, steps: Both[Step]) -> StepDistance:
        """Return the distance of one step of both runs."""
        if self._alignment is None:
            evidence = steps.map(RuntimeEvidence.from_step)
            self._alignment = resolved(
                align(self._infos.reference, self._infos.candidate, self._map, evidence), evidence
            )
        pairs = pair_steps(steps.reference, steps.candidate, self._alignment)
        diffs = StepDiffs.from_diffs([measure_pair(pair) for pair in pairs if pair.complete and pair.stage in _STAGES])
        noise = diffs.keys_of(diffs.measured_fact(rounding_gradients))
        updates, losses = [0.0, 0.0], [0.0, 0.0]
        for diff in diffs:
            figures, anchor = diff.figures, diff.pair.anchor
            if figures is None or not diff.compared:
                continue
            if diff.pair.stage == "update" and anchor.layer != LOOP and key_of(diff) not in noise:
                sums = updates
            elif is_loss(anchor) or (
                diff.pair.stage == "loss" and is_of_loss(anchor) and loss_role(anchor.slot) == "0"
            ):
                sums = losses
            else:
                continue
            sums[0] += math.inf if figures.nonfinite else figures.l2**2
            sums[1] += figures.reference_l2**2
        return StepDistance(*(math.sqrt(error / size) if size else math.nan for error, size in (updates, losses)))
