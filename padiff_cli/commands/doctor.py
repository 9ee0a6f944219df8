"""``padiff doctor SCRIPT|RUN``: check that recording does not change a training, or that a run folder is readable."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from padiff.dump import open_run
from padiff.dump.store import as_local, is_remote, run_folder
from padiff.errors import UsageError
from padiff_cli.doctor.run_check import Health, check_run
from padiff_cli.doctor.script_check import COMPARED, Examination, examine
from padiff_hooks.outputs import check_out, write_out

WELL, ILL, MISUSE = 0, 1, 2

# How many damaged places are listed.
_LISTED = 20


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "SCRIPT: run a training script with and without recording; are losses, gradients and parameters the "
        "same to the bit, and what does recording cost? RUN: read everything that a run folder holds."
    )
    parser.add_argument("path", metavar="SCRIPT|RUN", help="a Python script that records, or a run folder")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="end the script after N steps (%(default)s)")
    parser.add_argument("--json", metavar="OUT", help="write what was found as JSON; - for standard output")
    parser.add_argument("args", nargs="*", metavar="ARGS", help="the script's own arguments, behind --")
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code.

    Raises:
        PadiffError: the path is neither a script nor a run folder, or the script cannot be examined.
    """
    path = run_folder(args.path, "run") if is_remote(args.path) else Path(args.path)
    if args.steps < 1:
        raise UsageError(f"--steps has to be at least 1, got {args.steps}")
    check_out(args.json)
    script = as_local(path)
    if script is None or script.is_dir():
        if args.args:
            raise UsageError(f"{path} is a run folder, which takes no arguments: {' '.join(args.args)}")
        health = check_run(open_run(path), path)
        _print_health(health, console)
        content, code = _health_to_json(health), WELL if health.well else ILL
    elif script.is_file():
        with console.status(Text()) as status:
            examination = examine(script, args.args, args.steps, lambda text: status.update(Text(text)))
        _print_examination(examination, console)
        content = _examination_to_json(examination)
        code = {"same": WELL, "changed": ILL}.get(examination.verdict, MISUSE)
    else:
        raise UsageError(f"there is neither a script nor a run folder {path}")
    if args.json:
        write_out(args.json, json.dumps(content, indent=1))
    return code


def _print_examination(examination: Examination, console: Console) -> None:
    plain, times = examination.plain, examination.seconds
    table = Table(box=None)
    for name in ("", "a step takes", "ratio", "peak memory"):
        table.add_column(name, justify="left" if not name else "right")
    for name, key, run in (
        ("without recording", "plain", plain),
        ("recording, a step that is not due", "not_due", None),
        ("recording, a step that is due", "due", examination.recording),
    ):
        if times[key] is not None or run is not None:
            memory = _megabytes(run.peak) if run is not None else ""
            table.add_row(name, _milliseconds(times[key]), _ratio(times, key), memory)
    console.print(table)
    recorded = examination.recording.due
    console.print(
        f"{plain.length} steps, {recorded} of them recorded, {examination.recording.recorded / 1e6:.1f} MB; the script "
        "wrote its own files as usual, once in each run"
    )
    for remark in examination.remarks:
        console.print(f"mind: {remark}")
    style = {"same": "bold green", "changed": "bold red"}.get(examination.verdict, "bold yellow")
    console.print(examination.sentence, style=style)


def _print_health(health: Health, console: Console) -> None:
    sketches = f", {health.sketches} sketches" if health.sketches else ""
    console.print(f"{health.steps} steps read whole: {health.tensors} tensors{sketches}; {health.bytes / 1e6:.1f} MB")
    for caution in health.cautions:
        console.print(f"environment: {caution}")
    for remark in health.remarks:
        console.print(f"mind: {remark}")
    for finding in health.ranks:
        console.print(f"{'ranks' if finding.kind.fault else 'mind'}: {finding}")
    for place in health.damaged[:_LISTED]:
        console.print(f"damaged: {place}")
    if len(health.damaged) > _LISTED:
        console.print(f"... and {len(health.damaged) - _LISTED} more places")
    if health.damaged:
        count = len(health.damaged)
        console.print(f"This run is damaged in {count} place{'s' if count > 1 else ''}.", style="bold red")
    elif not health.well:
        console.print("This run is whole, but its ranks differ from each other.", style="bold red")
    else:
        console.print("This run is whole.", style="bold green")


def _examination_to_json(examination: Examination) -> dict[str, Any]:
    first = examination.first
    return {
        "schema_version": 1,
        "verdict": examination.verdict,
        "sentence": examination.sentence,
        "first": None
        if first is None
        else {"step": first.step, "what": first.what, "name": first.name, "values": first.values},
        "steps": examination.plain.length,
        "recorded_steps": examination.recording.due,
        "compared": {what: examination.plain.count(what) for what in COMPARED},
        "seconds": dict(examination.seconds),
        "peak_memory": {"plain": examination.plain.peak, "recording": examination.recording.peak},
        "recorded_bytes": examination.recording.recorded,
        "remarks": list(examination.remarks),
    }


def _health_to_json(health: Health) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "verdict": "damaged" if health.damaged else "whole",
        "damaged": list(health.damaged),
        "remarks": list(health.remarks),
        "cautions": list(health.cautions),
        "ranks": [
            {
                "kind": finding.kind.name.lower(),
                "fault": finding.kind.fault,
                "step": finding.step,
                "ranks": list(finding.ranks),
                "sites": list(finding.sites),
                "error": finding.error,
                "sentence": finding.sentence,
            }
            for finding in health.ranks
        ],
        "steps": health.steps,
        "tensors": health.tensors,
        "sketches": health.sketches,
        "bytes": health.bytes,
    }


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


def _ratio(times: Any, key: str) -> str:
    return f"{times[key] / times['plain']:.2f}" if times[key] is not None and times["plain"] else ""


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size else ""
