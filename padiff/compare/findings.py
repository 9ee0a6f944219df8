"""What a comparison has found so far: kept as it is while it is little, and folded when it is many steps."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.align import Alignment
from padiff.compare.coverage import Tally
from padiff.records import Both, Diff, FoldedDiffs, Run
from padiff.records.on_demand import Joined
from padiff.records.step_diffs import StepDiffs

# Diffs that are kept as they are: some 2 kB each, with what a sketch of them holds.
_UNFOLDED = 20_000


class Findings:
    """The diffs of the steps that were compared so far, in their order.

    Args:
        alignment: which layers answer to each other.
        runs: reference and candidate, if their steps can be read again.

    Attributes:
        tally: what was compared, and what was not.
    """

    def __init__(self, alignment: Alignment, runs: Both[Run] | None = None) -> None:
        self.tally = Tally(alignment)
        self._runs = runs
        self._kept: list[tuple[Both[int], Sequence[StepDiffs]]] = []
        self._count = 0
        self._folded: FoldedDiffs | None = None

    def add(self, ranks: Sequence[StepDiffs], numbers: Both[int]) -> None:
        """Add the judged diffs of each rank of a step."""
        for diffs in ranks:
            self.tally.add(diffs)
            self._count += len(diffs)
        self._kept.append((numbers, ranks))
        if self._runs is None or (self._folded is None and self._count <= _UNFOLDED):
            return
        if self._folded is None:
            self._folded = FoldedDiffs(self._runs)
        for known, some in self._kept:
            for rank, diffs in enumerate(some):
                self._folded.add(diffs, known, rank)
        self._kept.clear()

    @property
    def diffs(self) -> Sequence[Diff]:
        """All of them, in causal order."""
        if self._folded is not None:
            return self._folded
        return Joined(diffs for _, ranks in self._kept for diffs in ranks)
