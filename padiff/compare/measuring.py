"""Measuring of a comparison's steps, by workers or in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

from padiff.align import Alignment
from padiff.compare.measure.measure_step import measured
from padiff.compare.measure.pairs import measure_pair
from padiff.compare.workers import Workers
from padiff.records import Both, Pair, Step
from padiff.records.step_diffs import StepDiffs

# Seconds between two reports of progress within a step.
_TICK = 0.2


class Measuring:
    """Meter of the pairs of two runs' steps.

    Args:
        stages: stages to measure.
        elementwise: tolerance in the form that `padiff.compare.measure.pairs.measure_pair` accepts.
        workers: processes that measure steps ahead.
        progress: called now and then while a step is measured, with the measured share of the step.
    """

    def __init__(
        self,
        stages: Collection[str],
        elementwise: tuple[float, float] | None,
        workers: Workers | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._stages, self._elementwise = frozenset(stages), elementwise
        self._workers, self._progress = workers, progress

    def start(self, step: Step) -> None:
        """Start the workers, if they save time for steps like this one."""
        if self._workers is not None:
            self._workers.start(step)

    def diffs(self, pairs: Sequence[Pair], numbers: Both[int] | None, alignment: Alignment) -> StepDiffs:
        """Return the diffs of a step's pairs, not judged yet.

        Args:
            numbers: the step's number in each run; `None` for steps that belong to no run.
            alignment: the alignment that paired the step.

        Raises:
            padiff.errors.RunFolderError: a tensor can't be read.
        """
        if self._workers is not None and numbers is not None:
            diffs = self._workers.diffs(numbers, pairs, alignment, self._stages, self._elementwise)
            if diffs is not None:
                return diffs
        looked = time.monotonic()

        def done(count: int) -> None:
            nonlocal looked
            if self._progress is not None and time.monotonic() - looked > _TICK and count < len(pairs):
                self._progress(count / len(pairs))
                looked = time.monotonic()

        return measured(pairs, self._elementwise, done)

    def again(self, pairs: Sequence[Pair], measured_before: StepDiffs) -> StepDiffs:
        """Return the diffs of a step that was measured with another alignment, and measure only pairs that changed."""
        diffs_by_key = {_key(diff.pair): diff for diff in measured_before}
        matches = [(pair, diffs_by_key.get(_key(pair))) for pair in pairs]
        return StepDiffs.from_diffs(
            [
                replace(diff, pair=pair) if diff is not None else measure_pair(pair, self._elementwise)
                for pair, diff in matches
            ]
        )


def _key(pair: Pair) -> Hashable:
    """Return a key of the inputs that determine the measurement of a pair."""
    return id(pair.reference), id(pair.candidate), pair.layout, pair.scales
