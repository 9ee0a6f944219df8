"""Clean pairs and planted faults of compilers: `run.py [--held-out] [--only TEXT] [--json OUT]`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import tempfile
import warnings

import compilers

import padiff
from padiff.dump import open_run


def counted(program, backend, folder):
    """The losses, and what dynamo counted: graphs, graph breaks, captured calls."""
    from torch._dynamo.utils import counters

    counters.clear()
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = compilers.train(program, backend, folder)
    return losses, {key: dict(counters[key]) for key in ("stats", "graph_break", "frames")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    module = importlib.import_module("held_out" if args.held_out else "seen")
    names = "clean", "false alarms", "changed by recording", "faults", "detected", "region", "operation", "layer"
    figures = dict.fromkeys(names, 0)
    for name, program in module.PROGRAMS.items():
        for backend in ("eager", "aot_eager", "inductor"):
            if args.only not in ("", "clean"):
                continue
            with tempfile.TemporaryDirectory() as folder:
                counted(program, None, f"{folder}/a")
                recorded, plain = counted(program, backend, f"{folder}/b"), counted(program, backend, None)
                report = padiff.compare_runs(f"{folder}/a", f"{folder}/b")
                regions = open_run(f"{folder}/b").steps(0)[0].regions
            figures["clean"] += 1
            figures["changed by recording"] += recorded != plain
            if not report.passed or not regions or any(not region.measured for region in regions):
                figures["false alarms"] += 1
            print(
                f"{name} {backend}: {report.outcome} {recorded == plain} {len(regions)} regions {report.regions}"
                if not args.held_out
                else "."
            )
    for name, fault in module.FAULTS.items():
        if args.only not in name:
            continue
        program = module.PROGRAMS[fault.program]
        with tempfile.TemporaryDirectory() as folder:
            counted(program, None, f"{folder}/a")
            counted(program, compilers.compiler(fault.edit, fault.backward), f"{folder}/b")
            report = padiff.compare_runs(f"{folder}/a", f"{folder}/b")
            regions = open_run(f"{folder}/b").steps(0)[0].regions
        wrong = next((region for region in regions if region.failed), None)
        operation = None if wrong is None else wrong.wrong
        detected = not report.passed
        region = wrong is not None and wrong.number == fault.region
        named = operation is not None and re.search(fault.operation, operation.name) is not None
        layer = operation is not None and re.search(fault.layer, operation.layer) is not None
        figures["faults"] += 1
        for key, value in (("detected", detected), ("region", region), ("operation", named), ("layer", layer)):
            figures[key] += value
        if not args.held_out:
            print(f"{name}: {detected=} {region=} {named=} {layer=} {operation}\n{report.text(110)}")
    print(json.dumps(figures))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file)


if __name__ == "__main__":
    main()
