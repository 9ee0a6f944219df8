"""Reports and runs on a console."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from padiff.compare.explain import figures_text
from padiff.dump.budget import size_of
from padiff.environment import environment_text
from padiff.records import LOOP, Layer, Report, Run
from padiff.report import coverage_lines, stage_table, verdict

# Diffs that are listed unless everything is asked for.
_LISTED = 10


def print_report(report: Report, console: Console, everything: bool = False) -> None:
    """The verdict, a row for each stage, the diffs beyond tolerance, the coverage."""
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
    for row in stage_table(report):
        style = "bold red" if row["differ"] else ""
        worst = "" if row["worst"] is None else f"{row['worst']:.2g}"
        limit = "" if row["limit"] is None else f"{row['limit']:.2g}"
        table.add_row(
            row["stage"], str(row["compared"]), str(row["differ"]), worst, limit, Text(row["where"]), style=style
        )
    console.print(table)
    if report.failed:
        shown = report.failed if everything else report.failed[:_LISTED]
        console.print(f"\n{len(report.failed)} of {len(report.diffs)} pairs differ, in causal order:")
        for diff in shown:
            text = f"  step {diff.pair.step}  {diff.pair.anchor.site}: {figures_text(diff)}"
            console.print(text, markup=False, emoji=False)
        if len(shown) < len(report.failed):
            console.print(f"  ... and {len(report.failed) - len(shown)} more (--all lists them)")
    console.print()
    for line in coverage_lines(report):
        console.print(f"  {line}", markup=False, emoji=False)
    console.print(f"  tolerance: {report.tolerance}\n", markup=False, emoji=False)
    console.print(verdict(report), style="bold green" if report.passed else "bold red", markup=False, emoji=False)


def print_run(run: Run, path: Path, console: Console) -> None:
    """What a run holds: framework, layers, steps, sizes."""
    info = run.info
    numbers = run.numbers()
    size = size_of(path)
    parameters = sum(_count(layer, "parameter") for layer in info.layers)
    console.print(
        f"{run.name}: {info.framework} {info.framework_version}, {info.layers[0].type}", markup=False, emoji=False
    )
    console.print(
        f"{len(info.layers)} layers, {parameters:,} parameters; {len(numbers)} recorded steps, {_bytes(size)}; "
        f"{'finished' if run.finished() else 'still growing, or ended early'}"
    )
    if info.environment:
        told = ", ".join(f"{name} {environment_text(value)}" for name, value in sorted(info.environment.items()))
        console.print(f"environment: {told}", markup=False, emoji=False)
    if numbers:
        shown = ", ".join(map(str, numbers[:10])) + (f", ... {numbers[-1]}" if len(numbers) > 10 else "")
        console.print(f"steps: {shown}")
        _print_stages(run, numbers[0], console)
    table = Table(box=None)
    for name in ("layer", "type", "owns", "settings"):
        table.add_column(name, overflow="fold")
    for layer in info.layers:
        owns = ", ".join(
            f"{p.slot} {list(p.shape)}" + (f" = {p.tied_to}" if p.tied_to else "") for p in layer.parameters
        )
        settings = ", ".join(f"{name}={value}" for name, value in layer.settings.items())
        style = "" if layer.recorded else "dim"
        also = f" (also {', '.join(layer.aliases)})" if layer.aliases else ""
        table.add_row(Text(layer.path + also), Text(layer.type), Text(owns), Text(settings), style=style)
    console.print(table)


def _print_stages(run: Run, number: int, console: Console) -> None:
    for step in run.steps(number):
        counts: dict[str, int] = {}
        for record in step.records:
            key = record.stage if record.layer != LOOP or record.stage == "loss" else "learning rate"
            counts[key] = counts.get(key, 0) + 1
        text = ", ".join(f"{count} {stage}" for stage, count in counts.items())
        sketched = sum(record.sketch is not None for record in step.records)
        text += f"; {sketched} of them as sketches" if sketched else ""
        console.print(
            f"step {number}, rank {step.rank}: {text}; {step.micro_batches} micro-batch(es)", markup=False, emoji=False
        )
        for note in step.notes:
            console.print(f"  {note}", markup=False, emoji=False)


def _count(layer: Layer, role: str) -> int:
    total = 0
    for parameter in layer.parameters:
        if parameter.role == role and not parameter.tied_to:
            size = 1
            for extent in parameter.shape:
                size *= extent
            total += size
    return total


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
