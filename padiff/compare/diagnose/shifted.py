"""Batches that belong to another step: one run numbers its steps differently, or left a batch out."""

from __future__ import annotations

import math
from dataclasses import replace

from padiff.compare.judge.limits import COARSENESS, allowed, coarse
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.records import SAME, SIDES, Both, Cause, Diff, Pair, Record, Run

# The most recorded steps that are compared before and after a step.
_NEARBY = 4
# Batches with at least this many numbers are not equal by chance.
_MANY = 8
_EVIDENCE = "they are equal"


def shift_cause(diff: Diff, runs: Both[Run]) -> Cause | None:
    """Return a cause if an input that differs is the reference's input of a neighbouring step; else `None`."""
    pair = diff.pair
    if pair.stage != "input" or pair.derived or pair.reference is None or pair.candidate is None or diff.problem:
        return None
    reference = runs.reference
    others = sorted((n for n in reference.numbers() if n != pair.step), key=lambda n: abs(n - pair.step))
    for number in others[: 2 * _NEARBY]:
        if _is_batch_of(pair, pair.candidate, reference, number):
            away = number - pair.step
            # A few numbers may be equal by chance.
            proven = math.prod(pair.anchor.shape) >= _MANY
            if _goes_on(pair, runs, away):
                return replace(_shifted(pair.step, number), proven=proven, evidence=_EVIDENCE if proven else "")
            return Cause(
                "batch_order",
                f"the candidate's batch is the reference's of step {number}: the batches come in another order, or the "
                "runs number their steps differently (start_step)",
                proven,
                _EVIDENCE if proven else "",
            )
    return None


def repeated_cause(diff: Diff, runs: Both[Run]) -> Cause | None:
    """Return a cause if one side begins again with its first batches where the other side goes on; else `None`."""
    pair = diff.pair
    numbers = [n for n in runs.reference.numbers() if n in {*runs.candidate.numbers()}]
    if pair.stage != "input" or pair.derived or not pair.complete or diff.problem or pair.step not in numbers[2:]:
        return None
    again = Both(*(_begins_again(side, run, pair, numbers) for side, run in pair.sides.zip(runs)))
    if again.reference == again.candidate:
        return None
    side, other_side = SIDES if again.reference else SIDES.swapped()
    text = (
        f"from step {pair.step} on the {side}'s batches are those from step {numbers[0]} on, in the same order, and "
        f"the {other_side} shuffles anew: an epoch that repeats the order (a sampler without set_epoch, or a generator "
        "that is seeded again)"
    )
    return Cause("epoch_repeated", text, math.prod(pair.anchor.shape) >= _MANY, "the batches of one run are equal")


def _begins_again(record: Record | None, run: Run, pair: Pair, numbers: list[int]) -> bool:
    """Return True if a run's batches from a step on are its batches from the first step on."""
    assert record is not None
    later = [n for n in numbers if n >= pair.step][:2]
    for first, number in zip(numbers, later):
        sides = [_record_of(record, run, n) for n in (first, number)]
        if sides[0] is None or sides[1] is None:
            return False
        if not _same(measure_pair(replace(pair, reference=sides[0], candidate=sides[1], layout=SAME))):
            return False
    return True


def _goes_on(pair: Pair, runs: Both[Run], away: int) -> bool:
    """Return True if the candidate's next step also has the batch of the reference's step at the same distance.

    Args:
        pair: the inputs that differ.
        runs: the reference and the candidate run.
        away: the distance, in steps, of the reference's step with the same batch.
    """
    assert pair.candidate is not None
    numbers = {*runs.reference.numbers()}
    step = next((n for n in runs.candidate.numbers() if n > pair.step and n + away in numbers), None)
    if step is None:
        return False
    batch = _record_of(pair.candidate, runs.candidate, step)
    return batch is not None and _is_batch_of(pair, batch, runs.reference, step + away)


def _is_batch_of(pair: Pair, batch: Record, reference: Run, number: int) -> bool:
    """Return True if a batch of the candidate is equal to the reference's input at the pair's place in another step.

    Args:
        pair: the inputs that differ.
        batch: the batch of the candidate.
        reference: the reference run.
        number: the number of the reference's step.
    """
    assert pair.reference is not None
    record = _record_of(pair.reference, reference, number)
    return record is not None and _same(measure_pair(replace(pair, step=number, reference=record, candidate=batch)))


def _record_of(record: Record, run: Run, number: int) -> Record | None:
    """Return the record of another step at the same site, with the same shape and call; `None` if there is none."""
    try:
        for step in run.steps(number):
            for neighbour in step.records:
                if (neighbour.site, neighbour.shape, neighbour.call) == (record.site, record.shape, record.call):
                    return neighbour
    except PadiffError:  # an unreadable step explains nothing here; the comparison of that step reports it
        pass
    return None


def _same(diff: Diff) -> bool:
    figures = diff.figures
    if figures is None or diff.problem or not figures.reference_l2:
        return False
    dtype = coarse(diff.pair.anchor.dtype)
    return figures.rel_l2 <= (allowed(dtype, "input") if dtype in COARSENESS else 0.0)


def _shifted(step: int, number: int) -> Cause:
    away = abs(number - step)
    count = "one step" if away == 1 else f"{away} steps"
    when, how = (f"{count} later", "left a batch out") if number > step else (f"{count} earlier", "used a batch twice")
    return Cause(
        "batch_shift",
        f"the candidate's batches are the reference's of {when} (here that of step {number}): the runs number "
        f"their steps differently (start_step), or the candidate {how}",
    )
