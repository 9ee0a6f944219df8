"""A stage that one side lacks in a step, though it records it in others: an optimizer that did not step, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from padiff.records import LOOP, Diff, Run, Step

# A loss may be logged now and then only; inputs and weights are there wherever the model was called.
_STAGES = ("forward", "backward", "grad", "update")
# How many other steps of a run are looked at to see whether it records a stage at all.
_OTHERS = 8


class AbsentStages:
    """Makes diffs of what one side lacks in a step because a whole stage of it did not happen there.

    A stage that a side never records is a gap, not a diff. Other steps show which it is: those that were compared
    before, and, where these do not show it, a few of the nearest others.
    """

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._runs = reference, candidate
        self._known: tuple[set[str], set[str]] = (set(), set())
        self._asked: set[tuple[int, str]] = set()

    def judge(self, diffs: list[Diff], sides: tuple[Step, Step]) -> list[Diff]:
        """The judged diffs of one rank of a step, with those of an absent stage failed.

        Args:
            diffs: judged as if a whole stage that is missing were a gap.
            sides: the rank's records, of the reference and of the candidate.
        """
        there = tuple({record.stage for record in step.records if record.layer != LOOP} for step in sides)
        absent = [
            (side, stage)
            for side in (0, 1)
            for stage in _STAGES
            if stage in there[1 - side] and stage not in there[side] and self._is_recorded(side, stage, sides[side])
        ]
        for known, stages in zip(self._known, there):
            known |= stages
        return [_failed(diff) if any(_is_of(diff, *one) for one in absent) else diff for diff in diffs]

    def _is_recorded(self, side: int, stage: str, step: Step) -> bool:
        """Whether the side records the stage in other steps."""
        if stage not in self._known[side] and (side, stage) not in self._asked:
            self._asked.add((side, stage))
            run = self._runs[side]
            others = sorted((n for n in run.numbers() if n != step.number), key=lambda n: abs(n - step.number))
            for number in others[:_OTHERS]:
                for other in run.steps(number):
                    self._known[side].update(record.stage for record in other.records if record.layer != LOOP)
                if stage in self._known[side]:
                    break
        return stage in self._known[side]


def whole_stage_missing(diff: Diff, step: Sequence[Diff]) -> bool:
    """Whether a diff's missing side has nothing at all at this stage of its step."""
    missing_candidate = diff.pair.candidate is None
    return not any(
        (other.pair.candidate if missing_candidate else other.pair.reference) is not None
        for other in step
        if other.pair.stage == diff.pair.stage and other.pair.anchor.layer != LOOP
    )


def optimizer_steps(step: Sequence[Diff]) -> tuple[int, int]:
    """How often the optimizers of the reference and of the candidate changed some parameter in a step."""
    calls = [0, 0]
    for diff in step:
        if diff.pair.stage == "update":
            for side, record in enumerate((diff.pair.reference, diff.pair.candidate)):
                if record is not None and record.layer != LOOP:
                    calls[side] = max(calls[side], record.call + 1)
    return calls[0], calls[1]


def _is_of(diff: Diff, side: int, stage: str) -> bool:
    pair = diff.pair
    lacking = pair.candidate if side else pair.reference
    return pair.stage == stage and lacking is None and not pair.optional and pair.anchor.layer != LOOP


def _failed(diff: Diff) -> Diff:
    figures = diff.figures
    # A gradient of zeros is what one framework has where the other has none.
    nothing = figures is not None and figures.reference_l2 == figures.candidate_l2 == 0 and figures.size > 0
    return diff if nothing and diff.pair.stage in ("grad", "update") else replace(diff, passed=False)
