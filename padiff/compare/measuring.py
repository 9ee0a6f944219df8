"""Reading and measuring of a comparison's steps, by workers or in this process; small steps several at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

from padiff.align import Alignment
from padiff.compare.measure.measure_step import PAIRS_AT_A_TIME, count_together, measured, measured_alike
from padiff.compare.measure.pairs import measure_pair
from padiff.compare.workers import Workers
from padiff.errors import PadiffError
from padiff.pair.merge_ranks import merge_ranks
from padiff.pair.plans import PairPlans, pairs_in_one
from padiff.records import Both, Pair, Run, Step
from padiff.records.pair_table import PairColumns, PairTable, fact_of_pairs
from padiff.records.step_diffs import StepDiffs

# Seconds between two reports of progress within a step.
_TICK = 0.2
#: Steps with few pairs that are measured at a time: enough to make the overhead of numpy's calls small.
STEPS_AT_A_TIME = 64
# Largest share of pairs that must be measured one by one, if several steps are to be measured at a time.
_ALONE_AT_MOST = 0.25


class Measuring:
    """Reader of the steps of two runs, which also measures their pairs.

    Small steps are read and measured several at a time, together with the steps that follow. An error in one of the
    later steps is raised when that step is requested.

    Args:
        runs: reference and candidate.
        stages: stages to measure.
        elementwise: tolerance in the form that `padiff.compare.measure.pairs.measure_pair` accepts.
        workers: processes that measure steps ahead.
        progress: called now and then while a step is measured, with the measured share of the step.
    """

    def __init__(
        self,
        runs: Both[Run],
        stages: Collection[str],
        elementwise: tuple[float, float] | None,
        workers: Workers | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._runs, self._stages, self._elementwise = runs, frozenset(stages), elementwise
        self._workers, self._progress = workers, progress
        self._read: dict[Both[int], Both[list[Step]]] = {}
        self._ahead: dict[Both[int], StepDiffs] = {}

    def start(self, step: Step) -> None:
        """Start the workers, if they save time for steps like this one."""
        if self._workers is not None:
            self._workers.start(step)

    def steps(self, numbers: Both[int]) -> Both[list[Step]]:
        """Return a step of each run, as each process recorded it.

        Raises:
            padiff.errors.RunFolderError: the step can't be read.
        """
        read = self._read.pop(numbers, None)
        if read is None:
            read = self._runs.zip(numbers).map(lambda side: side[0].steps(side[1]))
        return read

    def diffs(
        self,
        pairs: Sequence[Pair],
        numbers: Both[int] | None,
        alignment: Alignment,
        plans: PairPlans | None = None,
        later: Sequence[Both[int]] = (),
    ) -> StepDiffs:
        """Return the diffs of a step's pairs, not judged yet.

        Args:
            numbers: the step's number in each run; `None` for steps that belong to no run.
            alignment: the alignment that paired the step.
            plans: cache of pairings of earlier steps.
            later: the steps that will be requested next.

        Raises:
            padiff.errors.RunFolderError: a tensor can't be read.
        """
        if self._workers is not None and numbers is not None:
            diffs = self._workers.diffs(numbers, pairs, alignment, self._stages, self._elementwise)
            if diffs is not None:
                return diffs
        ahead = self._ahead.pop(numbers, None) if numbers is not None else None
        if ahead is not None and _columns(ahead.pairs) is _columns(pairs):
            return ahead
        if plans is not None and self._are_small(pairs):
            diffs = self._with_later(pairs, alignment, plans, later)
            if diffs is not None:
                return diffs
        return self._alone(pairs)

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

    def _are_small(self, pairs: Sequence[Pair]) -> bool:
        """Return True if steps like this one are measured several at a time."""
        if self._elementwise is not None or (self._workers is not None and self._workers.at_work):
            return False
        if _columns(pairs) is None or not 0 < 2 * len(pairs) <= PAIRS_AT_A_TIME:
            return False
        return len(pairs) - fact_of_pairs(pairs, count_together) <= _ALONE_AT_MOST * len(pairs)

    def _with_later(
        self, pairs: Sequence[Pair], alignment: Alignment, plans: PairPlans, later: Sequence[Both[int]]
    ) -> StepDiffs | None:
        """Return the diffs of a step that is measured together with later steps; `None` if the step must be measured
        alone.
        """
        batch: dict[Both[int], Sequence[Pair]] = {}
        try:
            for numbers in later[: min(STEPS_AT_A_TIME, PAIRS_AT_A_TIME // len(pairs)) - 1]:
                steps = self._read[numbers] = self.steps(numbers).map(merge_ranks)
                infos = self._runs.map(lambda run: run.info)
                later_pairs = pairs_in_one(steps, infos, alignment, self._stages, plans)
                if _columns(later_pairs) is not _columns(pairs):
                    break
                batch[numbers] = later_pairs
        except (PadiffError, OSError):
            pass  # the step is read again when it is requested, and raises its error then
        if not batch:
            return None
        try:
            current, *following = measured_alike([pairs, *batch.values()])
        except (PadiffError, OSError):
            return None  # each step is then measured alone, and raises its own error
        self._ahead = dict(zip(batch, following))
        return current

    def _alone(self, pairs: Sequence[Pair]) -> StepDiffs:
        looked = time.monotonic()

        def done(count: int) -> None:
            nonlocal looked
            if self._progress is not None and time.monotonic() - looked > _TICK and count < len(pairs):
                self._progress(count / len(pairs))
                looked = time.monotonic()

        return measured(pairs, self._elementwise, done)


def _key(pair: Pair) -> Hashable:
    """Return a key of the inputs that determine the measurement of a pair."""
    return id(pair.reference), id(pair.candidate), pair.layout, pair.scales


def _columns(pairs: Sequence[Pair]) -> PairColumns | None:
    """Return the columns that pairs share with equally structured steps; `None` if their sketches lie in no tables."""
    return pairs.columns if isinstance(pairs, PairTable) and pairs.tabled else None
