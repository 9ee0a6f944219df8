"""Diffs of a comparison so far: as objects for few steps, in compact form for many steps."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.align import Alignment
from padiff.compare.coverage import Tally
from padiff.records import Both, CompactDiffs, Diff, Run
from padiff.records.lazy_sequence import ChainedSequence
from padiff.records.step_diffs import StepDiffs

# Number of diffs stored as objects before compaction begins: some 2 kB each, including their sketches.
_UNFOLDED = 20_000


class Findings:
    """Diffs of the steps that were compared so far, in step order.

    Args:
        alignment: the paired layers.
        runs: reference and candidate, if their steps can be read again.

    Attributes:
        tally: counts of the compared and of the uncompared pairs.
    """

    def __init__(self, alignment: Alignment, runs: Both[Run] | None = None) -> None:
        self.tally = Tally(alignment)
        self._runs = runs
        self._kept: list[tuple[Both[int], Sequence[StepDiffs]]] = []
        self._count = 0
        self._folded: CompactDiffs | None = None

    def add(self, ranks: Sequence[StepDiffs], numbers: Both[int]) -> None:
        """Add the judged diffs of each rank of a step."""
        for diffs in ranks:
            self.tally.add(diffs)
            self._count += len(diffs)
        self._kept.append((numbers, ranks))
        if self._runs is None or (self._folded is None and self._count <= _UNFOLDED):
            return
        if self._folded is None:
            self._folded = CompactDiffs(self._runs)
        for numbers_before, ranks_before in self._kept:
            for rank, diffs in enumerate(ranks_before):
                self._folded.add(diffs, numbers_before, rank)
        self._kept.clear()

    @property
    def diffs(self) -> Sequence[Diff]:
        """All diffs, in causal order."""
        if self._folded is not None:
            return self._folded
        return ChainedSequence(diffs for _, ranks in self._kept for diffs in ranks)
