"""How far the tensors of a stage are off along themselves, and what is typical of them."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records import Diff, Rule
from padiff.records.rows import MOMENTS, RULES
from padiff.records.step_diffs import Key, StepDiffs

# A gradient that is judged by its layer's largest, or an update that noise drives, says nothing of its own size.
_NO_WITNESS = frozenset({None, Rule.LAYER, Rule.NOISE_DRIVEN, Rule.AROUND_ZERO, Rule.STATISTICS, Rule.EQUAL})
_IS_WITNESS = np.array([rule not in _NO_WITNESS for rule in RULES])


class Offs(NamedTuple):
    """How far tensors are off along themselves; an element for each.

    Attributes:
        places: where their diffs stand among those of the step.
        ratio: the candidate is ``1 + ratio`` times the reference, and something else.
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
        """Whether all but little of the error is the ratio."""
        return np.asarray(np.abs(self.ratio) >= (limits.MOSTLY - limits.SURE * self.spread) * self.error)

    @property
    def typical_ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratio.tolist()) if len(self.places) else 0.0

    @property
    def typical_error(self) -> float:
        """The median of the relative errors."""
        return statistics.median(self.error.tolist()) if len(self.places) else 0.0

    def where(self, which: np.ndarray) -> Offs:
        """Some of them."""
        return Offs(*(column[which] for column in self))


def ratios_of(rows: np.ndarray) -> np.ndarray:
    """By how much of itself each candidate is larger than the reference, as far as they have one direction."""
    with np.errstate(all="ignore"):
        square = rows["reference_l2"] ** 2
        ratio = (rows["candidate_l2"] ** 2 - square - rows["l2"] ** 2) / (2 * square)
    return np.where(square > 0, ratio, 0.0)


class AllOffs:
    """How far the tensors of a step are off along themselves, where that is known.

    Args:
        diffs: of the step, judged.
    """

    def __init__(self, diffs: StepDiffs) -> None:
        # Not the diffs: they keep this.
        self._places, self._rows, self._errors = diffs.sites.places, diffs.rows, diffs.relative
        rows, facts, reference = diffs.rows, diffs.sites.fact(SiteFacts), diffs.rows["reference_l2"]
        # An error that is finite, of a reference that is neither zero nor infinite.
        known = diffs.known & _IS_WITNESS[rows["rule"]] & (rows["basis"] != MOMENTS) & facts.own
        known &= (rows["size"] >= limits.WITNESS) & np.isfinite(diffs.relative) & (reference > 0) & (reference < np.inf)
        self._known = known & ~diffs.troubled if diffs.problems else known
        self._ratios = ratios_of(rows)

    def of(self, stage: str, noise: np.ndarray | None = None) -> Offs:
        """Those of a stage.

        Args:
            noise: which are of parameters whose gradients are rounding.
        """
        places = self._places[stage]
        known = self._known[places]
        if noise is not None:
            known &= ~noise[places]
        places = places[known]
        sizes, spreads = self._rows["size"][places], self._rows["spread"][places]
        return Offs(places, self._ratios[places], self._errors[places], sizes, spreads)


def offs(diffs: StepDiffs, stage: str, noise: np.ndarray | None = None) -> Offs:
    """How far each tensor of a stage is off along itself, where that is known.

    Args:
        noise: which are of parameters whose gradients are rounding.
    """
    return diffs.fact(AllOffs).of(stage, noise)


def key_of(diff: Diff) -> Key:
    """The parameter that a diff is of."""
    return diff.pair.anchor.layer, diff.pair.anchor.slot
