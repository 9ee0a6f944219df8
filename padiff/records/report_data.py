"""Content of a report: the diffs, coverage, counts of choices, movement, overview, and both models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from padiff.records.both import Both
from padiff.records.compared import Diff, Pair, Rule
from padiff.records.declared import Difference
from padiff.records.first_diff import Aftermath, FirstDiff, Standing
from padiff.records.pair_table import stage_numbers
from padiff.records.recorded import STAGES, Layer
from padiff.records.step_diffs import ROW, RULE_NUMBERS, relative_l2, row_of
from padiff.records.traces import LOOP
from padiff.system.frames import Frame

# Numbers of rules by which a tensor passes although it differs.
_OTHERWISE = [RULE_NUMBERS[rule] for rule in (Rule.WRITTEN_OTHERWISE, Rule.GIVEN_OTHERWISE, Rule.SCALED)]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Amount of each run that was compared, and names of everything that was not.

    Attributes:
        compared: number of pairs that the verdict counts (`Diff.counts`); "5 of 343 pairs differ" refers to these 343.
        missing: number of these pairs that fail because a side is missing.
        reference_records, candidate_records: number of records of the compared steps.
        reference_layers, candidate_layers: unmatched layers that own parameters or have no sublayers, by path.
        reference_containers, candidate_containers: unmatched layers that only hold other layers: the models nest
            differently.
        reference_parts, candidate_parts: layers without a partner whose parameters were compared as parts of another
            layer's (query, key and value in one matrix); only their outputs were not compared.
        reference_parameters, candidate_parameters: unmatched parameters and buffers, by ``layer/slot``.
        reference_sites, candidate_sites: unmatched records of matched layers, by site.
        uncalled: layers whose forward was never called, by path, prefixed with the side.
        steps: numbers of the compared steps.
        reference_steps, candidate_steps: steps that only this run has.
        notes: further sentences (settings that differ, calls that were not compared, ...).
        ambiguous: pairs for which another partner fits nearly as well, with that partner.
        assumed: assumptions about the storage of a tensor that neither names nor shapes prove.
        views: layers whose tensors have another layout, and the layout.
        cut_elsewhere: pairs of layers that end at different places of the computation: their contents are compared,
            their own outputs are not.
        sketched: number of pairs that were judged from sketches; their relative L2 error is an estimate.
        bounded: number of the sketched pairs that were judged from norms and means only, because one side has another
            layout.
        ranks: the compared quantities of runs with different numbers of processes, in words.
        amplified: the first step whose outputs differ by more than a tenth of themselves although no diff failed:
            rounding that the training amplified. `None` if there is none.
        unmeasured: sites of pairs that have sketches only, from which nothing can be computed: parts of a fused tensor.
        reference_unrecorded, candidate_unrecorded: trainable parameters that the lists include and that have no record
            in any compared step, by ``layer/slot``.
        left_out: reasons why something was not recorded, as noted by the first compared steps, prefixed with the side.
        lost: sentences that name a rank and the steps that other ranks wrote and this one did not.
        copies: sentences on copies of a model (EMA, target networks) that its loop changes, and that are not recorded.
        zeros: sites of gradients that are rounding noise around a true value of zero, and that a fixed tolerance
            accepted.
    """

    compared: int = 0
    missing: int = 0
    reference_records: int = 0
    candidate_records: int = 0
    reference_layers: tuple[str, ...] = ()
    candidate_layers: tuple[str, ...] = ()
    reference_containers: tuple[str, ...] = ()
    candidate_containers: tuple[str, ...] = ()
    reference_parts: tuple[str, ...] = ()
    candidate_parts: tuple[str, ...] = ()
    reference_parameters: tuple[str, ...] = ()
    candidate_parameters: tuple[str, ...] = ()
    reference_sites: tuple[str, ...] = ()
    candidate_sites: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    reference_steps: tuple[int, ...] = ()
    candidate_steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    ambiguous: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    cut_elsewhere: tuple[str, ...] = ()
    sketched: int = 0
    bounded: int = 0
    unmeasured: tuple[str, ...] = ()
    ranks: str = ""
    amplified: int | None = None
    reference_unrecorded: tuple[str, ...] = ()
    candidate_unrecorded: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def unrecorded(self) -> int:
        """Return the number of trainable parameters without a record, on both sides together."""
        return len(self.reference_unrecorded) + len(self.candidate_unrecorded)

    @property
    def share(self) -> float:
        """Return the paired records as a share of all records that both runs should have, 0 to 1.

        A trainable parameter without a record counts as one record of each compared step.
        """
        total = self.reference_records + self.candidate_records + self.unrecorded * max(len(self.steps), 1)
        return 2 * (self.compared - self.missing) / total if total else 0.0

    @property
    def complete(self) -> bool:
        """Return True if every record of both runs was paired and every trainable parameter has a record."""
        paired = self.compared - self.missing
        return self.reference_records == self.candidate_records == paired and not self.unrecorded


