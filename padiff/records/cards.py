"""HTML cards for notebooks that show a report or a run: no script, and all text of a run is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import diagnostic_text
from padiff.records.report_data import ReportData
from padiff.records.report_text import count_text, stage_table
from padiff.records.run_text import declared_lines, model_text, steps_text
from padiff.system.language import language, translated

if TYPE_CHECKING:
    from padiff.records.recorded import Run

# Colours that are readable on white and on black, as a notebook may have either background.
_COLOURS = {"match": "#2e8b63", "differ": "#d2542f", "cannot tell": "#b8860b"}
_CARD = "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:12px 16px;max-width:860px;line-height:1.45"
_BLOCK = "margin:6px 0 8px;line-height:1.3;background:none;white-space:pre;overflow-x:auto"
# Width of the diagnostic, in columns.
_WIDE = 96
_QUIET = "opacity:.7"
_CELL = "text-align:{};padding:2px 18px 2px 0;border:0;background:none"
_LAYERS = 6


def report_card(report: ReportData) -> str:
    """Return a card with the diagnostic and a row for each stage."""
    rows = []
    for row in stage_table(report):
        figures = ["" if row[name] is None else f"{row[name]:.2g}" for name in ("worst", "limit")]
        rows.append([row["stage"], f"{row['compared']:,}", f"{row['differ']:,}", *figures, row["where"]])
    parts = [
        _head(report.outcome, f"{report.reference} against {report.candidate}"),
        f'<pre style="{_BLOCK}">{html.escape(diagnostic_text(diagnostic_of(report), _WIDE))}</pre>',
        _table(["stage", "pairs", "differ", "relative L2", "allowed", "closest to its limit"], rows),
    ]
    return _card(parts, f"padiff: {count_text(report)}")


def run_card(run: Run) -> str:
    """Return a card with a run's model, its steps, and its declared settings."""
    numbers = run.numbers()
    state = f"{len(numbers):,} recorded step{'' if len(numbers) == 1 else 's'}, "
    state += "finished" if run.finished() else "not ended"
    lines = [
        model_text(run.info),
        state,
        *([steps_text(numbers)] if numbers else []),
        *declared_lines(run.info.settings),
    ]
    shown = "".join(f"<div>{html.escape(line)}</div>" for line in lines[:_LAYERS])
    more = len(lines) - _LAYERS
    parts = [f"<b>{html.escape(run.name)}</b>", shown]
    parts += [f'<div style="{_QUIET}">and {more} more lines: print it</div>'] if more > 0 else []
    return _card(parts, "padiff: a run")


def _card(parts: Iterable[str], title: str) -> str:
    return f'<div style="{_CARD}" title="{html.escape(title)}">{"".join(parts)}</div>'


def _head(outcome: str, names: str) -> str:
    shown = outcome if language() == "en" else translated(outcome.upper(), "outcome")
    return (
        f'<div><b style="color:{_COLOURS[outcome]}">{shown}</b> '
        f'<span style="{_QUIET};margin-left:8px">{html.escape(names)}</span></div>'
    )


def _table(titles: list[str], rows: list[list[str]]) -> str:
    sides = ["left", "right", "right", "right", "right", "left"]
    head = "".join(
        f'<th style="{_CELL.format(side)};{_QUIET};font-weight:normal">{title}</th>'
        for side, title in zip(sides, titles)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL.format(side)}">{html.escape(cell)}</td>' for side, cell in zip(sides, row))
        + "</tr>"
        for row in rows
    )
    return f'<table style="border-collapse:collapse;border:0"><tr>{head}</tr>{body}</table>'
