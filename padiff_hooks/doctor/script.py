"""Whether recording changes a user's own training: the script is run with and without, and what it did is compared."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padiff.errors import UsageError
from padiff.recorder.watched import Plan
from padiff_hooks.doctor.find import REFUSED

CHILD = Path(__file__).with_name("child.py")

# The first steps of a run make buffers and choose algorithms; they are left out of the times where others are left.
_WARM_UP = 2

# How far two runs' median step times may be apart before the times are called rough.
_ROUGH = 1.1

ADVICE = (
    "set every seed (python's, numpy's, the framework's, the data loader's), shuffle with a seeded generator, try one "
    "thread (OMP_NUM_THREADS=1), and on a GPU ask for deterministic algorithms"
)

NO_RECORDER = """{script} opens no padiff recorder, and its model was not found: {why}. In a loop of your own, write

    import padiff

    with padiff.record(model, "runs/one", optimizer=optimizer) as rec:
        for ... in ...:
            ...                     # forward, backward
            rec.log_loss(loss)
            optimizer.step()
            rec.try_dump()

and with Lightning or paddle.Model give the callback: callbacks=[PaDiffCallback("runs/one")]"""


@dataclass(frozen=True)
class Parting:
    """Where two runs of a script are first not the same to the bit.

    Attributes:
        step: the step's number.
        what: ``loss``, ``gradient``, ``parameter``, ``number of losses``, or ``steps`` (only one run has this one).
        name: which one, as ``layer/slot``; the loss's number.
        values: both sides' values, where they are known.
    """

    step: int
    what: str
    name: str = ""
    values: tuple[float, float] | None = None

    def text(self) -> str:
        if self.what == "steps":
            return f"step {self.step}: only one of the runs has it"
        if self.what == "loss":
            assert self.values is not None
            return f"step {self.step}: the loss is {self.values[0]!r} against {self.values[1]!r}"
        return f"step {self.step}: the {' '.join(filter(None, (self.what, self.name)))} differs"


@dataclass
class Notes:
    """What one run of the script noted: steps by recorder and rank, the bytes recorded, and how it ended."""

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
        """Times of the steps, of all or of those that are due or not."""
        found = []
        for steps in self.steps.values():
            warm = steps[_WARM_UP:] if len(steps) > 2 * _WARM_UP else steps[1:]
            found += [step["seconds"] for step in warm if due is None or step["due"] == due]
        return found


@dataclass(frozen=True)
class Findings:
    """What came of it. ``verdict`` is ``same``, ``changed`` or ``not deterministic``."""

    verdict: str
    sentence: str
    first: Parting | None
    plain: Notes
    recording: Notes
    seconds: Mapping[str, float | None]
    remarks: tuple[str, ...] = field(default=())


def examine(script: Path, args: Sequence[str], steps: int, say: Callable[[str], None]) -> Findings:
    """Run a script with and without recording and compare the runs.

    Raises:
        UsageError: the script fails, opens no recorder, or records none of the steps.
    """
    with tempfile.TemporaryDirectory(prefix="padiff-doctor-") as folder:
        return _examine(_Runs(script, args, steps, Path(folder), say))


def _examine(runs: _Runs) -> Findings:
    plain = runs.run("without recording", record=False)
    if not plain.steps or plain.refused:
        raise UsageError(plain.trouble or NO_RECORDER.format(script=runs.script, why=plain.refused))
    if not plain.due:
        raise UsageError(
            f"none of the first {plain.length} steps is due to be recorded, so there is nothing to examine: give "
            "--steps N with a larger N, or record more often"
        )
    # In between, so that a machine that grows slower or faster does so for both.
    recording = runs.run("recording", record=True)
    again = runs.run("without recording, again", record=False)
    unsteady, first = parting(plain, again), parting(plain, recording)
    if unsteady is None and first is not None:
        # A script may be unsteady now and then only: what parted once by chance does not part again at the same place.
        unsteady = parting(plain, runs.run("without recording, a third time", record=False))
        second = parting(plain, runs.run("recording, again", record=True))
        if unsteady is None and second != first:
            unsteady = first
    seconds = _seconds((plain, again), recording)
    remarks = _remarks(plain, again, recording)
    if unsteady is not None:
        return Findings(
            "not deterministic", _unsteady(unsteady, first, recording), unsteady, plain, recording, seconds, remarks
        )
    if first is not None:
        sentence = f"Recording changed the training, first in {first.text()} (without recording against with it)."
        return Findings("changed", sentence, first, plain, recording, seconds, remarks)
    what = ", ".join(
        f"{plain.count(_KEYS[one])} {_KEYS[one]}"
        for one in ("loss", "gradient", "parameter")
        if plain.count(_KEYS[one])
    )
    sentence = f"Recording changes nothing: {what} in {plain.length} steps are the same to the bit."
    return Findings("same", sentence, None, plain, recording, seconds, remarks)


_KEYS = {"loss": "losses", "gradient": "gradients", "parameter": "parameters"}


def parting(ours: Notes, theirs: Notes) -> Parting | None:
    """Where two runs of a script first differ, in the order in which things come into being; `None` if nowhere."""
    found: list[Parting] = []
    for key in sorted({*ours.steps, *theirs.steps}):
        one, other = ours.steps.get(key, []), theirs.steps.get(key, [])
        found += [p for p in map(_step_parting, one, other) if p is not None][:1]
        if len(one) != len(other):
            longer = max(one, other, key=len)
            found.append(Parting(longer[min(len(one), len(other))]["step"], "steps"))
    return min(found, key=lambda parting: parting.step, default=None)


def _step_parting(one: Mapping[str, Any], other: Mapping[str, Any]) -> Parting | None:
    step = one["step"]
    if step != other["step"]:
        return Parting(min(step, other["step"]), "steps")
    for (mine, value), (yours, against) in zip(one["losses"], other["losses"]):
        if mine != yours:
            return Parting(step, "loss", values=(value, against))
    for what in ("gradient", "parameter"):
        mine, yours = one[f"{what}s"], other[f"{what}s"]
        for name in (*mine, *(name for name in yours if name not in mine)):
            if mine.get(name) != yours.get(name):
                return Parting(step, what, name)
    if len(one["losses"]) != len(other["losses"]):
        return Parting(step, "number of losses")
    return None


def _unsteady(unsteady: Parting, first: Parting | None, recording: Notes) -> str:
    text = f"This script is not deterministic: two runs without recording part, first in {unsteady.text()}. "
    # Of steps that are not due nothing is recorded, so they prove nothing.
    proved = any(step["due"] and step["step"] < unsteady.step for steps in recording.steps.values() for step in steps)
    if proved and (first is None or first.step >= unsteady.step):
        text += f"In the steps before, recording changed nothing. To know more, {ADVICE}."
    else:
        text += f"So nothing can be said about recording; {ADVICE}."
    return text


def _remarks(plain: Notes, again: Notes, recording: Notes) -> tuple[str, ...]:
    found = []
    times = [statistics.median(notes.seconds() or [0.0]) for notes in (plain, again)]
    if max(times) > _ROUGH * min(times):
        both = " and ".join(f"{time * 1e3:.3g}" for time in times)
        found.append(f"the times are rough: two runs without recording took {both} ms a step (is the machine busy?)")
    if not plain.count("losses"):
        found.append("no loss was logged (rec.log_loss): gradients and parameters are what was compared")
    if not plain.count("gradients"):
        found.append("no gradient was seen: give optimizer= to padiff.record")
    for what, notes in (("without recording", plain), ("recording", recording)):
        if notes.trouble:
            found.append(f"after its steps, {what}, the script failed: {notes.trouble}")
    return tuple(found)


def _seconds(plain: Sequence[Notes], recording: Notes) -> dict[str, float | None]:
    def median(times: list[float]) -> float | None:
        return statistics.median(times) if times else None

    return {
        "plain": median([second for notes in plain for second in notes.seconds()]),
        "not_due": median(recording.seconds(due=False)),
        "due": median(recording.seconds(due=True)),
    }


class _Runs:
    """Runs the script in processes of their own, each with a folder of its own."""

    def __init__(self, script: Path, args: Sequence[str], steps: int, folder: Path, say: Callable[[str], None]) -> None:
        self.script, self._args, self._steps, self._folder, self._say = script, args, steps, folder, say
        self._number = 0

    def run(self, what: str, record: bool) -> Notes:
        """Run the script once.

        Raises:
            UsageError: it failed before its first step was over.
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
        notes = Notes({key: found for key, found in steps.items() if found}, _size(folder))
        if code:
            notes.trouble = _tail(output, code)
            if not notes.steps:
                raise UsageError(f"{self.script} failed, {what}, before a step of it was over: {notes.trouble}")
        refused = folder / REFUSED
        if refused.exists():
            notes.refused = refused.read_text(encoding="utf-8")
        elif not notes.steps:
            notes.refused = "it made no second step with an optimizer"
        for run in folder.glob("run_*"):
            shutil.rmtree(run, ignore_errors=True)  # full tensors: the disk is not to hold those of all runs
        return notes


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # the last line of a process that was killed
            break
    return found


def _size(folder: Path) -> int:
    return sum(entry.stat().st_size for run in folder.glob("run_*") for entry in run.rglob("*") if entry.is_file())


def _tail(output: Path, code: int) -> str:
    lines = [line for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip() if lines else 'it wrote nothing'} (exit code {code})"
