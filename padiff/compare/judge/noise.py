"""Default policy: limits by the rounding noise of dtype and stage, and by the drift of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.judge.drift import NONE, Drift
from padiff.compare.judge.policy import ByNoise, judged_together
from padiff.compare.judge.step_limits import StepLimits
from padiff.compare.judge.systematic import without_systematic
from padiff.errors import UsageError
from padiff.records import Diff
from padiff.records.step_diffs import StepDiffs


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
        with np.errstate(all="ignore"):
            limits = StepLimits(StepDiffs.from_diffs(diffs), self.factor, before)
            return judged_together(without_systematic(limits.judged(), limits.context.start()))
