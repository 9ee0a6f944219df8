"""How far the tensors of a stage are off along themselves, and what is typical of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from padiff.compare.judge import limits
from padiff.records import LOOP, STAGES, Diff, Figures, Rule

#: A parameter: its layer and slot.
Key = tuple[str, str]

# A gradient that is judged by its layer's largest, or an update that noise drives, says nothing of its own size.
_NO_WITNESS = frozenset({Rule.LAYER, Rule.NOISE_DRIVEN, Rule.AROUND_ZERO, Rule.STATISTICS, Rule.EQUAL})


class Off(NamedTuple):
    """How far a tensor is off along itself.

    Attributes:
        place: where its diff stands among those of the step.
        ratio: the candidate is ``1 + ratio`` times the reference, and something else.
        error: relative L2 error.
        size: number of elements.
        spread: relative standard deviation of `error`.
    """

    place: int
    ratio: float
    error: float
    size: int
    spread: float

    @property
    def mostly_ratio(self) -> bool:
        """Whether all but little of the error is the ratio."""
        return abs(self.ratio) >= (limits.MOSTLY - limits.SURE * self.spread) * self.error


def ratio_of(figures: Figures) -> float:
    """By how much of itself the candidate is larger than the reference, as far as they have one direction."""
    square = figures.reference_l2**2
    return (figures.candidate_l2**2 - square - figures.l2**2) / (2 * square) if square > 0 else 0.0


def by_stage(diffs: Sequence[Diff]) -> dict[str, list[int]]:
    """The places of a step's diffs, by stage; of every stage, in their order."""
    places: dict[str, list[int]] = {stage: [] for stage in STAGES}
    for place, diff in enumerate(diffs):
        places[diff.pair.stage].append(place)
    return places


def offs(
    diffs: Sequence[Diff], places: Mapping[str, Sequence[int]], stage: str, noise: Collection[Key] = ()
) -> list[Off]:
    """How far each tensor of a stage is off along itself, where that is known.

    Args:
        places: as `by_stage` gives them.
        noise: parameters whose gradients are rounding.
    """
    found = []
    for place in places[stage]:
        diff = diffs[place]
        figures, anchor = diff.figures, diff.pair.anchor
        if anchor.layer == LOOP or figures is None or not diff.compared or diff.problem:
            continue
        if figures.basis == "moments" or figures.size < limits.WITNESS or not 0 < figures.reference_l2 < math.inf:
            continue
        judged = diff.judgement
        if judged is None or judged.rule in _NO_WITNESS or limits.is_running(anchor.slot):
            continue
        if noise and key_of(diff) in noise:
            continue
        if math.isfinite(figures.l2):
            found.append(Off(place, ratio_of(figures), figures.rel_l2, figures.size, figures.spread))
    return found


def typical_ratio(found: Sequence[Off]) -> float:
    """The median of the ratios."""
    return statistics.median(off.ratio for off in found) if found else 0.0


def typical_error(found: Sequence[Off]) -> float:
    """The median of the relative errors."""
    return statistics.median(off.error for off in found) if found else 0.0


def key_of(diff: Diff) -> Key:
    """The parameter that a diff is of."""
    return diff.pair.anchor.layer, diff.pair.anchor.slot
