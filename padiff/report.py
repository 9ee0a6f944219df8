"""A report as text, JSON, JUnit XML and Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any
from xml.etree import ElementTree

from padiff.compare.coverage import AMPLIFIED
from padiff.compare.explain import figures_text
from padiff.records import STAGES, Diff, Report
from padiff.sketch import ELEMENTS, SPREAD

#: Version of what `to_json` gives.
SCHEMA_VERSION = 1


def verdict(report: Report) -> str:
    """The report in one sentence."""
    if report.first_diff is not None:
        return report.first_diff.message
    coverage = report.coverage
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
    text += "."
    left = _left_out(report)
    if left:
        text += f" Not compared: {left}."
    if coverage.sketched:
        text += f" {coverage.sketched} of the pairs were judged from sketches (relative L2 to +- {SPREAD:.0%})."
    if coverage.ranks:
        text += f" {coverage.ranks[0].upper()}{coverage.ranks[1:]}."
    cut = len(coverage.cut_elsewhere)
    if cut:
        text += " One layer ends" if cut == 1 else f" {cut} layers end"
        text += (
            " at another place of the computation, and is compared inside only."
            if cut == 1
            else (" at other places of the computation, and are compared inside only.")
        )
    if coverage.amplified is not None:
        text += (
            f" From step {coverage.amplified} on outputs are more than a tenth of themselves apart, as this training "
            "amplifies rounding: what parts there by less can't be told, and the steps before give the answer."
        )
    elif worst is not None and worst.figures is not None and worst.figures.rel_l2 > AMPLIFIED:
        text += " This training amplifies rounding: its earlier steps give the sharper answer."
    if coverage.notes:
        more = f" (and {len(coverage.notes) - 2} more)" if len(coverage.notes) > 2 else ""
        text += f" But layers are set differently: {'; '.join(coverage.notes[:2])}{more}."
    return text


def coverage_lines(report: Report, at_most: int = 8) -> list[str]:
    """What was left out, and what is worth knowing besides, a line each."""
    coverage = report.coverage
    lines = [f"{coverage.compared} pairs, {coverage.share:.1%} of what was recorded in the compared steps"]
    if coverage.ranks:
        lines.append(coverage.ranks)
    if coverage.sketched:
        sampled = f"of tensors above {ELEMENTS:,} elements a sample was looked at"
        lines.append(f"{coverage.sketched} pairs judged from sketches: relative L2 to +- {SPREAD:.0%}, {sampled}")
    if coverage.bounded:
        lines.append(f"{coverage.bounded} of them from norms and means only: the layouts differ")
    if coverage.amplified is not None:
        lines.append(
            f"from step {coverage.amplified} on the runs are apart by rounding that the training amplified: little "
            "else can be told there"
        )
    named: list[tuple[str, Iterable[str]]] = [
        (f"layers of the {report.reference} run without a partner", coverage.reference_layers),
        (f"layers of the {report.candidate} run without a partner", coverage.candidate_layers),
        (
            f"containers of the {report.reference} run without a partner (another nesting)",
            coverage.reference_containers,
        ),
        (
            f"containers of the {report.candidate} run without a partner (another nesting)",
            coverage.candidate_containers,
        ),
        (f"parameters of the {report.reference} run without a partner", coverage.reference_parameters),
        (f"parameters of the {report.candidate} run without a partner", coverage.candidate_parameters),
        (f"recorded on the {report.reference} run only", coverage.reference_sites),
        (f"recorded on the {report.candidate} run only", coverage.candidate_sites),
        ("steps of the reference only", map(str, coverage.reference_steps)),
        ("steps of the candidate only", map(str, coverage.candidate_steps)),
        ("never called", coverage.uncalled),
        ("layers that are set differently", coverage.notes),
        ("close choices of a partner (`padiff map` shows them)", coverage.ambiguous),
        ("assumed, since neither names nor shapes tell", coverage.assumed),
        ("compared in the reference's layout", coverage.views),
        ("layers that end at another place of the computation, compared inside only", coverage.cut_elsewhere),
        ("kept as sketches, which do not show parts of a tensor: not compared", coverage.unmeasured),
    ]
    named.append(("environments differ", report.environment))
    for title, names in named:
        found = list(names)
        if found:
            rest = f", and {len(found) - at_most} more" if len(found) > at_most else ""
            lines.append(f"{title}: {', '.join(found[:at_most])}{rest}")
    return lines


def _left_out(report: Report) -> str:
    coverage = report.coverage
    counts = [
        (len(coverage.reference_layers), "layer", "reference"),
        (len(coverage.candidate_layers), "layer", "candidate"),
        (len(coverage.reference_parameters), "parameter", "reference"),
        (len(coverage.candidate_parameters), "parameter", "candidate"),
        (len(coverage.reference_steps), "step", "reference"),
        (len(coverage.candidate_steps), "step", "candidate"),
    ]
    return ", ".join(f"{n} {what}{'s' if n > 1 else ''} of the {side}" for n, what, side in counts if n)


def to_json(report: Report) -> dict[str, Any]:
    """The report as JSON values; NaN and infinity become `None` and the string ``"inf"``."""
    first, coverage = report.first_diff, report.coverage
    steps: dict[int, list[Diff]] = {}
    for diff in report.diffs:
        steps.setdefault(diff.pair.step, []).append(diff)
    return {
        "schema_version": SCHEMA_VERSION,
        "passed": report.passed,
        "reference": report.reference,
        "candidate": report.candidate,
        "tolerance": report.tolerance,
        "verdict": verdict(report),
        "environment": list(report.environment),
        "first_diff": None
        if first is None
        else {
            "step": first.step,
            "stage": first.stage,
            "reference": first.reference,
            "candidate": first.candidate,
            "slot": first.slot,
            "max_abs": number(first.max_abs),
            "max_rel": number(first.max_rel),
            "message": first.message,
            "cause": first.cause,
        },
        "coverage": {
            "share": coverage.share,
            "complete": coverage.complete,
            "compared": coverage.compared,
            "records": {"reference": coverage.reference_records, "candidate": coverage.candidate_records},
            "unmatched_layers": _sides(coverage.reference_layers, coverage.candidate_layers),
            "unmatched_containers": _sides(coverage.reference_containers, coverage.candidate_containers),
            "unmatched_parameters": _sides(coverage.reference_parameters, coverage.candidate_parameters),
            "unmatched_sites": _sides(coverage.reference_sites, coverage.candidate_sites),
            "unmatched_steps": _sides(coverage.reference_steps, coverage.candidate_steps),
            "uncalled": list(coverage.uncalled),
            "settings": list(coverage.notes),
            "ambiguous": list(coverage.ambiguous),
            "assumed": list(coverage.assumed),
            "views": list(coverage.views),
            "cut_elsewhere": list(coverage.cut_elsewhere),
            "sketched": coverage.sketched,
            "bounded": coverage.bounded,
            "unmeasured": list(coverage.unmeasured),
            "ranks": coverage.ranks,
            "amplified": coverage.amplified,
        },
        "steps": [
            {
                "step": step,
                "passed": all(diff.passed for diff in diffs),
                "diffs": [diff_to_json(diff) for diff in diffs],
            }
            for step, diffs in steps.items()
        ],
    }


def diff_to_json(diff: Diff) -> dict[str, Any]:
    """One diff as JSON values."""
    pair, figures = diff.pair, diff.figures
    out: dict[str, Any] = {
        "stage": pair.stage,
        "reference": pair.reference.site if pair.reference else None,
        "candidate": pair.candidate.site if pair.candidate else None,
        "passed": diff.passed,
    }
    if pair.transform:
        out["view"] = pair.transform
    if diff.problem:
        out["problem"] = diff.problem
    if figures is not None:
        out["l2"] = {"reference": number(figures.reference_l2), "candidate": number(figures.candidate_l2)}
        if pair.complete:
            out |= {
                "max_abs": number(figures.max_abs),
                "max_rel": number(figures.max_rel),
                "mean_abs": number(figures.mean_abs),
                "rel_l2": number(figures.rel_l2),
            }
        if figures.basis != "tensors":
            out["basis"] = figures.basis
            out["spread"] = figures.spread
    if diff.judged[0]:
        out["judged"] = {"figure": diff.judged[0], "value": number(diff.judged[1]), "limit": number(diff.limit)}
    return out


def number(value: float | None) -> float | str | None:
    """A float as JSON can hold it."""
    if value is None or math.isnan(value):
        return None
    return float(value) if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def _sides(reference: Iterable[Any], candidate: Iterable[Any]) -> dict[str, list[Any]]:
    return {"reference": list(reference), "candidate": list(candidate)}


def stage_table(report: Report) -> list[dict[str, Any]]:
    """A row for each stage: pairs, how many differ, the worst relative L2 error and where it is."""
    rows: dict[str, dict[str, Any]] = {}
    worst: dict[str, float] = {}
    for diff in report.diffs:
        stage = diff.pair.stage
        row = rows.get(stage)
        if row is None:
            row = rows[stage] = {"stage": stage, "compared": 0, "differ": 0, "alone": 0}
            row |= {"worst": None, "limit": None, "where": ""}
        row["differ"] += not diff.passed
        row["compared" if diff.compared else "alone"] += 1
        figures, excess = diff.figures, diff.excess
        if not diff.compared or figures is None or not math.isfinite(figures.rel_l2):
            continue
        if excess > worst.get(stage, -1.0):
            worst[stage] = excess
            row["worst"] = figures.rel_l2
            row["limit"] = diff.limit if diff.judged[0] == "rel_l2" else None
            row["where"] = f"{diff.pair.anchor.site}, step {diff.pair.step}"
    return [rows[stage] for stage in STAGES if stage in rows]


def to_markdown(report: Report) -> str:
    """The report as Markdown, for a pull request or a ticket."""
    lines = [f"## padiff: {'match' if report.passed else 'differ'}", "", verdict(report), ""]
    lines += [
        "| stage | compared | differ | worst relative L2 | limit | where |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in stage_table(report):
        lines.append(
            f"| {row['stage']} | {row['compared']} | {row['differ']} | {_short(row['worst'])} | {_short(row['limit'])} "
            f"| {row['where'].replace('|', '/')} |"
        )
    lines += ["", f"Tolerance: {report.tolerance}.", ""]
    lines += [f"- {line}" for line in coverage_lines(report)]
    return "\n".join(lines) + "\n"


def to_junit(report: Report) -> str:
    """The report as JUnit XML: a test case for each pair, failed where it differs, skipped where a side is missing."""
    suite = ElementTree.Element("testsuite", name="padiff")
    counts: Mapping[str, int] = {
        "tests": len(report.diffs),
        "failures": len(report.failed),
        "skipped": sum(not d.compared and d.passed for d in report.diffs),
    }
    for name, count in counts.items():
        suite.set(name, str(count))
    if report.first_diff is not None and not report.failed:
        # A hyper-parameter that differs where no tensor does.
        suite.set("tests", str(len(report.diffs) + 1))
        suite.set("failures", "1")
        case = ElementTree.SubElement(suite, "testcase", classname="settings", name=str(report.first_diff.reference))
        ElementTree.SubElement(case, "failure", message=report.first_diff.message)
    for diff in report.diffs:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"step {diff.pair.step}.{diff.pair.stage}", name=diff.pair.anchor.site
        )
        if not diff.passed:
            ElementTree.SubElement(case, "failure", message=figures_text(diff))
        elif not diff.compared:
            ElementTree.SubElement(case, "skipped", message=diff.problem)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
