"""Recording processes killed with -9 at random moments: what is left reads whole, and the run goes on.

Each kind of training records values that are a known function of the step's number, is killed, looked at, resumed,
killed again, and allowed to end at last.

    python benchmarks/killing.py [--times 200] [--kinds numpy torch paddle lightning hapi] [--seed 0] [--dir FOLDER]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tests.hard.killing import kill_again_and_again

# Of all kills, how many each kind gets: a process of numpy alone starts in a moment.
SHARES = {"numpy": 0.70, "torch": 0.12, "paddle": 0.12, "lightning": 0.03, "hapi": 0.03}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    total = sum(SHARES[kind] for kind in args.kinds)
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    print(f"{'':>10} {'stored':>8} {'kills':>6} {'steps seen whole':>17} {'seconds':>8}")
    done = 0
    try:
        for kind in args.kinds:
            times = round(args.times * SHARES[kind] / total)
            for pack in (False, True):
                share = times // 2 + (times % 2 if not pack else 0)
                # A fresh folder every 20 kills: what grows is read whole after every kill.
                seen, start, left = 0, time.perf_counter(), share
                while left:
                    run = folder / f"{kind}-{pack}-{left}"
                    kills = min(left, 20)
                    options = {"pack": True} if pack and kind in ("numpy", "torch", "paddle") else {}
                    counts = kill_again_and_again(kind, run, kills, seed=args.seed + left, **options)
                    seen, left = seen + sum(counts), left - kills
                    shutil.rmtree(run)
                done += share
                stored = "packed" if pack and kind in ("numpy", "torch", "paddle") else "plain"
                print(f"{kind:>10} {stored:>8} {share:6} {seen:17,} {time.perf_counter() - start:8.0f}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{done} kills: every step that was there read whole, every run was resumed and ended")


if __name__ == "__main__":
    main()
