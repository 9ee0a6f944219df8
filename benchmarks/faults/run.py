"""Planted faults and clean pairs: does padiff find the fault, the place and the cause, and leave clean pairs alone?

    python benchmarks/faults/run.py [--condition float32|sketch|bfloat16|every3] [--seen | --held-out]
                                    [--only NAME ...] [--sample N] [--effects] [--json OUT] [--verbose]

NAME is a program, or program/fault; ``*`` stands for anything. Programs of `held_out` are not to be looked at while the
code that they judge is written: without ``--verbose`` their faults are counted and not named.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

for _threads in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_threads}_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "3")
warnings.filterwarnings("ignore")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # this checkout's padiff

import paddle
import torch
from effects import effect
from kit import Fault, Program
from pairs import Made, Pairs
from verdict import GENERIC, NAMED, NO_CAUSE, SUSPECTS, WRONG, judge

torch.set_num_threads(1)
paddle.set_device("cpu")

PARTS = ("seen", "held_out")


def programs(part: str) -> list[Program]:
    """The programs of a part, in the order of their files."""
    found = []
    for module in pkgutil.iter_modules([str(HERE / part)]):
        found.append(importlib.import_module(f"{part}.{module.name}").PROGRAM)
    return found


def wanted(name: str, only: list[str]) -> bool:
    """Whether a case was asked for."""
    return not only or any(fnmatch(name, p) or fnmatch(name.split("/")[0], p) for p in only)


def row(case: str, kind: str, made: Made, **more: Any) -> dict[str, Any]:
    """One line of the results."""
    seconds = made.reference.seconds + made.candidate.seconds
    return {"case": case, "kind": kind, "ms": made.milliseconds, "training": seconds, "error": made.error, **more}


def fault_row(pairs: Pairs, program: Program, fault: Fault, effects: bool) -> dict[str, Any]:
    """Record and judge one fault."""
    made = pairs.fault(program, fault)
    if not program.shown and "loss" in fault.stages:
        fault = replace(fault, stages=f"{fault.stages}|backward")  # a loss that nobody logged
    verdict = judge(made.first, fault, pairs.condition)
    known = dict(expected=f"step {fault.step}, {fault.stages}, {fault.places or 'anywhere'}")
    if effects:
        known["effect"] = effect(pairs.without(program, fault), made.candidate)
    return row(f"{program.name}/{fault.name}", "fault", made, **known, **vars(verdict))


def run_program(pairs: Pairs, program: Program, given: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases of a program that were asked for."""
    rows = []
    for fault in program.faults[:: given.sample]:
        name = f"{program.name}/{fault.name}"
        if wanted(name, given.only) and not (pairs.condition == "bfloat16" and fault.fine):
            rows.append(guarded(name, lambda fault=fault: fault_row(pairs, program, fault, given.effects)))
    for clean in program.clean[:: given.sample]:
        name = f"{program.name}/clean/{clean.name}"
        if wanted(name, given.only):

            def one(clean=clean, name=name):
                made = pairs.clean(program, clean)
                message = made.first.message if made.first is not None else made.outcome
                return row(name, "clean", made, alarm=made.outcome != "match", message=message)

            rows.append(guarded(name, one))
    pairs.release()
    return rows


def guarded(name: str, make: Any) -> dict[str, Any]:
    """A case's line; a case that breaks is a line, too."""
    try:
        return make()
    except Exception:
        return {"case": name, "kind": "broken", "error": traceback.format_exc(limit=-4), "ms": 0.0, "training": 0.0}


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What it comes to."""
    faults = [r for r in rows if r["kind"] == "fault"]
    clean = [r for r in rows if r["kind"] == "clean"]
    causes = Counter(r["cause"] for r in faults)
    return {
        "faults": len(faults),
        "detected": sum(r["detected"] for r in faults),
        "placed": sum(r["placed"] for r in faults),
        "cause named": causes[NAMED],
        "named and placed": sum(r["cause"] == NAMED and r["placed"] for r in faults),
        "proven": sum(r["proven"] and r["cause"] == NAMED for r in faults),
        "wrong cause": causes[WRONG],
        "wrong and proven": sum(r["proven"] and r["cause"] == WRONG for r in faults),
        "suspects only": causes[SUSPECTS],
        "generic": causes[GENERIC],
        "no cause": causes[NO_CAUSE],
        "clean": len(clean),
        "false alarms": sum(r["alarm"] for r in clean),
        "broken": sum(r["kind"] == "broken" for r in rows) + sum(bool(r["error"]) for r in faults),
        "ms a comparison": round(sum(r["ms"] for r in rows) / max(len(rows), 1)),
    }


def show(rows: list[dict[str, Any]], verbose: bool) -> None:
    """The table of a part, and what was missed."""
    if verbose:
        print(f"{'case':40} {'det':3} {'pla':3} {'cause':9} {'ms':>5}  where")
    for r in rows:
        if r["kind"] == "fault" and verbose:
            where = f"step {r['step']}, {r['stage']}, {r['where']}" if r["detected"] else "-"
            more = f"  effect {r['effect']:.1e}" if "effect" in r else ""
            print(f"{r['case']:40} {r['detected']:3} {r['placed']:3} {r['cause']:9} {r['ms']:5.0f}  {where}{more}")
    for r in rows:
        told = r["error"] or r.get("message") or ""
        if r["kind"] == "broken" or r["error"]:
            print(f"BROKEN {r['case']}: {told}")
        elif r["kind"] == "clean" and r["alarm"]:
            print(f"FALSE ALARM {r['case']}: {told}")
        elif r["kind"] == "fault" and verbose and not r["detected"]:
            print(f"MISSED {r['case']} (expected {r['expected']})")
        elif r["kind"] == "fault" and verbose and not r["placed"]:
            print(f"MISPLACED {r['case']} (expected {r['expected']}): {told}")
        elif r["kind"] == "fault" and verbose and r["cause"] != NAMED:
            print(f"CAUSE {r['cause'].upper()} {r['case']}: {told}")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--condition", choices=("float32", "sketch", "bfloat16", "every3"), default="float32")
    parser.add_argument("--only", nargs="*", default=[])
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--seen", action="store_true")
    part.add_argument("--held-out", action="store_true")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every Nth case only")
    parser.add_argument("--effects", action="store_true", help="train without the fault, too: how much does it change?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="name the held-out faults, too")
    given = parser.parse_args()
    parts = [PARTS[0]] if given.seen else [PARTS[1]] if given.held_out else list(PARTS)
    results: dict[str, Any] = {}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pairs = Pairs(Path(folder), given.condition)
        for name in parts:
            rows: list[dict[str, Any]] = []
            for program in programs(name):
                if pairs.can(program):
                    rows += run_program(pairs, program, given)
                    print(f"{name}/{program.name}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            print(f"== {name}, {given.condition}")
            show(rows, verbose=given.verbose or name == "seen")
            results[name] = {"totals": totals(rows), "rows": rows}
    for name, result in results.items():
        print(f"== {name}, {given.condition}: " + ", ".join(f"{k} {v}" for k, v in result["totals"].items()))
    print(f"{time.perf_counter() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps({"condition": given.condition, "parts": results}, indent=1, default=str))


if __name__ == "__main__":
    main()
