"""Report as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from padiff.records.aftermath import Standing
from padiff.records.both import Both
from padiff.records.compared import Diff
from padiff.records.coverage_text import coverage_lines, left_out_text, zeros_text
from padiff.records.judgement import Figure, Grade, Rule
from padiff.records.recorded import LOOP, STAGES
from padiff.records.report_data import ReportData
from padiff.records.row_summary import Marked, Row, ratio_of, summarize_rows
from padiff.records.tree_text import place_lines
from padiff.sketches.sketch import SPREAD
from padiff.system.printable import printable, printable_lines

#: Relative L2 error above which a diff that passed indicates amplified rounding.
AMPLIFIED = 0.1

# Maximum number of diffs that a printed report lists, and of parameters that the verdict names.
_LISTED, _FEW = 10, 3
# Default rules, for which the report gives no reason beside the figures.
_PLAIN = frozenset({Rule.ROUNDING, Rule.SCALAR, Rule.EQUAL, Rule.TOLERANCE})
# Minimum number of diffs of one step and stage with one ratio that share a line.
_ALIKE = 3


def details_text(report: ReportData) -> str:
    """Return the details of a report as text: the table of stages, the failed diffs, both layer trees around the first
    one, the coverage, and the verdict with its evidence.
    """
    place = where_lines(report)
    figures = [*_table(report), *failed_lines(report), *floor_lines(report), *third_lines(report)]
    lines = [*figures, "", *place, *([""] if place else [])]
    return "\n".join([*lines, *coverage_lines(report), "", verdict(report)])


def where_lines(report: ReportData, width: int = 120) -> list[str]:
    """Return both layer trees around the first diff, and the lines of code that call it; empty if it is in no layer.

    Args:
        width: number of available columns.
    """
    first, models = report.first_diff, report.models
    if first is None or models is None:
        return []
    names, paths = Both(report.reference, report.candidate), Both(first.reference, first.candidate)
    return place_lines(models, names, paths, first.stacks, width)


def count_text(report: ReportData) -> str:
    """Return how many of the counted pairs differ, in words."""
    return f"{len(report.failed)} of {report.coverage.compared} pairs differ"


def verdict(report: ReportData) -> str:
    """Return the report as one sentence or a few."""
    return printable(_verdict(report))


def _verdict(report: ReportData) -> str:
    if report.first_diff is not None:
        return " ".join(first.message for first in (report.first_diff, *report.independent))
    coverage = report.coverage
    if coverage.unrecorded:
        return _cannot_tell(report)
    steps = f"{len(coverage.steps)} step{'s' if len(coverage.steps) != 1 else ''}"
    text = f"The runs match: {coverage.compared} tensors in {steps} compared, {coverage.share:.0%} of what was recorded"
    if coverage.reference_steps or coverage.candidate_steps:
        text += " in them"
    worst = report.worst
    if worst is not None and worst.figures is not None:
        text += (
            f". Largest diff: relative L2 {worst.figures.rel_l2:.2g} (max |diff| {worst.figures.max_abs:.2g}) "
            f"at {worst.pair.anchor.site}, step {worst.pair.step}"
        )
    return " ".join([f"{text}.", *(f"{note}." for note in match_notes(report))])


def match_notes(report: ReportData) -> list[str]:
    """Return what to know of a match, as sentences without full stops: what was not compared, and other settings."""
    coverage, worst = report.coverage, report.worst
    notes = []
    not_compared = left_out_text(report)
    if not_compared:
        notes.append(f"Not compared: {not_compared}")
    notes += [f"{lost[0].upper()}{lost[1:]}" for lost in coverage.lost]
    if coverage.sketched:
        notes.append(f"{coverage.sketched} of the pairs were judged from sketches (relative L2 to +- {SPREAD:.0%})")
    if coverage.ranks:
        notes.append(f"{coverage.ranks[0].upper()}{coverage.ranks[1:]}")
    cut = len(coverage.cut_elsewhere)
    if cut == 1:
        notes.append("One layer ends at another place of the computation, and is compared inside only")
    elif cut:
        notes.append(f"{cut} layers end at other places of the computation, and are compared inside only")
    if coverage.amplified is not None:
        notes.append(
            f"From step {coverage.amplified} on outputs are more than a tenth of themselves apart, as this training "
            "amplifies rounding: smaller differences there say nothing, and the steps before give the answer"
        )
    elif worst is not None and worst.figures is not None and worst.figures.rel_l2 > AMPLIFIED:
        notes.append("This training amplifies rounding: its earlier steps give the sharper answer")
    if coverage.zeros:
        notes.append(zeros_text(coverage.zeros))
    if coverage.notes:
        more = f" (and {len(coverage.notes) - 2} more)" if len(coverage.notes) > 2 else ""
        notes.append(f"But layers are set differently: {'; '.join(coverage.notes[:2])}{more}")
    precision = next((setting for setting in report.settings_differ if setting.kind == "precision"), None)
    if precision is not None:
        notes.append(f"But {precision.said}: {precision.text}")
    return notes


def _cannot_tell(report: ReportData) -> str:
    coverage = report.coverage
    counts = []
    for side, names in (("reference", coverage.reference_unrecorded), ("candidate", coverage.candidate_unrecorded)):
        if names:
            more = ", ..." if len(names) > _FEW else ""
            counts.append(f"{len(names)} of the {side} ({', '.join(names[:_FEW])}{more})")
    text = f"Can't tell whether the runs match: parameters that train have no record, {' and '.join(counts)}."
    if coverage.left_out:
        text += f" Not recorded: {'; '.join(coverage.left_out)}."
    return text + (
        f" What was recorded agrees: {coverage.compared} tensors, {coverage.share:.0%} of what should have been."
    )


def floor_lines(report: ReportData) -> list[str]:
    """Return lines that compare diffs with their measured floors; empty without floors."""
    if not report.may_hold("floor"):
        return []
    worst: dict[str, Diff] = {}
    grades: Counter[Grade] = Counter()
    count = 0
    for diff in report.diffs:
        floors = diff.floors
        if diff.grade is not None:
            grades[diff.grade] += 1
        if floors is None:
            continue
        count += 1
        if diff.pair.stage not in worst or floors > (worst[diff.pair.stage].floors or 0.0):
            worst[diff.pair.stage] = diff
    if not count:
        return []
    summary = ", ".join(f"{grades[grade]} {grade}" for grade in Grade if grades[grade])
    lines = [f"{count} diffs have a measured floor, what rounding alone makes of them; all diffs: {summary}"]
    largest = (
        f"{stage} {worst[stage].floors:.3g} ({worst[stage].pair.anchor.site})" for stage in STAGES if stage in worst
    )
    return [*lines, f"largest in multiples of their floors: {', '.join(largest)}"]


def third_lines(report: ReportData) -> list[str]:
    """Return a line that says which side is farther from the step in float64; empty without a step in float64."""
    if not report.may_hold("third_reference"):
        return []
    count: Counter[str] = Counter()
    worst: dict[str, Diff] = {}
    code = ""
    for diff in report.diffs:
        third = diff.figures.third if diff.figures is not None else None
        if third is None:
            continue
        code, side = third.code, third.farther
        count[side] += 1
        before = worst[side].figures if side in worst else None
        if before is None or before.third is None or max(third.errors) > max(before.third.errors):
            worst[side] = diff
    if not count:
        return []
    parts = []
    for side in ("reference", "candidate"):
        far = worst.get(side)
        if far is not None and far.figures is not None and far.figures.third is not None:
            third = far.figures.third
            times = f"{third.times:.3g} times as far" if math.isfinite(third.times) else "the other is equal to it"
            parts.append(
                f"the {side} is farther from it in {count[side]}, by {max(third.errors):.2g} at most "
                f"({far.pair.anchor.site}, {times})"
            )
    total = sum(count.values())
    return [f"float64 ({code}'s code): of {total} tensors, {'; '.join(parts) or 'both sides are as far from it'}"]


def failed_lines(report: ReportData, at_most: int | None = _LISTED) -> list[str]:
    """Return a line for each failed diff, in causal order; many similar diffs share a line.

    Args:
        at_most: maximum number of lines, besides the one that counts the diffs; `None` lists each diff separately.
    """
    if not report.failed:
        return []
    rows, hidden = failed_rows(report, at_most)
    follow = f", which {'follows' if hidden == 1 else 'follow'}" if report.aftermath.marks else ""
    last = [f"  ... and {hidden} more{follow}"] if hidden else []
    return printable_lines([f"{count_text(report)}, in causal order:", *(row.line for row in rows), *last])


def failed_rows(report: ReportData, at_most: int | None = _LISTED) -> tuple[list[Row], int]:
    """Return the rows that `failed_lines` prints, and the number of diffs without a row."""
    if at_most is None:
        return [Marked(k, diff, _mark(report, diff)).row for k, diff in enumerate(report.failed)], 0
    alike: dict[tuple[Any, ...], list[Marked]] = {}
    for number, diff in enumerate(report.failed):
        alike.setdefault(_likeness(diff) or (number,), []).append(Marked(number, diff, _mark(report, diff)))
    counts = _counts(report) if any(len(group) >= _ALIKE for group in alike.values()) else Counter()
    shown: list[tuple[list[Marked], Row]] = []
    for key, group in alike.items():
        if len(group) >= _ALIKE:
            shown.append((group, _folded(key, group, counts[key[0], key[1]])))
        else:
            shown += [([marked], marked.row) for marked in group]
    if len(shown) <= at_most:
        return [row for _, row in shown], 0
    # The first row stays separate, with the diffs that have the same ratio.
    (first, row), *others = shown
    remainder = [marked for group, _ in others for marked in group]
    rows, hidden = summarize_rows(remainder, max(at_most - 1, 1), {first[0].diff.pair.stage})
    return [row, *rows], hidden


def _mark(report: ReportData, diff: Diff) -> str:
    """Return the relation of a diff to the first one in words; empty if the diff follows from it."""
    standing = report.standing(diff)
    return "" if standing is None or standing is Standing.FOLLOWS else str(standing)


def _likeness(diff: Diff) -> tuple[Any, ...] | None:
    """Return step, stage, and a phrase that similar diffs share; `None` if the diff has no such phrase."""
    pair = diff.pair
    if pair.anchor.layer == LOOP:
        return None
    if not pair.complete:
        return pair.step, pair.stage, f"are {diff.problem}"
    ratio = ratio_of(diff)
    return None if ratio is None else (pair.step, pair.stage, f"are {ratio:.3g} times the reference's")


def _counts(report: ReportData) -> Counter[tuple[int, str]]:
    return Counter((d.pair.step, d.pair.stage) for d in report.diffs if d.counts and d.pair.anchor.layer != LOOP)


def _folded(key: tuple[Any, ...], group: Sequence[Marked], count: int) -> Row:
    step, stage, what = key
    anchors = [marked.diff.pair.anchor for marked in group[:_FEW]]
    names = ", ".join(f"{anchor.layer}/{anchor.slot}" for anchor in anchors)
    mark = next((marked.mark for marked in group if marked.mark), "")
    return Row(f"step {step}", stage, f"{len(group)} of {count} {what} ({names}, ...)", mark)


def _table(report: ReportData) -> list[str]:
    """Return the table of stages as plain text."""
    rows = [["stage", "pairs", "differ", "rel L2", "allowed", "closest to its limit"]]
    table = stage_table(report)
    for row in table:
        figures = ["" if row[name] is None else f"{row[name]:.2g}" for name in ("worst", "limit")]
        rows.append([row["stage"], str(row["compared"]), str(row["differ"]), *figures, row["where"]])
    widths = [max(len(row[k]) for row in rows) for k in range(5)]
    lines = []
    for cells in rows:
        cells = [*map(printable, cells)]
        cells = [cells[0].ljust(widths[0]), *(cells[k].rjust(widths[k]) for k in range(1, 5)), cells[5]]
        lines.append("  ".join(cells).rstrip())
    return lines + limit_lines(table)


def limit_lines(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each reason why stages are allowed more than rounding.

    Args:
        table: the rows of `stage_table`.
    """
    stages: dict[Rule, list[str]] = {}
    for row in table:
        if row["limit"] is not None and row["rule"] not in _PLAIN:
            stages.setdefault(row["rule"], []).append(row["stage"])
    return [f"allowed at {', '.join(names)}: {rule}" for rule, names in stages.items()]


def stage_table(report: ReportData) -> list[dict[str, Any]]:
    """Return a row for each stage: number of pairs, number that differ, the worst relative L2 error and its
    position.
    """
    rows = []
    for stage in STAGES:
        counts = report.stages.get(stage)
        if counts is None:
            continue
        row: dict[str, Any] = {"stage": stage, "compared": counts.compared, "differ": counts.differ}
        row |= {"alone": counts.alone, "worst": None, "limit": None, "where": "", "rule": None}
        worst = counts.worst
        if worst is not None and worst.figures is not None:
            judged = worst.judgement
            row["worst"] = worst.figures.rel_l2
            row["limit"] = judged.limit if judged is not None and judged.figure is Figure.REL_L2 else None
            row["rule"] = judged.rule if judged is not None else None
            row["where"] = f"{worst.pair.anchor.site}, step {worst.pair.step}"
        rows.append(row)
    return rows