@dataclass(frozen=True, slots=True)
class ChoiceCounts:
    """Rows (tokens, samples, places) of scores that chose otherwise in one step, by scores that agree within rounding.

    Attributes:
        step: number of the step.
        calls: functions that chose, with the reference's layer: ``("topk", "layers.1.gate")``.
        flipped, rows: number of rows that chose otherwise, and of all rows.
        without: number of tensors judged without these rows, or with a limit that these raise.
        unjudged: number of tensors that were not judged because of these rows.
        tied: number of these rows that chose between equal scores.
        rules: which of equal scores each side takes; `None` if there are no such rows.
    """

    step: int
    calls: tuple[tuple[str, str], ...]
    flipped: int
    rows: int
    without: int
    unjudged: int
    tied: int = 0
    rules: Both[str] | None = None


def choice_notes(counts: tuple[ChoiceCounts, ...]) -> list[str]:
    """Return the counts of all steps as sentences without their ends; none if nothing chose otherwise."""
    if not counts:
        return []
    calls = {call for each in counts for call in each.calls}
    names = " and ".join(sorted({f"{function}()" if function else "the code" for function, _ in calls}))
    layers = {layer for _, layer in calls}
    where = next(iter(layers)) if len(layers) == 1 else f"{len(layers)} layers"
    where = "the loop" if where == LOOP else where
    flipped, rows, without, unjudged, tied = (
        sum(getattr(each, name) for each in counts) for name in ("flipped", "rows", "without", "unjudged", "tied")
    )
    rate = f"{names} of {where}: {flipped:,} of {rows:,}"
    if len(counts) > 1:
        text = f"{rate} rows choose otherwise in {len(counts):,} steps, within rounding"
    else:
        text = f"{rate} rows choose otherwise, within rounding"
    costs = [
        f"{without:,} tensor{'s are' if without > 1 else ' is'} judged without these rows" * bool(without),
        f"{unjudged:,} not judged" * bool(unjudged),
    ]
    costs = [cost for cost in costs if cost]
    notes = [f"{text}: {', '.join(costs)}" if costs else text]
    rules = next((each.rules for each in counts if each.rules is not None), None)
    if rules is not None:
        notes.append(
            f"{tied:,} of these rows choose otherwise between scores that are equal to the bit: of these the "
            f"candidate takes {rules.candidate}, the reference {rules.reference}"
        )
    return notes


#: Multiple of the limits that weights have to move by, so that equal weights show something. Chosen: a fault of a tenth
#: of the movement is then beyond the limits.
ENOUGH = 10.0


@dataclass(frozen=True, slots=True)
class Movement:
    """How far the reference's weights and loss moved in the compared steps.

    A match of runs that hardly moved shows little: whatever is wrong with their gradients and updates stays below the
    limits.

    Attributes:
        weights: ``||w_last - w_first|| / ||w_first||`` over the trained parameters.
        limit: the smallest part of the movement that would show if it were wrong, in the same unit: the median limit of
            these parameters or of their updates in the last compared step, whichever is smaller.
        losses: the loss of the first and of the last compared step; `None` if it was not recorded in both.
    """

    weights: float
    limit: float
    losses: tuple[float, float] | None = None

    @property
    def enough(self) -> bool:
        """Return True if the weights moved far enough to show a fault."""
        return self.weights > 0 and self.weights >= ENOUGH * self.limit

    @property
    def sentence(self) -> str:
        """Return the movement in words."""
        text = f"the reference's weights by {self.weights:{'.2%' if self.weights < 0.01 else '.0%'}}"
        if self.losses is not None:
            text += ", its loss from {:.4g} to {:.4g}".format(*self.losses)
        if self.enough:
            return f"{text}: enough to show a fault"
        return f"{text}: less than {ENOUGH:.0f} times the {self.limit:.1g} allowed, so that the match shows little"


@dataclass(slots=True)
class StageCounts:
    """Counts and worst diff of one stage.

    Attributes:
        compared, alone: number of pairs that count, and of pairs without anything to compare with.
        differ: number of diffs that did not pass.
        worst: the compared diff with the largest multiple of its limit; `None` if no diff has figures.
        excess: that multiple.
    """

    compared: int = 0
    alone: int = 0
    differ: int = 0
    worst: Diff | None = None
    excess: float = -1.0


class Table(NamedTuple):
    """Columns of several diffs in causal order, with an element for each diff.

    Attributes:
        stages: number of the stage in `STAGES`.
        complete: True if both sides are present.
        rows: rows of the dtype `padiff.records.step_diffs.ROW`.
        diff: a function that returns the diff at a position.
        step: number of the step; -1 for several steps.
    """

    stages: np.ndarray
    complete: np.ndarray
    rows: np.ndarray
    diff: Callable[[int], Diff]
    step: int = -1


def tables_of(diffs: Sequence[Diff]) -> Iterator[Table]:
    """Yield the table of each step of a report's diffs; several tables of a step with several ranks."""
    tables: Iterable[Table] | None = getattr(diffs, "tables", None)
    if tables is not None:
        yield from tables
        return
    for step, group in groupby(diffs, lambda diff: diff.pair.step):
        yield table_of(list(group))._replace(step=step)


