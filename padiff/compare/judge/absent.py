"""A stage that one side lacks in a step, though it records it in others: an optimizer that did not step, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.judge.history import History
from padiff.compare.judge.zero import is_nothing
from padiff.records import LOOP, Both, Diff, Record, Run, Step
from padiff.records.step_diffs import StepDiffs
from padiff.records.structured import fact_of

# A loss may be logged now and then only; inputs and weights are there wherever the model was called.
_STAGES = ("forward", "backward", "grad", "update")
# How many other steps of a run are looked at to see whether it records a stage at all.
_OTHERS = 8


def absent_stages(
    diffs: StepDiffs, steps: Both[Step], history: Both[History], runs: Both[Run]
) -> tuple[StepDiffs, Both[History]]:
    """Make diffs of what one side lacks in a step because a whole stage of it did not happen there.

    A stage that a side never records is a gap, not a diff. Other steps show which it is: those that were compared
    before, and, where these do not show it, a few of the nearest others.

    Args:
        diffs: of one rank of a step, judged as if a whole stage that is missing were a gap.
        steps: the rank's records.
        history: what each run was seen to record.

    Returns:
        The diffs, with those of an absent stage failed; and the history, with what other steps showed.
    """
    there = steps.map(_stages_of)
    lacking = Both(there.candidate - there.reference, there.reference - there.candidate)
    found = []
    for stages, known, run, step in zip(lacking, history, runs, steps):
        for stage in stages.intersection(_STAGES) - known.stages - known.never:
            known = _looked_elsewhere(known, stage, run, step.number)
        found.append(known)
    history = Both(*found)
    absent = Both(*(stages.intersection(_STAGES) & known.stages for stages, known in zip(lacking, history)))
    if any(absent):
        alone = np.flatnonzero(~diffs.sites.complete).tolist()
        failed = [place for place in alone if _is_of(diffs[place], absent) and not is_nothing(diffs[place])]
        diffs = diffs.passing(failed, False)
    return diffs, history


def _stages_of(step: Step) -> frozenset[str]:
    return fact_of(step.records, _stages)


def _stages(records: Sequence[Record]) -> frozenset[str]:
    return frozenset({record.stage for record in records if record.layer != LOOP})


def _looked_elsewhere(history: History, stage: str, run: Run, number: int) -> History:
    """The history after a look at the steps around one, for a stage that none before had."""
    others = sorted((n for n in run.numbers() if n != number), key=lambda n: abs(n - number))
    for other in others[:_OTHERS]:
        stages = history.stages.union(*map(_stages_of, run.steps(other)))
        history = replace(history, stages=stages)
        if stage in stages:
            return history
    return replace(history, never=history.never | {stage})


def whole_stage_missing(diff: Diff, step: Sequence[Diff]) -> bool:
    """Whether a diff's missing side has nothing at all at this stage of its step."""
    candidate = diff.pair.candidate is None
    return not any(
        (other.pair.candidate if candidate else other.pair.reference) is not None
        for other in step
        if other.pair.stage == diff.pair.stage and other.pair.anchor.layer != LOOP
    )


def optimizer_steps(step: Sequence[Diff]) -> Both[int]:
    """How often the optimizers of the reference and of the candidate changed some parameter in a step."""
    calls: Both[set[int]] = Both({0}, {0})
    for diff in step:
        if diff.pair.stage == "update":
            for side, record in zip(calls, diff.pair.sides):
                if record is not None and record.layer != LOOP:
                    side.add(record.call + 1)
    return calls.map(max)


def _is_of(diff: Diff, absent: Both[frozenset[str]]) -> bool:
    pair = diff.pair
    if pair.complete or pair.optional or pair.anchor.layer == LOOP:
        return False
    return pair.stage in (absent.reference if pair.reference is None else absent.candidate)
