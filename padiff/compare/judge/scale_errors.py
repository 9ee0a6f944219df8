"""Scale errors of a stage's tensors along the reference, and their typical values."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records import Diff, Rule
from padiff.records.diff_rows import MOMENTS, RULES
from padiff.records.pair_schema import Key
from padiff.records.step_batch import StepBatch
from padiff.records.step_diffs import StepDiffs

# Rules of diffs whose size proves nothing, such as a gradient judged by its layer's largest, or an update from noise.
_NO_WITNESS = frozenset({None, Rule.LAYER, Rule.NOISE_DRIVEN, Rule.AROUND_ZERO, Rule.STATISTICS, Rule.EQUAL})
_IS_WITNESS = np.array([rule not in _NO_WITNESS for rule in RULES])


class ScaleErrors(NamedTuple):
    """Scale errors of tensors; one element for each tensor.

    Attributes:
        places: indices of their diffs among the step's diffs.
        ratio: the candidate is ``1 + ratio`` times the reference, plus a remainder.
        error: relative L2 error.
        size: number of elements.
        spread: relative standard deviation of `error`.
    """

    places: np.ndarray
    ratio: np.ndarray
    error: np.ndarray
    size: np.ndarray
    spread: np.ndarray

    @property
    def mostly_ratio(self) -> np.ndarray:
        """Return a mask of the tensors whose error is almost entirely the ratio."""
        return np.asarray(np.abs(self.ratio) >= (limits.MOSTLY - limits.SURE * self.spread) * self.error)

    @property
    def typical_ratio(self) -> float:
        """Return the median of the ratios; 0 if there are none."""
        return statistics.median(self.ratio.tolist()) if len(self.places) else 0.0

    @property
    def typical_error(self) -> float:
        """Return the median of the relative errors; 0 if there are none."""
        return statistics.median(self.error.tolist()) if len(self.places) else 0.0

    def where(self, which: np.ndarray) -> ScaleErrors:
        """Return the entries of the masked tensors."""
        return ScaleErrors(*(column[which] for column in self))


def ratios_of(rows: np.ndarray) -> np.ndarray:
    """Return each candidate's ratio to its reference, less 1, along the direction of the reference."""
    with np.errstate(all="ignore"):
        square = rows["reference_l2"] ** 2
        ratio = (rows["candidate_l2"] ** 2 - square - rows["l2"] ** 2) / (2 * square)
    return np.where(square > 0, ratio, 0.0)


def _ratios(block: StepBatch) -> np.ndarray:
    return ratios_of(block.rows)


def _may_witness(block: StepBatch) -> np.ndarray:
    """Return a mask of the diffs of layers that may be witnesses of a common ratio.

    A witness has at least `WITNESS` elements, a finite error, and a finite reference that is not zero.
    """
    rows, reference = block.rows, block.rows["reference_l2"]
    is_known = block.known & (rows["basis"] != MOMENTS) & block.sites.fact(SiteFacts).own & ~block.troubled
    return np.asarray(
        is_known
        & (rows["size"] >= limits.WITNESS)
        & np.isfinite(block.relative)
        & (reference > 0)
        & (reference < np.inf)
    )


class StageScaleErrors:
    """Scale errors of a step's tensors, as far as known.

    Args:
        diffs: judged diffs of the step.
    """

    def __init__(self, diffs: StepDiffs) -> None:
        # No reference to the diffs, which cache this object.
        self._places, self._rows, self._errors = diffs.sites.places, diffs.rows, diffs.relative
        self._known = diffs.measured_fact(_may_witness) & _IS_WITNESS[diffs.rows["rule"]]
        self._ratios = diffs.measured_fact(_ratios)
        self._of_stage: dict[str, ScaleErrors] = {}

    def errors_of(self, stage: str, noise: np.ndarray | None = None) -> ScaleErrors:
        """Return the scale errors of a stage.

        Args:
            noise: mask of the diffs of parameters whose gradients are rounding noise; these are left out.
        """
        if noise is None or not noise.any():
            if stage not in self._of_stage:
                self._of_stage[stage] = self._of(stage, self._known)
            return self._of_stage[stage]
        return self._of(stage, self._known & ~noise)

    def _of(self, stage: str, has_figures: np.ndarray) -> ScaleErrors:
        places = self._places[stage]
        places = places[has_figures[places]]
        sizes, spreads = self._rows["size"][places], self._rows["spread"][places]
        return ScaleErrors(places, self._ratios[places], self._errors[places], sizes, spreads)


def scale_errors(diffs: StepDiffs, stage: str, noise: np.ndarray | None = None) -> ScaleErrors:
    """Return the scale error of each tensor of a stage, as far as known.

    Args:
        noise: mask of the diffs of parameters whose gradients are rounding noise; these are left out.
    """
    return diffs.fact(StageScaleErrors).errors_of(stage, noise)


def key_of(diff: Diff) -> Key:
    """Return the key of a diff's parameter: layer and slot."""
    return diff.pair.anchor.layer, diff.pair.anchor.slot
