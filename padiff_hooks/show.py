"""Printing of reports and runs on a console."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from padiff.dump.medium import size_of
from padiff.dump.store import AnyPath
from padiff.records import (
    CANNOT_TELL,
    DIFFER,
    MATCH,
    Both,
    Report,
    Run,
    Standing,
    bytes_text,
    count_text,
    coverage_lines,
    declared_lines,
    failed_lines,
    floor_lines,
    limit_lines,
    model_text,
    owned_text,
    printable,
    settings_text,
    stage_table,
    step_text,
    steps_text,
    third_lines,
    where_lines,
)
from padiff.records.declared import environment_text
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import CERTAINTY, FIX, LABEL, MARK, OUTCOME, PLACE, diagnostic_lines
from padiff.records.diagnostic_text import QUIET as SECONDARY
from padiff.records.report_text import HERE, verdict_sentences
from padiff.system.language import translated, writes_chinese

#: Default number of listed diffs.
LISTED = 10


def print_report(
    report: Report,
    console: Console,
    everything: bool = False,
    top: int | None = None,
    details: bool = False,
    runs: Both[str] | None = None,
) -> None:
    """Print a report: the diagnostic, and with details a row for each stage, failed diffs, trees, coverage and verdict.

    Args:
        report: the report.
        console: console to print on.
        everything: with details, list every pair that differs, not only the first ones.
        top: with details, list this many diffs, sorted by how far they are beyond their limits.
        details: True to print more than the diagnostic. `everything` and `top` do so, too.
        runs: paths of both run folders, for the commands that the diagnostic names; `None` if they are in no folder.
    """
    to = None if writes_chinese(console.encoding) else "en"
    for line in diagnostic_lines(diagnostic_of(report, runs), min(console.width, WIDEST), to):
        text = Text()
        for part in line:
            text.append(part.text, STYLES[report.outcome] if part.role == OUTCOME else _ROLES.get(part.role, ""))
        text.rstrip()
        console.print(text)
    if details or everything or top is not None:
        console.print()
        _print_details(report, console, everything, top, partial(translated, to=to))


def _print_details(
    report: Report, console: Console, everything: bool, top: int | None, say: Callable[..., str]
) -> None:
    print_line = partial(console.print, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, header_style=QUIET)
    for name, justify in (
        ("stage", "left"),
        ("pairs", "right"),
        ("differ", "right"),
        ("rel L2", "right"),
        ("allowed", "right"),
    ):
        table.add_column(say(name, "column"), justify=justify)  # type: ignore[arg-type]
    table.add_column(say("closest to its limit", "column"), overflow="fold")
    rows = stage_table(report)
    for row in rows:
        style = "red" if row["differ"] else ""
        worst = "" if row["worst"] is None else f"{row['worst']:.2g}"
        limit = "" if row["limit"] is None else f"{row['limit']:.2g}"
        where = Text(printable(row["where"]))
        table.add_row(
            say(row["stage"], "stage"), str(row["compared"]), str(row["differ"]), worst, limit, where, style=style
        )
    console.print(table)
    for line in (*limit_lines(rows), *floor_lines(report), *third_lines(report)):
        print_line(say(line), style=QUIET)
    if report.failed:
        print_line()
    for line in _listed(report, everything, top, say):
        print_line(_diff_text(line))
    place = where_lines(report, min(console.width, _PLACE))
    if place:
        print_line()
    for line in place:
        print_line(_place_text(line))
    print_line()
    for line in coverage_lines(report):
        print_line(f"  {say(line)}", style=QUIET)
    print_line(f"  {say(f'tolerance: {report.tolerance}')}\n", style=QUIET)
    print_line(verdict_text(report, apart=console.is_terminal, say=say))


def verdict_text(report: Report, apart: bool = False, say: Callable[[str], str] = str) -> Text:
    """Return the verdict with the place, the cause and the fix in different colours.

    Args:
        report: the report.
        apart: True to start separate lines for the cause and the fix.
        say: returns a message in the reader's language.
    """
    sentences = verdict_sentences(report)
    shown = [say(sentence) for sentence in sentences]
    first = report.first_diff
    words = shown[0]
    for sentence, printed in zip(sentences[1:], shown[1:]):
        words += f"{chr(10) if apart and _STARTS.match(sentence) else ' '}{printed}"
    text = Text(words)
    if first is None:
        text.stylize(STYLES[report.outcome])
        return text
    text.highlight_words([printable(first.place_text)], STYLES[report.outcome])
    for fault in (first, *report.independent):
        if fault.cause is not None:
            text.highlight_words([printable(fault.cause.sentence)], "yellow")
            text.highlight_words([printable(fault.cause.fix)] if fault.cause.fix else [], "bold green")
    return text


def _diff_text(line: str) -> Text:
    """Return a line on failed diffs with colours: the place in bold, and marks such as ``(first difference)`` in red.

    A line that is not about a single diff is red.
    """
    text = Text(line)
    if line.startswith("  "):
        place = line.find(": ")
        text.stylize("bold", 0, max(place, 0))
        for mark in (Standing.FIRST, Standing.NEW, Standing.AGAIN):
            text.highlight_words([f"({mark})"], "bold red")
    else:
        text.stylize("red")
    return text


def _place_text(line: str) -> Text:
    text = Text(line)
    text.highlight_words([HERE.strip()], "bold red")
    return text


# Parts removed from the lines of failed diffs to keep them short; the verdict and --all show them.
_MORE = re.compile(
    r"max \|diff\| [^,]+, (?=relative L2 [\d.e+-]+,)|; largest difference[^;]*: reference \S+, candidate [^\s;]+"
)
_ALLOWED = re.compile(r" times the \w+ allowed \([^)]*\)")
# Sentences of a verdict that start a new line.
_STARTS = re.compile("Cause, proven: |Cause: |Likely cause: |Fix: |Tried and excluded: |A second fault, ")
# Maximum width of two trees side by side, in columns.
_PLACE = 160
#: Style of secondary lines.
QUIET = "dim"
#: Styles of verdicts.
STYLES = {MATCH: "bold green", DIFFER: "bold red", CANNOT_TELL: "bold yellow"}
#: Largest width of a diagnostic's lines.
WIDEST = 120
# Styles of the parts of a diagnostic.
_ROLES = {LABEL: "cyan", CERTAINTY: "bold", PLACE: "bold", FIX: "bold green", MARK: "bold red", SECONDARY: QUIET}


def _listed(report: Report, everything: bool, top: int | None, say: Callable[..., str]) -> list[str]:
    if top is not None and report.failed:
        worst = sorted(report.failed, key=lambda diff: -diff.excess)[:top]
        listed = [f"  {printable(str(diff))}" for diff in worst]
        return [say(f"{count_text(report)}, furthest beyond its limit first:"), *listed]
    if everything:
        head, *lines = failed_lines(report, None, say) or [""]
        return [say(head), *lines] if head else []
    short = failed_lines(report, LISTED, lambda text: say(_ALLOWED.sub(" times the limit", _MORE.sub("", text))))
    more = " (--all lists each)" if 0 < len(short) - 1 < len(report.failed) else ""
    return [say(f"{count_text(report)}, in causal order{more}:"), *short[1:]]


def print_run(run: Run, path: AnyPath, console: Console) -> None:
    """Print the content of a run: framework, layers, steps and sizes."""
    info = run.info
    numbers = run.numbers()
    console.print(
        f"{run.name}: {info.framework} {info.framework_version}, {info.layers[0].type}", markup=False, emoji=False
    )
    parameters = model_text(info).rsplit(", ", 1)[1]
    console.print(
        f"{len(info.layers)} layers, {parameters}; {len(numbers)} recorded steps, {bytes_text(size_of(path))}; "
        f"{'finished' if run.finished() else 'still growing, or ended early'}"
    )
    if info.environment:
        text = ", ".join(f"{name} {environment_text(value)}" for name, value in sorted(info.environment.items()))
        console.print(f"environment: {text}", markup=False, emoji=False)
    for line in (*map(printable, info.errors), *declared_lines(info.settings)):
        console.print(line, markup=False, emoji=False)
    if numbers:
        console.print(steps_text(numbers))
        packs = list(getattr(run, "packs", ()))
        if packs:
            console.print(f"replay packs of {steps_text(packs)}")
        for step in run.steps(numbers[0]):
            console.print(step_text(step), markup=False, emoji=False)
    table = Table(box=None)
    for name in ("layer", "type", "owns", "settings"):
        table.add_column(name, overflow="fold")
    for layer in info.layers:
        style = "" if layer.recorded else "dim"
        also = f" (also {', '.join(layer.aliases)})" if layer.aliases else ""
        cells = (layer.path + also, layer.type, owned_text(layer), settings_text(layer))
        table.add_row(*map(Text, cells), style=style)
    console.print(table)
