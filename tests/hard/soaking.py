"""A long recorded training in one process, and what it holds on the way.

    python -m tests.hard.soaking {torch,paddle} FOLDER STEPS [--every N] [--options JSON]

prints a line of JSON every N steps: resident memory in kB, threads, open handles, Python objects.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kit.frameworks import KITS
from kit.nets import data

import padiff


def training(kit: Any) -> tuple[Any, Any, Callable[[int], Any]]:
    kit.seed(0)
    model = kit.Sequential(kit.Linear(64, 160), kit.ReLU(), kit.Linear(160, 4))
    optimizer = kit.adam(model.parameters(), 1e-4)
    batch = kit.tensor(data(128, 64))

    def step(number: int) -> Any:
        loss = (model(batch) ** 2).mean()
        loss.backward()
        optimizer.step()
        kit.zero(optimizer)
        return loss.detach()

    return model, optimizer, step


def holds() -> dict[str, int]:
    """What this process holds now."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return {
        "resident_kb": resident,
        "threads": threading.active_count(),
        "system_threads": len(os.listdir("/proc/self/task")),
        "handles": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


def soak(framework: str, folder: Path, steps: int, every: int, options: dict[str, Any]) -> list[dict[str, int]]:
    """Record a training of so many steps; what the process holds before, after each ``every`` steps, and after."""
    gc.disable()  # what only a collection would free counts as held
    model, optimizer, step = training(KITS[framework])
    for number in range(20):
        step(number)
    out: list[dict[str, int]] = []

    def look(number: int) -> None:
        out.append({"step": number, **holds()})
        print(json.dumps(out[-1]), flush=True)

    look(0)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for number in range(1, steps + 1):
            rec.log_loss(step(number))
            rec.try_dump()
            if number % every == 0:
                rec.flush()
                entries = sorted((folder / "steps").iterdir())
                assert not [entry for entry in entries if entry.name.startswith(".")]
                for entry in entries[:-1]:  # a disk for all of them is not what is looked at
                    shutil.rmtree(entry)
                look(number)
    look(steps)
    assert np.isfinite(float(step(steps)))
    return out


def verdict(lines: list[dict[str, int]]) -> list[str]:
    """What grew, from the first look while recording to the last; empty if nothing did."""
    before, first, *_, last, after = lines
    reported = []
    steps = last["step"] - first["step"]
    # The least of each half: how many steps wait for the disk at a look is chance.
    while_recording = [line["resident_kb"] for line in lines[1:-1]]
    half = len(while_recording) // 2
    grown = min(while_recording[half:]) - min(while_recording[:half])
    # A leak of 4 kB a step is one small tensor.
    if grown > 8000 + 2 * steps:
        reported.append(f"resident memory grew by {grown:,} kB in {steps} steps")
    for what in ("threads", "system_threads", "handles"):
        if last[what] > first[what]:
            reported.append(f"{what} grew from {first[what]} to {last[what]}")
    if last["objects"] - first["objects"] > 2000:
        reported.append(f"Python objects grew from {first['objects']:,} to {last['objects']:,}")
    for what in ("threads", "handles"):
        if after[what] > before[what]:
            reported.append(f"{what} after the recording: {after[what]}, before it: {before[what]}")
    return reported


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=("torch", "paddle"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    reported = verdict(soak(args.framework, args.folder, args.steps, args.every, args.options))
    print("\n".join(reported) or "nothing grew")
    return 1 if reported else 0


if __name__ == "__main__":
    sys.exit(main())
