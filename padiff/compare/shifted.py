"""Batches that are another step's: one run is numbered differently, or left a batch out."""

from __future__ import annotations

from padiff.compare.drift import COARSENESS, allowed, coarse
from padiff.compare.sketched import measure_pair
from padiff.errors import PadiffError
from padiff.records import Diff, Pair, Run

# How many recorded steps before and after one are looked at.
_NEARBY = 4


def shift_cause(diff: Diff, reference: Run) -> str:
    """Why an input differs, if it is the reference's input of a neighbouring step; else empty."""
    pair = diff.pair
    if pair.stage != "input" or pair.reference is None or pair.candidate is None or diff.problem:
        return ""
    others = sorted((n for n in reference.numbers() if n != pair.step), key=lambda n: abs(n - pair.step))
    for number in others[: 2 * _NEARBY]:
        if _is_batch_of(pair, reference, number):
            return _sentence(pair.step, number)
    return ""


def _is_batch_of(pair: Pair, reference: Run, number: int) -> bool:
    assert pair.reference is not None
    try:
        for step in reference.steps(number):
            for record in step.records:
                if record.site == pair.reference.site and record.shape == pair.reference.shape:
                    found = measure_pair(Pair(number, record, pair.candidate, pair.transform, pair.scales))
                    return _same(found)
    except PadiffError:  # a step that can't be read explains nothing; it is reported when it is compared
        return False
    return False


def _same(diff: Diff) -> bool:
    figures = diff.figures
    if figures is None or diff.problem or not figures.reference_l2:
        return False
    dtype = coarse(diff.pair.anchor.dtype)
    return figures.rel_l2 <= (allowed(dtype, "input") if dtype in COARSENESS else 0.0)


def _sentence(step: int, number: int) -> str:
    away = abs(number - step)
    count = "one step" if away == 1 else f"{away} steps"
    when, how = ("later", "left a batch out") if number > step else ("earlier", "used a batch twice")
    return (
        f"the candidate's batches are the reference's of {count} {when} (here that of step {number}): the runs number "
        f"their steps differently (start_step), or the candidate {how}"
    )