def table_of(diffs: Sequence[Diff]) -> Table:
    """Return the table of a sequence of diffs."""
    pairs: list[Pair] = [diff.pair for diff in diffs]
    complete = np.array([pair.complete for pair in pairs], np.bool_)
    rows = np.array([row_of(diff) for diff in diffs], ROW)
    return Table(stage_numbers(pair.stage for pair in pairs), complete, rows, diffs.__getitem__)


class Overview:
    """Counts of diffs by stage, and the worst diff.

    Args:
        tables: tables of the diffs.

    Attributes:
        stages: counts of each stage, in order of the stages' first occurrence.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self.stages: dict[str, StageCounts] = {}
        self._worst: list[Diff | None] = [None, None]
        self._largest = [-1.0, -1.0]
        for table in tables:
            self._add(table)

    @property
    def worst(self) -> Diff | None:
        """Return the compared diff with the largest relative L2 error, or `None` if no diff has figures.

        Diffs that are rounding noise throughout (their limit is above 1) are considered only if there are no others.
        """
        return self._worst[0] or self._worst[1]

    def _add(self, table: Table) -> None:
        rows = table.rows
        passed, measured, judged = rows["passed"], rows["basis"] != 0, rows["figure"] != 0
        compared = table.complete & (measured | ~passed)
        errors, excess = relative_l2(rows), _excess(rows)
        looked_at = compared & measured & np.isfinite(errors)
        otherwise = passed & np.isin(rows["rule"], _OTHERWISE)
        noise = passed & judged & ((rows["limit"] > 1) | otherwise)
        excess[noise] = 0.0  # the limit is the error itself, or no error exceeds it
        for kind, mask in enumerate((looked_at & ~noise, looked_at & noise)):
            self._worst[kind], self._largest[kind] = _larger(
                table, np.flatnonzero(mask), errors, self._worst[kind], self._largest[kind]
            )
        numbers, first = np.unique(table.stages, return_index=True)
        for number in numbers[first.argsort()].tolist():
            places = np.flatnonzero(table.stages == number)
            stage = self.stages.setdefault(STAGES[number], StageCounts())
            count = int(np.count_nonzero(compared[places] | ~passed[places]))
            stage.compared += count
            stage.alone += len(places) - count
            stage.differ += int(np.count_nonzero(~passed[places]))
            stage.worst, stage.excess = _larger(table, places[looked_at[places]], excess, stage.worst, stage.excess)


def _larger(
    table: Table, places: np.ndarray, values: np.ndarray, worst: Diff | None, largest: float
) -> tuple[Diff | None, float]:
    """Return the diff at `places` with the largest value and that value, or `worst` and `largest` if no value exceeds
    it.
    """
    chosen = values[places]
    chosen = np.where(np.isnan(chosen), -np.inf, chosen)
    if not chosen.size or not chosen.max() > largest:
        return worst, largest
    most = int(chosen.argmax())
    return table.diff(int(places[most])), float(chosen[most])


def _excess(rows: np.ndarray) -> np.ndarray:
    """Return `Diff.excess` of each row."""
    value, limit = rows["value"], rows["limit"]
    with np.errstate(all="ignore"):
        judged = np.where(limit == 0, np.where(value == 0, 0.0, np.inf), value / limit)
    return np.where(rows["figure"] != 0, judged, np.where(rows["passed"], 0.0, np.inf))


_NOT_RECORDED: Both[Mapping[str, tuple[Frame, ...]]] = Both({}, {})
_NO_LINES: Both[Mapping[str, Frame]] = Both({}, {})
#: Stands for files that are not known.
NO_FILES: Both[Mapping[str, str]] = Both({}, {})


@dataclass(frozen=True, slots=True)
class Partners:
    """Two layers that correspond to each other; a layer with several partners has one object for each.

    Attributes:
        reference, candidate: paths of the two layers.
        reason: the kind of evidence that decided, e.g. ``names``.
        confidence: 0 to 1; 1 for pairs from a layer map that a person wrote.
    """

    reference: str
    candidate: str
    reason: str
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class Models:
    """Both layer trees, and the pairs of layers that the alignment found.

    Attributes:
        layers: each tree, depth first, in order of definition.
        frameworks: name and version of each side's framework.
        partners: the pairs, in the reference's order of definition.
        stacks: the stack of each layer's first call, by the layer's path, outermost line first; for layers whose stack
            was recorded.
        lines: the line that constructs each layer (by path) and each optimizer (``optimizer.0``), where it is known.
        files: the SHA-256 of each file of the user's code, by path, where it is known.
        optimized: the key of each parameter's group in its optimizer (``optimizer.0.group.1``), by ``layer/slot``.
        command: the command line of the candidate's training, where it is known.
    """

    layers: Both[tuple[Layer, ...]]
    frameworks: Both[str]
    partners: tuple[Partners, ...] = ()
    stacks: Both[Mapping[str, tuple[Frame, ...]]] = _NOT_RECORDED
    lines: Both[Mapping[str, Frame]] = _NO_LINES
    files: Both[Mapping[str, str]] = NO_FILES
    optimized: Both[Mapping[str, str]] = NO_FILES
    command: str = ""


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
