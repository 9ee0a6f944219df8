"""``padiff golden record | check FOLDER -- COMMAND``: keep a few steps of a training, and sort later runs of it."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from padiff.errors import UsageError
from padiff.golden.folder import goldens_in, read_golden, size_of_folder
from padiff.golden.sorting import (
    DRIFT,
    EQUAL,
    FAULT,
    RUNS,
    STEPS,
    UNKNOWN,
    Sorted,
    bless,
    check_run,
    check_target,
    command_for,
    record_golden,
    record_run,
    recover,
    sorted_text,
)
from padiff.records import Both
from padiff_hooks.outputs import check_out, write_out
from padiff_hooks.show import print_report

#: The exit code of each sort; of several goldens the first of these that there is: fault, cannot tell, drift, equal.
CODES = {FAULT: 1, UNKNOWN: 3, DRIFT: 4, EQUAL: 0}
SCHEMA_VERSION = 1
_STYLES = {FAULT: "bold red", UNKNOWN: "bold yellow", DRIFT: "bold yellow", EQUAL: "bold green"}


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "padiff golden record FOLDER/NAME [options] -- COMMAND, or padiff golden check FOLDER [options] ..."
    parser.description = (
        "record: keep the first steps of a training in at most 200 kB, with the rounding noise of each tensor, which "
        "is measured by running the command again. check: run the command, and sort it against each golden run of the "
        "folder: equal to the bit, drift (rounding explains all), or fault. Nothing from a golden run is executed. "
        "Exit code: 0 equal, 1 fault, 2 misuse, or something can't be run, 3 cannot tell, 4 drift."
    )
    parser.add_argument("action", choices=("record", "check"), help="record a golden run, or check against some")
    parser.add_argument("folder", metavar="FOLDER", help="record: of the golden run; check: of one or of several")
    parser.add_argument(
        "--bless", action="store_true", help="check: replace golden runs that are a drift, with the proof; never others"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"record: number of steps, from the first one (default: {STEPS})"
    )
    parser.add_argument(
        "--runs", type=int, metavar="N", help=f"record: number of runs that measure rounding (default: {RUNS})"
    )
    parser.add_argument("--dir", metavar="RUNS", help="keep the runs there (default: a temporary folder, removed)")
    parser.add_argument("--json", metavar="OUT", help="write the result as JSON; - for standard output")
    parser.add_argument("args", nargs="*", metavar="COMMAND", help="the training, behind --; {golden} is the name")
    parser.set_defaults(run=_golden)


def _golden(args: argparse.Namespace, console: Console) -> int:
    folder = Path(args.folder)
    if not args.args:
        raise UsageError(
            f"how is the training run? Give its command after --: padiff golden {args.action} {folder} -- "
            "python train.py. The command of a golden run is not kept, because nothing from its folder is executed"
        )
    check_out(args.json)
    with _scratch(args.dir) as scratch:
        if args.action == "record":
            return _record(args, folder, scratch, console)
        return _check(args, folder, scratch, console)


@contextmanager
def _scratch(folder: str | None) -> Iterator[Path]:
    """Yield a folder for runs: the given one, or a temporary one."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="padiff-golden-") as name:
        yield Path(name)


def _record(args: argparse.Namespace, folder: Path, scratch: Path, console: Console) -> int:
    if args.bless:
        raise UsageError("--bless is for padiff golden check")
    steps, runs = args.steps or STEPS, args.runs or RUNS
    if steps < 1 or runs < 1:
        raise UsageError(f"--steps and --runs are numbers of at least 1, got {steps} and {runs}")
    check_target(folder, replace=False)
    folder.parent.mkdir(parents=True, exist_ok=True)
    golden = record_golden(command_for(args.args, folder.name), folder, scratch, steps, runs)
    size = size_of_folder(folder)
    console.print(
        f"{folder}: recorded {steps} step{'s' * (steps > 1)}, {size / 1e3:.0f} kB; {runs + 2} runs measured its "
        "rounding noise"
    )
    if golden.left_out:
        console.print(f"left out, as a golden run has at most 200 kB: {golden.left_out}")
    if not golden.repeats:
        console.print("note: two runs differ in their bits, so no run will be equal; how far they differ is measured")
    if args.json:
        values = {"name": golden.name, "bytes": size, "left_out": golden.left_out, "repeats": golden.repeats}
        write_out(args.json, json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=1))
    return 0


def _check(args: argparse.Namespace, folder: Path, scratch: Path, console: Console) -> int:
    if args.steps is not None or args.runs is not None:
        raise UsageError("--steps and --runs are for padiff golden record: a check has the steps of the golden run")
    recover(folder)
    recover(folder.parent)
    results: list[Sorted] = []
    values: list[dict[str, Any]] = []
    runs: dict[tuple[str, ...], Path] = {}
    blessed = set()
    for path in goldens_in(folder):
        golden = read_golden(path)
        command = command_for(args.args, golden.name)
        key = (*command, str(len(golden.steps)))
        if key not in runs:
            runs[key] = record_run(command, scratch / golden.name, len(golden.steps))
        result = check_run(golden, runs[key], command, scratch)
        results.append(result)
        console.print(f"{result.sort.upper()}  {golden.name}", style=_STYLES[result.sort])
        for line in sorted_text(result):
            console.print(f"  {line}")
        if result.sort in (FAULT, UNKNOWN) and result.report is not None and not result.report.passed:
            console.print()
            print_report(result.report, console, runs=Both(str(path), str(result.run)))
        proof = ""
        if args.bless and result.sort == DRIFT:
            proof = str(bless(result, command, scratch / f"{golden.name}-bless"))
            blessed.add(golden.name)
            console.print(f"  blessed; the proof is {proof}")
        values.append({**result.to_json(), "blessed": bool(proof), "proof": proof})
    left = [result.sort for result in results if result.golden.name not in blessed]
    code = next((CODES[sort] for sort in CODES if sort in left), 0)
    if args.json:
        write_out(args.json, json.dumps({"schema_version": SCHEMA_VERSION, "goldens": values}, indent=1))
    return code
