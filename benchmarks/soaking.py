"""A long recorded training of a small model: memory, threads, handles and objects after 500 steps and at the end.

python benchmarks/soaking.py [--steps 5000] [--frameworks torch paddle] [--detail full sketch] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--frameworks", nargs="+", default=["torch", "paddle"])
    parser.add_argument("--detail", nargs="+", default=["full", "sketch"])
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    every, failed = max(args.steps // 10, 1), False
    print(f"{'':>8} {'detail':>8} {'step':>6} {'resident MB':>12} {'threads':>8} {'handles':>8} {'objects':>10}")
    for framework in args.frameworks:
        for detail in args.detail:
            folder, start = Path(tempfile.mkdtemp(dir=args.dir)), time.perf_counter()
            command = [sys.executable, "-W", "ignore", "-m", "tests.hard.soaking", framework, str(folder / "run")]
            command += [str(args.steps), "--every", str(every), "--options", json.dumps({"detail": detail})]
            paths = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
            done = subprocess.run(command, cwd=ROOT, env=paths, capture_output=True, text=True)
            shutil.rmtree(folder, ignore_errors=True)
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            for line in [x for x in lines if x["step"] in (0, every, args.steps)]:
                print(
                    f"{framework:>8} {detail:>8} {line['step']:6} {line['resident_kb'] / 1000:12.1f} "
                    f"{line['system_threads']:8} {line['handles']:8} {line['objects']:10,}"
                )
            verdict = done.stdout.splitlines()[len(lines) :] or [done.stderr[-500:]]
            print(f"{framework:>8} {detail:>8} {'; '.join(verdict)} ({time.perf_counter() - start:.0f} s)", flush=True)
            failed |= done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
