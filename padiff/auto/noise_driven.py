"""Weights that noise moved: of a gradient that is rounding, an adaptive optimizer makes an update of any direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from padiff.compare.judge.limits import UNRELATED
from padiff.compare.judge.siblings import key_of
from padiff.compare.judge.zero import noted, rounding_gradients
from padiff.records import Diff, Step
from padiff.records.sites import Key
from padiff.records.step_diffs import StepDiffs


@dataclass
class NoiseDriven:
    """Which parameters had gradients that are rounding noise, and how far an optimizer can have moved them."""

    _keys: set[Key] = field(default_factory=set)
    _moved: float = 0.0
    #: Root mean square of what such biases are apart in the step at hand, by layer.
    _apart: dict[str, float] = field(default_factory=dict)

    def see(self, diffs: Sequence[Diff]) -> None:
        """Look at a step's gradients."""
        step = StepDiffs.of(diffs)
        self._keys |= step.keys_of(step.measured_fact(rounding_gradients))

    def stepped(self, before: Step, after: Step) -> None:
        """The reference's optimizer has stepped: its largest updates are how far noise may have moved a parameter."""
        weights = {(r.layer, r.slot): r.value for r in before.records if r.stage == "weight"}
        updates = [
            np.square(np.asarray(r.value, np.float64) - np.asarray(weights[r.layer, r.slot], np.float64)).mean()
            for r in after.records
            if r.stage == "weight" and (r.layer, r.slot) in weights and r.value.size
        ]
        self._moved += math.sqrt(max(updates, default=0.0))

    def judge(self, diffs: Sequence[Diff]) -> list[Diff]:
        """The diffs of a step; what noise can have moved passes, and says so: weights, and the outputs they shift.

        A bias whose gradient is zero is one that what follows cancels out: its own layer's output shows it, no other.
        """
        self._apart.clear()
        return [self._judged(diff) for diff in diffs]

    def _judged(self, diff: Diff) -> Diff:
        figures, key = diff.figures, key_of(diff)
        if diff.problem or figures is None or not diff.compared or not figures.size:
            return diff
        rms = figures.l2 / math.sqrt(figures.size)
        if diff.pair.stage == "weight" and key in self._keys and rms <= UNRELATED * self._moved:
            self._apart[key[0]] = max(rms, self._apart.get(key[0], 0.0))
            return diff if diff.passed else noted(diff)
        # What the tolerance allows comes on top: it limits a mean of absolute values, 1.25 times less than its root.
        shifted = diff.pair.stage == "forward" and key[0] in self._apart
        allowed = diff.judgement.limit if diff.judgement is not None else 0.0
        if shifted and not diff.passed and rms <= self._apart[key[0]] + 1.25 * allowed:
            return noted(diff)
        return diff
