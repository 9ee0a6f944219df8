"""Judgement of weights that are averages of others, by their changes.

A weight without an optimizer may drift by a share of itself in each step, which hides another decay of an average. So a
weight that is off by more than its source is compared with the step before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from padiff.align import Alignment
from padiff.compare.judge import limits
from padiff.compare.judge.drift import Drift
from padiff.records import Both, Figure, Rule, Run
from padiff.records.diff_rows import RULE_NUMBERS
from padiff.records.step_diffs import StepDiffs

if TYPE_CHECKING:
    from padiff.compare.diagnose.hypotheses.averages import Averages

# Most weights of a step that are compared with the step before.
_MOST = 8
# Factor by which a copy may be off more than its source. Chosen.
_MORE = 1.5


def with_averages(diffs: StepDiffs, rank: int, runs: Both[Run], alignment: Alignment, before: Drift) -> StepDiffs:
    """Return the diffs, with those of weights failed that follow their sources otherwise than the reference's do.

    Args:
        diffs: the judged diffs of one rank of a step.
        rank: the rank.
        before: the drift of the step before.
    """
    suspects = _suspects(diffs, before)
    if not suspects:
        return diffs
    # Imported where needed: most comparisons have no average that is off.
    from padiff.compare.diagnose.hypotheses.averages import failing
    from padiff.compare.diagnose.hypotheses.diff_context import DiffContext

    made = list(diffs)
    scene = DiffContext(made[suspects[0]], made, alignment, runs, rank)
    failed = failing(scene, suspects, made)
    references = diffs.rows["reference_l2"]
    return diffs.with_failures(
        {
            place: (
                Figure.REL_L2,
                float(diffs.relative[place]),
                _limit(float(references[place]), average),
                Rule.AVERAGE,
            )
            for place, average in failed.items()
        }
    )


def _limit(reference: float, average: Averages) -> float:
    """Return the relative error that rounding of an average explains."""
    rounding = average.noise * float(np.sqrt(average.now.reference.size)) / reference if reference else 0.0
    return max(rounding, limits.allowed("float32", "weight"))


def _suspects(diffs: StepDiffs, before: Drift) -> list[int]:
    """Return the weights without an optimizer that passed by the drift, and are off by more than their sources."""
    sites, rows = diffs.sites, diffs.rows
    if before.step < 0 or diffs.number is None or before.step != diffs.number - 1:
        return []
    places = sites.places["weight"]
    drifting = places[(rows["passed"] & (rows["rule"] == RULE_NUMBERS[Rule.DRIFT]))[places] & diffs.measured[places]]
    drifting = drifting[diffs.relative[drifting] > limits.allowed("float32", "weight")]
    if not len(drifting):
        return []
    trained = {sites.keys[place] for place in sites.places["update"].tolist()}
    errors: dict[tuple[str, tuple[int, ...]], float] = {}
    for place in places.tolist():
        if (key := sites.keys[place]) in trained and np.isfinite(rows["l2"][place]):
            like = key[1], sites.shapes[place]
            errors[like] = max(errors.get(like, 0.0), float(rows["l2"][place]), before.weights.get(key, 0.0))
    suspects = []
    for place in drifting.tolist():
        key, like = sites.keys[place], (sites.keys[place][1], sites.shapes[place])
        if key in trained or like not in errors:
            continue
        if rows["l2"][place] > _MORE * max(errors[like], before.weights.get(key, 0.0)):
            suspects.append(place)
    return sorted(suspects, key=lambda place: -float(diffs.relative[place]))[:_MOST]
