"""Reports as Markdown, for a pull request or a ticket."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import islice

from padiff.records import (
    Diff,
    Report,
    count_text,
    coverage_lines,
    failed_rows,
    floor_lines,
    limit_lines,
    printable,
    stage_table,
    third_lines,
    where_lines,
)
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import diagnostic_text
from padiff.records.report_text import verdict_sentences
from padiff.system.language import translated

# Width of the diagnostic, in columns.
_WIDE = 100
# Largest number of rows in the visible table of diffs, and in the foldable one.
_SHOWN, _MOST = 10, 200
# Characters with an effect in Markdown: code, emphasis, tags, links, strikethrough, formulas.
_MARKUP = re.compile(r"[\\`*~$<]|(?<!\w)_|_(?!\w)|\](?=[(:\[])|&(?=#?\w+;)")
# Code in backticks, in which Markdown has no effect. A single backtick starts no code.
_CODE = re.compile("(`[^`]+`)")
# Characters from which GitHub and GitLab make links: mentions, numbers of issues, addresses.
_LINKED = re.compile(r"@(?=\w)|(?<!\w)#(?=\d)|(?<=\w):(?=//)|(?<!\w)www(?=\.)")


def to_markdown(report: Report) -> str:
    """Return the report as Markdown: verdict, differences and stages as tables, and details in foldable sections."""
    diagnostic = diagnostic_of(report)
    lines = [
        f"## padiff: {report.outcome}",
        "",
        *code_block(diagnostic_text(diagnostic, _WIDE).split("\n"), "text"),
        "",
    ]
    for fault in diagnostic.all_faults:
        if fault.fix is not None:
            lines += [translated("Fix:"), "", *code_block(fault.fix.text.split("\n"), "python"), ""]
    lines += _differing(report)
    table = stage_table(report)
    lines += markdown_table(
        ("stage", "compared", "differ", "worst relative L2", "limit", "where"),
        ((r["stage"], r["compared"], r["differ"], _short(r["worst"]), _short(r["limit"]), r["where"]) for r in table),
    )
    place = where_lines(report)
    lines += ["", *_unfolding("Where it is in both models", code_block(place, "text") if place else [])]
    if len(report.failed) > 1:
        lines += _unfolding(f"All that differs: {count_text(report)}", _all(report))
    measured = [*floor_lines(report), *third_lines(report)]
    more = [f"Tolerance: {report.tolerance}", *limit_lines(table), *measured, *coverage_lines(report)]
    lines += _unfolding("What was compared, and how", [f"- {markdown_text(line)}" for line in more])
    lines += _unfolding(
        "The evidence", [markdown_text(" ".join(translated(each) for each in verdict_sentences(report)))]
    )
    return "\n".join(lines).rstrip() + "\n"


def _differing(report: Report) -> list[str]:
    """Return the differing pairs, with similar pairs folded into one row."""
    if not report.failed:
        return []
    rows, hidden = failed_rows(report, _SHOWN)
    more_line = [f"... and {hidden} more", ""] if hidden else []
    cells = ((row.steps, row.place, row.what, row.mark) for row in rows)
    return [
        f"{markdown_text(count_text(report))}:",
        "",
        *markdown_table(("step", "where", "what", ""), cells),
        "",
        *more_line,
    ]


def _all(report: Report) -> list[str]:
    """Return the differing pairs, one row each."""
    rows = [
        (
            diff.pair.step,
            diff.pair.anchor.site,
            *_figures(diff),
            str(diff.problem or ""),
            str(report.standing(diff) or ""),
        )
        for diff in islice(report.failed, _MOST)
    ]
    head = ("step", "where", "max diff", "relative L2", "times the allowed", "problem", "")
    hidden = len(report.failed) - len(rows)
    return [
        *markdown_table(head, rows),
        *(["", f"... and {hidden} more: `padiff compare --all` lists them"] if hidden else []),
    ]


def _figures(diff: Diff) -> tuple[str, str, str]:
    figures = diff.figures if diff.compared else None
    exact = figures is not None and figures.basis == "tensors"
    return (
        _short(figures.max_abs if figures is not None and exact else None),
        _short(figures.rel_l2 if figures is not None else None),
        f"{diff.excess:.3g}" if math.isfinite(diff.excess) else "",
    )


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


# -- escaping of a run's text for Markdown -----------------------------------------------------------------------------


def markdown_text(text: str) -> str:
    """Return a text without any Markdown effect; parts in backticks become code, whatever names they contain."""
    parts = _CODE.split(printable(text))
    return "".join(part if k % 2 else _escaped(part) for k, part in enumerate(parts))


def _escaped(text: str) -> str:
    escaped = _MARKUP.sub(lambda match: f"&{_ENTITIES[match[0]]};" if match[0] in _ENTITIES else f"\\{match[0]}", text)
    return _LINKED.sub(lambda match: f"{match[0]}<!-- -->", escaped)


_ENTITIES = {"<": "lt", "&": "amp"}


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        # Markdown ends a cell at any pipe, also within code.
        cells = [markdown_text(str(cell)).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def code_block(lines: Sequence[str], language: str) -> list[str]:
    """Return lines as a code block whose fence is longer than any run of backticks in the lines."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *lines, fence]


def _unfolding(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["<details>", f"<summary>{markdown_text(translated(title))}</summary>", "", *lines, "", "</details>", ""]
