"""Check that recording does not change a training: runs of the script with and without recording are compared."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padiff.errors import UsageError
from padiff_cli.doctor.script_runs import ScriptRun, ScriptRuns

# Ratio of two runs' median step times above which a remark calls the times rough.
_ROUGH = 1.1

#: Kinds of values that are compared between two runs.
COMPARED = ("losses", "gradients", "parameters")

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
class Divergence:
    """The first place where two runs of a script are not equal to the bit.

    Attributes:
        step: number of the step.
        what: ``loss``, ``gradient``, ``parameter``, ``number of losses``, or ``steps`` (only one run has the step).
        name: ``layer/slot`` of the gradient or parameter; empty otherwise.
        values: the loss in either run, for a loss.
    """

    step: int
    what: str
    name: str = ""
    values: tuple[float, float] | None = None

    def message(self) -> str:
        if self.what == "steps":
            return f"step {self.step}: only one of the runs has it"
        if self.what == "loss":
            assert self.values is not None
            return f"step {self.step}: the loss is {self.values[0]!r} against {self.values[1]!r}"
        return f"step {self.step}: the {' '.join(filter(None, (self.what, self.name)))} differs"


@dataclass(frozen=True)
class Examination:
    """Result of an examination of a script. ``verdict`` is ``same``, ``changed`` or ``not deterministic``."""

    verdict: str
    sentence: str
    first: Divergence | None
    plain: ScriptRun
    recording: ScriptRun
    seconds: Mapping[str, float | None]
    remarks: tuple[str, ...] = field(default=())


def examine(script: Path, args: Sequence[str], steps: int, say: Callable[[str], None]) -> Examination:
    """Run a script with and without recording and compare the runs.

    Raises:
        UsageError: the script fails, opens no recorder, or records none of the steps.
    """
    with tempfile.TemporaryDirectory(prefix="padiff-doctor-") as folder:
        return _examine(ScriptRuns(script, args, steps, Path(folder), say))


def _examine(runs: ScriptRuns) -> Examination:
    plain = runs.run("without recording", record=False)
    if not plain.steps or plain.refused:
        raise UsageError(plain.trouble or NO_RECORDER.format(script=runs.script, why=plain.refused))
    if not plain.due:
        raise UsageError(
            f"none of the first {plain.length} steps is due to be recorded, so there is nothing to examine: give "
            "--steps N with a larger N, or record more often"
        )
    # Between the two runs without recording, so that a machine that gets slower or faster does so for both kinds.
    recording = runs.run("recording", record=True)
    again = runs.run("without recording, again", record=False)
    unstable, first = first_divergence(plain, again), first_divergence(plain, recording)
    if unstable is None and first is not None:
        # A script may be unstable only now and then: a chance difference does not come again at the same place.
        unstable = first_divergence(plain, runs.run("without recording, a third time", record=False))
        second = first_divergence(plain, runs.run("recording, again", record=True))
        if unstable is None and second != first:
            unstable = first
    if unstable is not None:
        verdict, sentence, first = "not deterministic", _unstable_text(unstable, first, recording), unstable
    elif first is not None:
        verdict = "changed"
        sentence = f"Recording changed the training, first in {first.message()} (without recording against with it)."
    else:
        verdict, counts = "same", {what: plain.count(what) for what in COMPARED}
        what = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        sentence = f"Recording changes nothing: {what} in {plain.length} steps are the same to the bit."
    seconds, remarks = _seconds((plain, again), recording), _remarks(plain, again, recording)
    return Examination(verdict, sentence, first, plain, recording, seconds, remarks)


def first_divergence(first: ScriptRun, second: ScriptRun) -> Divergence | None:
    """Return the first difference of two runs of a script, or `None` if the runs are equal.

    Within a step, losses are compared first, then gradients, then parameters.
    """
    divergences: list[Divergence] = []
    for key in sorted({*first.steps, *second.steps}):
        steps, others = first.steps.get(key, []), second.steps.get(key, [])
        divergences += [d for d in map(_step_divergence, steps, others) if d is not None][:1]
        if len(steps) != len(others):
            longer = max(steps, others, key=len)
            divergences.append(Divergence(longer[min(len(steps), len(others))]["step"], "steps"))
    return min(divergences, key=lambda divergence: divergence.step, default=None)


def _step_divergence(first: Mapping[str, Any], second: Mapping[str, Any]) -> Divergence | None:
    step = first["step"]
    if step != second["step"]:
        return Divergence(min(step, second["step"]), "steps")
    for (digest, value), (other_digest, other_value) in zip(first["losses"], second["losses"]):
        if digest != other_digest:
            return Divergence(step, "loss", values=(value, other_value))
    for what in ("gradient", "parameter"):
        digests, others = first[f"{what}s"], second[f"{what}s"]
        for name in (*digests, *(name for name in others if name not in digests)):
            if digests.get(name) != others.get(name):
                return Divergence(step, what, name)
    if len(first["losses"]) != len(second["losses"]):
        return Divergence(step, "number of losses")
    return None


def _unstable_text(unstable: Divergence, first: Divergence | None, recording: ScriptRun) -> str:
    text = f"This script is not deterministic: two runs without recording part, first in {unstable.message()}. "
    # Steps that are not due are not recorded, so these prove nothing.
    proved = any(step["due"] and step["step"] < unstable.step for steps in recording.steps.values() for step in steps)
    if proved and (first is None or first.step >= unstable.step):
        text += f"In the steps before, recording changed nothing. To know more, {ADVICE}."
    else:
        text += f"So nothing can be said about recording; {ADVICE}."
    return text


def _remarks(plain: ScriptRun, again: ScriptRun, recording: ScriptRun) -> tuple[str, ...]:
    remarks = []
    times = [statistics.median(run.seconds() or [0.0]) for run in (plain, again)]
    if max(times) > _ROUGH * min(times):
        both = " and ".join(f"{time * 1e3:.3g}" for time in times)
        remarks.append(f"the times are rough: two runs without recording took {both} ms a step (is the machine busy?)")
    if not plain.count("losses"):
        remarks.append("no loss was logged (rec.log_loss): gradients and parameters are what was compared")
    if not plain.count("gradients"):
        remarks.append("no gradient was seen: give optimizer= to padiff.record")
    for what, run in (("without recording", plain), ("recording", recording)):
        if run.trouble:
            remarks.append(f"after its steps, {what}, the script failed: {run.trouble}")
    return tuple(remarks)


def _seconds(plain: Sequence[ScriptRun], recording: ScriptRun) -> dict[str, float | None]:
    def median(times: list[float]) -> float | None:
        return statistics.median(times) if times else None

    return {
        "plain": median([second for run in plain for second in run.seconds()]),
        "not_due": median(recording.seconds(due=False)),
        "due": median(recording.seconds(due=True)),
    }
