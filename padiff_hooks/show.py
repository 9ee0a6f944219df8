"""Reports and runs on a console."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from padiff.dump.budget import size_of
from padiff.records import (
    CANNOT_TELL,
    DIFFER,
    MATCH,
    Report,
    Run,
    bytes_text,
    count_text,
    coverage_lines,
    declared_lines,
    failed_lines,
    floor_lines,
    limit_lines,
    model_text,
    owned_text,
    settings_text,
    stage_table,
    step_text,
    steps_text,
    third_lines,
    verdict,
)
from padiff.records.environment import environment_text

#: Lines of what differs unless everything is asked for.
LISTED = 10


def print_report(report: Report, console: Console, everything: bool = False, top: int | None = None) -> None:
    """The verdict, a row for each stage, the diffs beyond tolerance, the coverage.

    Args:
        everything: list every pair that differs, not only the first ones.
        top: list so many, those furthest beyond their limits first.
    """
    table = Table(title=Text(f"{report.reference} (reference) against {report.candidate} (candidate)"), box=None)
    for name, justify in (
        ("stage", "left"),
        ("pairs", "right"),
        ("differ", "right"),
        ("rel L2", "right"),
        ("allowed", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("closest to its limit", overflow="fold")
    rows = stage_table(report)
    for row in rows:
        style = "bold red" if row["differ"] else ""
        worst = "" if row["worst"] is None else f"{row['worst']:.2g}"
        limit = "" if row["limit"] is None else f"{row['limit']:.2g}"
        table.add_row(
            row["stage"], str(row["compared"]), str(row["differ"]), worst, limit, Text(row["where"]), style=style
        )
    console.print(table)
    for line in (*limit_lines(rows), *floor_lines(report), *third_lines(report)):
        console.print(line, markup=False, emoji=False)
    if report.failed:
        console.print()
    for line in _listed(report, everything, top):
        console.print(line, markup=False, emoji=False)
    console.print()
    for line in coverage_lines(report):
        console.print(f"  {line}", markup=False, emoji=False)
    console.print(f"  tolerance: {report.tolerance}\n", markup=False, emoji=False)
    console.print(verdict(report), style=STYLES[report.outcome], markup=False, emoji=False)


#: How a verdict is printed.
STYLES = {MATCH: "bold green", DIFFER: "bold red", CANNOT_TELL: "bold yellow"}


def _listed(report: Report, everything: bool, top: int | None) -> list[str]:
    if top is not None and report.failed:
        worst = sorted(report.failed, key=lambda diff: -diff.excess)[:top]
        return [f"{count_text(report)}, furthest beyond its limit first:", *(f"  {diff}" for diff in worst)]
    lines = failed_lines(report, None if everything else LISTED)
    return [f"{line} (--all lists them)" if line.startswith("  ... and") else line for line in lines]


def print_run(run: Run, path: Path, console: Console) -> None:
    """What a run holds: framework, layers, steps, sizes."""
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
    for line in declared_lines(info.settings):
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
