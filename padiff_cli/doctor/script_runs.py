"""Runs of a user's script in processes of their own, with and without recording, and the notes of each run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padiff.errors import UsageError
from padiff.recorder.factory import Plan
from padiff_cli.doctor.model_finder import REFUSED

CHILD = Path(__file__).with_name("script_child.py")

# Steps at the start that allocate buffers and choose algorithms; the times exclude these if enough steps remain.
_WARM_UP = 2


@dataclass
class ScriptRun:
    """Notes of one run of the script: its steps by recorder and rank, the bytes recorded, and the error at its end."""

    steps: dict[str, list[dict[str, Any]]]
    recorded: int = 0
    trouble: str = ""
    refused: str = ""

    def count(self, what: str) -> int:
        return sum(len(step[what]) for steps in self.steps.values() for step in steps)

    @property
    def length(self) -> int:
        return max((len(steps) for steps in self.steps.values()), default=0)

    @property
    def due(self) -> int:
        return max((sum(step["due"] for step in steps) for steps in self.steps.values()), default=0)

    @property
    def peak(self) -> int:
        return max((step["peak"] for steps in self.steps.values() for step in steps), default=0)

    def seconds(self, due: bool | None = None) -> list[float]:
        """Return the seconds of each step after the warm-up; with ``due``, only of steps that are due, or are not."""
        times = []
        for steps in self.steps.values():
            warm = steps[_WARM_UP:] if len(steps) > 2 * _WARM_UP else steps[1:]
            times += [step["seconds"] for step in warm if due is None or step["due"] == due]
        return times


class ScriptRuns:
    """Runner that executes the script in a new process with a new folder for each run."""

    def __init__(self, script: Path, args: Sequence[str], steps: int, folder: Path, say: Callable[[str], None]) -> None:
        self.script, self._args, self._steps, self._folder, self._say = script, args, steps, folder, say
        self._number = 0

    def run(self, what: str, record: bool) -> ScriptRun:
        """Run the script once.

        Raises:
            UsageError: the script failed before the end of its first step.
        """
        self._say(f"running {self.script} {what}")
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        environment = {
            "PYTHONHASHSEED": "0",
            **os.environ,
            **Plan(str(folder), record, self._steps).to_environment(),
        }
        command = [sys.executable, str(CHILD), str(os.getpid()), str(self.script), *self._args]
        output = folder / "output.txt"
        with open(output, "wb") as out:
            code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode
        steps = {path.stem: _read(path) for path in sorted(folder.glob("notes_*.jsonl"))}
        run = ScriptRun({key: notes for key, notes in steps.items() if notes}, _size(folder))
        if code:
            run.trouble = _tail(output, code)
            if not run.steps:
                raise UsageError(f"{self.script} failed, {what}, before a step of it was over: {run.trouble}")
        refused = folder / REFUSED
        if refused.exists():
            run.refused = refused.read_text(encoding="utf-8")
        elif not run.steps:
            run.refused = "it made no second step with an optimizer"
        for recorded in folder.glob("run_*"):
            shutil.rmtree(recorded, ignore_errors=True)  # full tensors: the disk may be too small for those of all runs
        return run


def _read(path: Path) -> list[dict[str, Any]]:
    notes = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            notes.append(json.loads(line))
        except ValueError:  # the last line of a process that was killed
            break
    return notes


def _size(folder: Path) -> int:
    return sum(entry.stat().st_size for run in folder.glob("run_*") for entry in run.rglob("*") if entry.is_file())


def _tail(output: Path, code: int) -> str:
    lines = [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip() if lines else 'it wrote nothing'} (exit code {code})"
