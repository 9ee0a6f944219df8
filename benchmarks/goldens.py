"""How many later runs of a training are sorted right: changes of versions, threads and kernels, and planted faults.

::

    python benchmarks/goldens.py --seen [--only conv] [--torch SITE] [--paddle SITE] [--json OUT]

Each program of `golden_programs` is recorded as a golden run, then run with each change and with each fault of
relative size 1e-4. A change has to be `drift` (or `equal`, if it changes no bit), a fault has to be `fault`. SITE is a
``site-packages`` that has another version of the framework. Programs run as forks of one process that has the
frameworks imported (`tests/kit/forking.py`), but for other versions, and for what paddle reads as it is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.forking import interpreter

from padiff.dump import open_run
from padiff.golden.folder import read_golden, size_of_folder
from padiff.golden.sorting import DRIFT, EQUAL, FAULT, record_golden, record_run, sort_run

PROGRAMS = Path(__file__).parent / "golden_programs"
#: Changes of each program, beside another version.
CHANGES: dict[str, list[dict[str, str]]] = {
    "torch": [
        {"OMP_NUM_THREADS": "2"},
        {"ATEN_CPU_CAPABILITY": "default"},
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        {"MKL_CBWR": "COMPATIBLE", "GOLDEN_ONEDNN": "off"},
        {"GOLDEN_SUMS": "halves"},
    ],
    "paddle": [
        {"OMP_NUM_THREADS": "2", "FLAGS_paddle_num_threads": "2"},
        {"GOLDEN_SUMS": "halves"},
    ],
}


def faults_of(program: Path) -> tuple[str, ...]:
    """Return the faults that a program can have."""
    found = re.search(r"^FAULTS = (\(.*?\))$", program.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return tuple(re.findall(r'"(\w+)"', found[1]))


def cases_of(program: Path, sites: Mapping[str, str | None]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield what is done, what a right sort is, and the environment variables."""
    framework = "paddle" if program.stem.startswith("paddle") else "torch"
    for change in CHANGES[framework]:
        yield " ".join(f"{name}={value}" for name, value in change.items()), DRIFT, change
    site = sites[framework]
    if site:
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        yield f"another {framework}", DRIFT, {"PYTHONPATH": path}
    for fault in faults_of(program):
        yield f"fault {fault}", FAULT, {"GOLDEN_FAULT": fault}


def main() -> None:
    parser = argparse.ArgumentParser()
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--seen", action="store_true")
    group.add_argument("--held-out", action="store_true", help="count, and name nothing")
    parser.add_argument("--only", default="*")
    parser.add_argument("--torch", metavar="SITE")
    parser.add_argument("--paddle", metavar="SITE")
    parser.add_argument("--dir", default="runs/goldens", type=Path, help="goldens there are used again")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fresh, forked = sys.executable, str(interpreter(Path(tempfile.mkdtemp())))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path[1:]))
    rows: list[dict[str, Any]] = []
    for program in sorted((PROGRAMS / ("seen" if args.seen else "held_out")).glob(args.only + ".py")):
        sys.executable = forked
        command = [sys.executable, str(program)]
        golden = args.dir / program.stem
        if not golden.exists():
            golden.parent.mkdir(parents=True, exist_ok=True)
            record_golden(command, golden, args.dir / "scratch")
        kept = read_golden(golden)
        if args.seen:
            print(f"{program.stem}: {size_of_folder(golden) / 1e3:.0f} kB {kept.left_out}", flush=True)
        for what, right, environment in cases_of(program, {"torch": args.torch, "paddle": args.paddle}):
            if "PYTHONPATH" in environment or any(name.startswith("FLAGS") for name in environment):
                sys.executable = fresh
            else:
                sys.executable = forked
            command = [sys.executable, str(program)]
            now = record_run(command, args.dir / "scratch" / "now", len(kept.steps), environment)
            result = sort_run(kept, now)
            is_right = result.sort == right or (right == DRIFT and result.sort == EQUAL)
            row = {"program": program.stem, "case": what, "right": is_right, "sort": result.sort, "expected": right}
            row["version"] = open_run(now).info.framework_version
            largest = result.largest
            if largest is not None:
                row |= {"share": largest.share, "site": largest.site, "step": largest.step, "units": largest.units}
            rows.append(row)
            if args.seen:
                far = "" if largest is None else f"{largest.share:9.3g} {largest.site} step {largest.step}"
                print(f"  {'ok   ' if is_right else 'WRONG'} {result.sort:6} {what:60} {far}", flush=True)
    shutil.rmtree(args.dir / "scratch", ignore_errors=True)
    for right in (DRIFT, FAULT):
        chosen = [row for row in rows if row["expected"] == right]
        counts = Counter(row["sort"] for row in chosen)
        print(f"{right}: {sum(row['right'] for row in chosen)} of {len(chosen)} right {dict(counts)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
