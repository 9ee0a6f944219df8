"""What a report holds: the diffs of two steps or two runs, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from padiff.records.aftermath import Aftermath, Standing
from padiff.records.compared import Diff
from padiff.records.coverage import Coverage
from padiff.records.declared import Difference
from padiff.records.first_diff import FirstDiff
from padiff.records.models import Models
from padiff.records.overview import Overview, StageCounts, Table, table_of

#: What a comparison may come to (`ReportData.outcome`).
MATCH, DIFFER, CANNOT_TELL = ("match", "differ", "cannot tell")
_NOTHING_FOLLOWS = Aftermath()


@dataclass(frozen=True, eq=False, repr=False)
class ReportData:
    """All diffs of two steps or two runs, in causal order. True in a condition if the runs match.

    Attributes:
        diffs: every diff, the ones that passed and the pairs with a missing side too. Of a long comparison they are
            made anew as they are asked for (`padiff.records.FoldedDiffs`).
        first_diff: the first one that did not pass, in words, or `None`.
        coverage: how much of each run was compared.
        tolerance: the tolerance policy, in words.
        reference, candidate: names of the two runs.
        settings_differ: what the two runs declare differently (optimizers, clipping, loss, layers), in causal order.
        aftermath: which diffs follow from the first one.
        independent: further faults that do not follow from the first diff, in causal order; of few that are sure.
        explained: of a step's report, the first diff of a step before, if this is the step that proves its cause: it
            has in full what that one had as sketches.
        environment: what differs around the two trainings (threads, TF32, versions), the most telling first.
        models: both layer trees and the pairs that were found, for those who show them.
    """

    diffs: Sequence[Diff]
    coverage: Coverage
    first_diff: FirstDiff | None = None
    tolerance: str = ""
    reference: str = "reference"
    candidate: str = "candidate"
    environment: tuple[str, ...] = ()
    settings_differ: tuple[Difference, ...] = ()
    aftermath: Aftermath = _NOTHING_FOLLOWS
    independent: tuple[FirstDiff, ...] = ()
    models: Models | None = None
    explained: FirstDiff | None = None

    def standing(self, diff: Diff) -> Standing | None:
        """How one of the diffs stands to the first one; `None` if it passed."""
        return self.aftermath.of(diff)

    @property
    def outcome(self) -> str:
        """``match``, ``differ``, or ``cannot tell``: nothing differs, but parameters that train have no record."""
        if self.first_diff is not None:
            return DIFFER
        return CANNOT_TELL if self.coverage.unrecorded else MATCH

    @property
    def passed(self) -> bool:
        """Whether the runs match."""
        return self.outcome == MATCH

    @cached_property
    def failed(self) -> Sequence[Diff]:
        """The diffs that did not pass, in causal order."""
        folded: Sequence[Diff] | None = getattr(self.diffs, "failed", None)
        return tuple(diff for diff in self.diffs if not diff.passed) if folded is None else folded

    @property
    def worst(self) -> Diff | None:
        """The compared diff with the largest relative L2 error, or `None` where nothing has figures.

        What is rounding noise throughout (its limit is above 1) is passed over while there is anything else.
        """
        return self._overview.worst

    @property
    def stages(self) -> Mapping[str, StageCounts]:
        """What the diffs of each stage come to."""
        return self._overview.stages

    @cached_property
    def _overview(self) -> Overview:
        # In one go: the diffs of a long comparison are made anew each time that somebody goes through them.
        tables: Iterable[Table] | None = getattr(self.diffs, "tables", None)
        return Overview([table_of(self.diffs)] if tables is None else tables)

    def may_hold(self, figure: str) -> bool:
        """Whether any diff may have ``floor``, or distances from float64 (``third_reference``)."""
        holds = getattr(self.diffs, "holds", None)
        return holds is None or holds(figure)

    def __bool__(self) -> bool:
        return self.passed

    def __eq__(self, other: object) -> bool:
        # People write `if result == False:` after a check.
        return self.passed is other if isinstance(other, bool) else self is other

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[Diff]:
        return iter(self.diffs)
