"""Clean pairs and planted faults of engines: `run.py [--held-out] [--json OUT] [--only TEXT]`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import re
import tempfile

import torch
import ways

import padiff
from padiff.records.diagnostic import diagnostic_of


def compared(folder: str, family: str, reference: tuple, candidate: tuple, dtype: torch.dtype):
    for name, (way, fault) in (("a", reference), ("b", candidate)):
        fault = fault or ways.Fault(way, ways.Expected(""))
        model = ways.model_of(family, dtype, **fault.config)
        if fault.change is not None:
            fault.change(model)
        with contextlib.redirect_stderr(io.StringIO()):
            ways.record(model, f"{folder}/{name}", way, fault.options)
    return padiff.compare_runs(f"{folder}/a", f"{folder}/b")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    args = parser.parse_args()
    figures = dict.fromkeys(("clean", "false alarms", "faults", "detected", "placed", "cause named", "wrong cause"), 0)
    for module in [
        importlib.import_module(name) for name in (("held_out", "held_out_2") if args.held_out else ("seen", "seen_2"))
    ]:
        for dtype in (torch.float32, torch.bfloat16):
            for a, b in itertools.permutations(ways.WAYS, 2):
                if args.only and args.only != "clean":
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    report = compared(folder, module.FAMILY, (a, None), (b, None), dtype)
                figures["clean"] += 1
                if not report.passed or not report.tokens:
                    figures["false alarms"] += 1
                    print(f"FALSE ALARM {module.FAMILY} {dtype} {a} {b}\n{report.text()}")
        for name, fault in module.FAULTS.items():
            if args.only not in name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                report = compared(folder, module.FAMILY, (fault.reference, None), (fault.way, fault), torch.float32)
            diagnostic = diagnostic_of(report)
            cause = "" if diagnostic.cause is None else diagnostic.cause.text
            kind = "" if diagnostic.cause is None else diagnostic.cause.kind
            detected = not report.passed
            placed = detected and re.search(fault.expected.where, f"{diagnostic.stage}: {diagnostic.where}") is not None
            named = bool(fault.expected.words) and re.search(fault.expected.words, cause) is not None
            figures["faults"] += 1
            figures["detected"] += detected
            figures["placed"] += placed
            figures["cause named"] += named or not fault.expected.words
            figures["wrong cause"] += (
                bool(fault.expected.words) and not named and kind not in ("unknown", "generic", "")
            )
            if not args.held_out:
                print(
                    f"{name}: {detected=} {placed=} {named=}\n    {diagnostic.stage}: {diagnostic.where}\n    {kind}: {cause}"
                )
                print("\n".join(f"    {line}" for line in report.tokens))
    print(json.dumps(figures))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file)


if __name__ == "__main__":
    main()
