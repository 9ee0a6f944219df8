"""Who reads and measures the steps of a comparison: workers, or this process; small steps several at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

from padiff.align import Alignment
from padiff.compare.measure.many import measured, measured_alike
from padiff.compare.measure.pairs import measure_pair
from padiff.compare.measure.together import PAIRS_AT_A_TIME, count_together
from padiff.compare.workers import Workers
from padiff.errors import PadiffError
from padiff.pair.plans import PairPlans
from padiff.pair.ranks import pairs_in_one
from padiff.pair.united import united
from padiff.records import Both, Pair, Run, Step
from padiff.records.planned import PairColumns, PlannedPairs, fact_of_pairs
from padiff.records.step_diffs import StepDiffs

# Seconds between two looks at how much of a step is measured.
_TICK = 0.2
#: Steps that are measured at a time, as far as they have few pairs: as many as make numpy's calls weigh little.
STEPS_AT_A_TIME = 64
# Of a step's pairs, the share that may be measured one by one where several steps are measured at a time.
_ALONE_AT_MOST = 0.25


class Measuring:
    """Reads steps of two runs, and measures their pairs.

    Where steps are small, those after the one that is asked for are read and measured with it. What is wrong with one
    of them shows when it is asked for.

    Args:
        runs: reference and candidate.
        stages: what is measured.
        elementwise: as `padiff.compare.measure.pairs.measure_pair` takes it.
        workers: processes that measure steps ahead.
        progress: called now and then while a step is measured, with the share of it that is done.
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
        """Start the workers, if that pays for steps like this one."""
        if self._workers is not None:
            self._workers.start(step)

    def steps(self, numbers: Both[int]) -> Both[list[Step]]:
        """A step of each run, as each process recorded it.

        Raises:
            padiff.errors.RunFolderError: it can't be read.
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
        """The diffs of a step's pairs, not judged yet.

        Args:
            numbers: of the step, as each run has it; `None` of steps that are no run's.
            alignment: by which they were paired.
            plans: what steps were seen to be paired like.
            later: the steps that are asked for next.

        Raises:
            padiff.errors.RunFolderError: a tensor can't be read.
        """
        if self._workers is not None and numbers is not None:
            found = self._workers.diffs(numbers, pairs, alignment, self._stages, self._elementwise)
            if found is not None:
                return found
        ahead = self._ahead.pop(numbers, None) if numbers is not None else None
        if ahead is not None and _columns(ahead.pairs) is _columns(pairs):
            return ahead
        if plans is not None and self._are_small(pairs):
            found = self._with_later(pairs, alignment, plans, later)
            if found is not None:
                return found
        return self._alone(pairs)

    def again(self, pairs: Sequence[Pair], measured_before: StepDiffs) -> StepDiffs:
        """The diffs of a step that was measured by another alignment: most of its pairs are the same."""
        known = {_key(diff.pair): diff for diff in measured_before}
        found = [(pair, known.get(_key(pair))) for pair in pairs]
        return StepDiffs.of(
            [
                replace(diff, pair=pair) if diff is not None else measure_pair(pair, self._elementwise)
                for pair, diff in found
            ]
        )

    def _are_small(self, pairs: Sequence[Pair]) -> bool:
        """Whether steps like this one are measured several at a time."""
        if self._elementwise is not None or (self._workers is not None and self._workers.at_work):
            return False
        if _columns(pairs) is None or not 0 < 2 * len(pairs) <= PAIRS_AT_A_TIME:
            return False
        return len(pairs) - fact_of_pairs(pairs, count_together) <= _ALONE_AT_MOST * len(pairs)

    def _with_later(
        self, pairs: Sequence[Pair], alignment: Alignment, plans: PairPlans, later: Sequence[Both[int]]
    ) -> StepDiffs | None:
        """The diffs of a step that is measured with those after it; `None` where it is to be measured by itself."""
        some: dict[Both[int], Sequence[Pair]] = {}
        try:
            for numbers in later[: min(STEPS_AT_A_TIME, PAIRS_AT_A_TIME // len(pairs)) - 1]:
                steps = self._read[numbers] = self.steps(numbers).map(united)
                infos = self._runs.map(lambda run: run.info)
                found = pairs_in_one(steps, infos, alignment, self._stages, plans)
                if _columns(found) is not _columns(pairs):
                    break
                some[numbers] = found
        except (PadiffError, OSError):
            pass  # it is read again when it is asked for, and says what is wrong
        if not some:
            return None
        try:
            own, *others = measured_alike([pairs, *some.values()])
        except (PadiffError, OSError):
            return None  # one by one, each says by itself what is wrong with it
        self._ahead = dict(zip(some, others))
        return own

    def _alone(self, pairs: Sequence[Pair]) -> StepDiffs:
        looked = time.monotonic()

        def done(count: int) -> None:
            nonlocal looked
            if self._progress is not None and time.monotonic() - looked > _TICK and count < len(pairs):
                self._progress(count / len(pairs))
                looked = time.monotonic()

        return measured(pairs, self._elementwise, done)


def _key(pair: Pair) -> Hashable:
    """What is measured of a pair depends on nothing else."""
    return id(pair.reference), id(pair.candidate), pair.layout, pair.scales


def _columns(pairs: Sequence[Pair]) -> PairColumns | None:
    """What pairs have in common with those of steps alike; `None` where their sketches lie in no tables."""
    return pairs.columns if isinstance(pairs, PlannedPairs) and pairs.tabled else None
