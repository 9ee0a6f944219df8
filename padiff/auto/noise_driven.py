"""Weights changed by noise: an adaptive optimizer turns a gradient of rounding errors into an arbitrary update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from padiff.compare.judge.limits import UNRELATED
from padiff.compare.judge.scale_errors import key_of
from padiff.compare.judge.zero import noted, rounding_gradients
from padiff.records import Diff, Step
from padiff.records.pair_schema import Key
from padiff.records.step_diffs import StepDiffs


@dataclass
class NoiseDriven:
    """Parameters whose gradients are rounding noise, and a bound on the change that an optimizer made to them."""

    _keys: set[Key] = field(default_factory=set)
    _moved: float = 0.0
    #: Root mean square of the difference of such weights in the current step, by layer.
    _apart: dict[str, float] = field(default_factory=dict)

    def see(self, diffs: Sequence[Diff]) -> None:
        """Add the parameters whose gradients in this step are rounding noise."""
        step = StepDiffs.from_diffs(diffs)
        self._keys |= step.keys_of(step.measured_fact(rounding_gradients))

    def stepped(self, before: Step, after: Step) -> None:
        """Add the reference's largest update to the bound on changes by noise."""
        weights = {(r.layer, r.slot): r.value for r in before.records if r.stage == "weight"}
        updates = [
            np.square(np.asarray(r.value, np.float64) - np.asarray(weights[r.layer, r.slot], np.float64)).mean()
            for r in after.records
            if r.stage == "weight" and (r.layer, r.slot) in weights and r.value.size
        ]
        self._moved += math.sqrt(max(updates, default=0.0))

    def judge(self, diffs: Sequence[Diff]) -> list[Diff]:
        """Return the diffs of a step, in which differences that noise explains pass with a note.

        Noise explains differences of weights whose gradients are noise, and of the outputs that such weights shift. A
        bias with a zero gradient is cancelled by later layers, so only its own layer's output shows the bias.
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
        # The tolerance is added: a limit on the mean absolute value, and 1.25 times that on the root mean square.
        shifted = diff.pair.stage == "forward" and key[0] in self._apart
        allowed = diff.judgement.limit if diff.judgement is not None else 0.0
        if shifted and not diff.passed and rms <= self._apart[key[0]] + 1.25 * allowed:
            return noted(diff)
        return diff
