"""Content of a report: the diffs of two steps or two runs, and results computed from the diffs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from padiff.records.aftermath import Aftermath, Standing
from padiff.records.choice_counts import ChoiceCounts
from padiff.records.compared import Diff
from padiff.records.coverage import Coverage
from padiff.records.declared import Difference
from padiff.records.first_diff import FirstDiff
from padiff.records.models import Models
from padiff.records.movement import Movement
from padiff.records.overview import Overview, StageCounts, Table, table_of

#: Possible outcomes of a comparison (`ReportData.outcome`).
MATCH, DIFFER, CANNOT_TELL = ("match", "differ", "cannot tell")
_NOTHING_FOLLOWS = Aftermath()


@dataclass(frozen=True, eq=False, repr=False)
class ReportData:
    """All diffs of two steps or two runs, in causal order. True in a condition if the runs match.

    Attributes:
        diffs: every diff, including those that passed and pairs with a missing side. Diffs of a long comparison are
            created on access (`padiff.records.FoldedDiffs`).
        first_diff: the first diff that did not pass, with its explanation, or `None`.
        coverage: amount of each run that was compared.
        tolerance: the tolerance policy, in words.
        reference, candidate: names of the two runs.
        settings_differ: settings that the two runs declare differently (optimizers, clipping, loss, layers), in causal
            order.
        aftermath: relation of each diff to the first one.
        independent: further faults that do not follow from the first diff, in causal order; only a few that are
            certain.
        explained: in the report of a step, the first diff of an earlier step whose cause this step proves: this step
            holds in full the tensors that the earlier one holds as sketches.
        moved: how far the reference's own training moved, if the runs match; `None` if not known.
        choices: choices that differ within rounding, for each compared step that has some.
        tokens: how the tokens of the runs were aligned, and how far these are apart, in sentences without full stops;
            empty if the runs have one layout.
        regions: what compiled regions show against eager code, in sentences without full stops.
        environment: differences around the two trainings (threads, TF32, versions), the most informative first.
        models: both layer trees and the pairs of their layers, for display.
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
    moved: Movement | None = None
    choices: tuple[ChoiceCounts, ...] = ()
    tokens: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()

    def standing(self, diff: Diff) -> Standing | None:
        """Return the relation of a diff to the first one; `None` if the diff passed."""
        return self.aftermath.standing_of(diff)

    @property
    def outcome(self) -> str:
        """Return ``match``, ``differ``, or ``cannot tell``: nothing differs, but trainable parameters have no
        record.
        """
        if self.first_diff is not None:
            return DIFFER
        return CANNOT_TELL if self.coverage.unrecorded else MATCH

    @property
    def passed(self) -> bool:
        """Return True if the runs match."""
        return self.outcome == MATCH

    @cached_property
    def failed(self) -> Sequence[Diff]:
        """Return the diffs that did not pass, in causal order."""
        folded: Sequence[Diff] | None = getattr(self.diffs, "failed", None)
        return tuple(diff for diff in self.diffs if not diff.passed) if folded is None else folded

    @property
    def worst(self) -> Diff | None:
        """Return the compared diff with the largest relative L2 error, or `None` if no diff has figures.

        Diffs that are rounding noise throughout (their limit is above 1) are considered only if there are no others.
        """
        return self._overview.worst

    @property
    def stages(self) -> Mapping[str, StageCounts]:
        """Return the counts of each stage."""
        return self._overview.stages

    @cached_property
    def _overview(self) -> Overview:
        # Computed in one pass, as each pass over a long comparison creates its diffs anew.
        tables: Iterable[Table] | None = getattr(self.diffs, "tables", None)
        return Overview([table_of(self.diffs)] if tables is None else tables)

    def may_hold(self, figure: str) -> bool:
        """Return True if any diff may have ``floor``, or distances from float64 (``third_reference``)."""
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
