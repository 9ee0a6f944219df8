"""Kills a recording process with -9 at random moments, again and again, and looks at what is left each time."""

from __future__ import annotations

import json
import random
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kit.forking import python_with_frameworks

from .children import Child, started
from .writers import check_folder

ROOT = Path(__file__).resolve().parents[2]


def start(kind: str, folder: Path, *more: str, **options: Any) -> AbstractContextManager[Child]:
    """Start a writer of `tests.hard.writers`, as `started` does."""
    command = [*python_with_frameworks(), "-W", "ignore", "-m", "tests.hard.writers", kind, str(folder), *more]
    if options:
        command += ["--options", json.dumps(options)]
    return started(command, cwd=ROOT)


def until_recording(process: Child) -> None:
    """Wait until the process has opened its folder."""
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.strip() == "recording":
            return
    raise AssertionError(process.stderr.read()[-2000:])


def kill_again_and_again(
    kind: str, folder: Path, times: int, seed: int = 0, longest: float = 0.1, first: str = "error", **options: Any
) -> list[int]:
    """Kill a writer ``times`` times, resuming each time, then let it finish. Returns how many steps each kill left.

    One in four is killed while it starts, the others up to ``longest`` seconds after they opened the folder.
    """
    rng = random.Random(seed)
    counts: list[int] = []
    existing = first
    for _ in range(times):
        early = existing == "resume" and rng.random() < 0.25
        with start(kind, folder, "--existing", existing, **options) as process:
            if early:
                # Around the moment at which the folder is opened, and its leftovers are put away.
                time.sleep(rng.uniform(0.02, 0.3))
            else:
                until_recording(process)
                time.sleep(rng.uniform(0, longest))
            process.kill()
            process.stdout.read()  # to its end, which comes with that of the process that writes
        assert process.returncode == -signal.SIGKILL, f"the writer ended by itself: {process.returncode}"
        counts.append(len(check_folder(folder, kind)))
        existing = "resume"
    finish(kind, folder, **options)
    return counts


def finish(kind: str, folder: Path, existing: str = "resume", **options: Any) -> None:
    """Resume a run, let it record six more steps and end; look at everything once more."""
    numbers = check_folder(folder, kind) if existing == "resume" else []
    last = (numbers[-1] if numbers else 0) + 6
    with start(kind, folder, "--existing", existing, "--last", str(last), **options) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "done" in out, err[-2000:]
    after = check_folder(folder, kind)
    assert after == list(range(last)), f"steps are missing: {sorted(set(range(last)) - set(after))}"
    assert (folder / "finished.json").exists()
    hidden = [str(path) for path in folder.rglob(".*")]
    assert not hidden, f"left behind: {hidden}"
