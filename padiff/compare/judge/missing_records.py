"""Detect a stage that one side lacks in a step but records in others, such as the updates of a skipped step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.judge.history import History
from padiff.compare.judge.zero import is_nothing
from padiff.records import LOOP, Both, Diff, Record, Run, Step
from padiff.records.step_diffs import StepDiffs
from padiff.records.stored_records import fact_of

# Stages whose absence is a diff. A loss may be logged in some steps only; inputs and weights are recorded whenever the
# model is called.
_STAGES = ("forward", "backward", "grad", "update")
# Number of other steps of a run that are searched for records of a stage.
_OTHERS = 8


def absent_stages(
    diffs: StepDiffs, steps: Both[Step], history: Both[History], runs: Both[Run]
) -> tuple[StepDiffs, Both[History]]:
    """Fail diffs with a missing side if a whole stage of that side is absent from the step.

    A stage that a side never records is a gap, not a diff. The history of compared steps shows recorded stages; if the
    history does not settle a stage, a few of the nearest other steps are read.

    Args:
        diffs: diffs of one rank of a step, judged as if a missing stage were a gap.
        steps: the rank's records.
        history: records seen in each run so far.

    Returns:
        The diffs, with those of an absent stage failed; and the history, extended by the other steps.
    """
    recorded = steps.map(_stages_of)
    lacking = Both(recorded.candidate - recorded.reference, recorded.reference - recorded.candidate)
    histories = []
    for stages, record, run, step in zip(lacking, history, runs, steps):
        for stage in stages.intersection(_STAGES) - record.stages - record.never:
            record = _looked_elsewhere(record, stage, run, step.number)
        histories.append(record)
    history = Both(*histories)
    absent = Both(*(stages.intersection(_STAGES) & record.stages for stages, record in zip(lacking, history)))
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
    """Search the nearest other steps for a stage that no step so far had, and return the extended history."""
    others = sorted((n for n in run.numbers() if n != number), key=lambda n: abs(n - number))
    for neighbour in others[:_OTHERS]:
        stages = history.stages.union(*map(_stages_of, run.steps(neighbour)))
        history = replace(history, stages=stages)
        if stage in stages:
            return history
    return replace(history, never=history.never | {stage})


def whole_stage_missing(diff: Diff, step: Sequence[Diff]) -> bool:
    """Return True if a diff's missing side has no record at this stage of the step."""
    candidate = diff.pair.candidate is None
    return not any(
        (neighbour.pair.candidate if candidate else neighbour.pair.reference) is not None
        for neighbour in step
        if neighbour.pair.stage == diff.pair.stage and neighbour.pair.anchor.layer != LOOP
    )


def optimizer_steps(step: Sequence[Diff]) -> Both[int]:
    """Return the number of optimizer steps of the reference and of the candidate within one step."""
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
