"""Streaming diffs to TensorBoard and to ``diffs.jsonl``, with neither torch nor tensorflow.

Under the log folder: ``reference`` and ``candidate`` hold each run's own loss and norms under the same tags, so that
TensorBoard lays the two curves over each other; ``diff`` holds per-layer scalars and first-diff events.
``diffs.jsonl`` has a line for each compared step and is the source of truth: a restart goes on after it, as long as the
two folders hold the recordings that its first line names. ``report.json`` is the report so far as `to_json` writes it,
without its steps: what the page shows beside them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from padiff.dump.files import write_json
from padiff.dump.local import local_folder
from padiff.errors import UsageError
from padiff.records import (
    CANNOT_TELL,
    DIFFER,
    LOOP,
    MATCH,
    SIDES,
    Both,
    Record,
    Report,
    Standing,
    Step,
    count_text,
    is_loss,
    is_of_loss,
)
from padiff.report_formats import to_json
from padiff_hooks.event_files import EventFile, ScalarSink

DIFFS_FILE = "diffs.jsonl"
REPORT_FILE = "report.json"
#: The lines of the recordings before.
BEFORE_FILE = "diffs.before.jsonl"
SCHEMA_VERSION = 1

#: ``(tag, value)`` of one step.
Scalars = list[tuple[str, float]]
# The identities of recordings that have none, which can't be told apart.
_NAMELESS = Both("", "")


class DiffStream:
    """Writes one report per step to TensorBoard and ``diffs.jsonl``.

    `begin` says which recordings the reports are of. A log of others, of the same folders, is put aside.

    Args:
        logdir: the log folder; made if need be.
        names: what tells the two runs from others; a log folder of other runs is refused.
        diff: a sink to use for the ``diff`` run instead of a folder of our own (a Trainer's logger).

    Attributes:
        done: the steps that were written, now or before.
        differs: whether one of them had a diff.
        doubtful: whether of one of them it can't be told.
        replaced: what `begin` put aside, and why, in a sentence; empty if nothing.

    Raises:
        UsageError: the log folder holds the diffs of other runs, or its ``diffs.jsonl`` is damaged.
    """

    def __init__(self, logdir: str | Path, names: Both[str], diff: ScalarSink | None = None) -> None:
        self.path = local_folder(logdir, "logdir")
        self._names, self._host_sink = names, diff
        self._sinks: dict[str, ScalarSink] = {}
        self._file: TextIO | None = None
        self._open = contextlib.ExitStack()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the log folder {self.path}: {error}") from error
        self._recordings: Both[str] | None = None
        self._older = False
        self._place: tuple[Any, ...] | None = None
        #: Whether it was said that diffs follow from the first one.
        self._follows = False
        self._first: dict[str, Any] | None = None
        self._told: Any = None
        self.done: set[int] = set()
        self.differs = self.doubtful = False
        self.replaced = ""
        self._read()

    @property
    def outcome(self) -> str:
        """What the steps came to, as `padiff.Report.outcome` has it."""
        return DIFFER if self.differs else CANNOT_TELL if self.doubtful else MATCH

    def begin(self, recordings: Both[str] = _NAMELESS) -> Collection[int]:
        """Go on with the log of two recordings, or begin it anew if it is of others.

        Args:
            recordings: their identities; empty for those that have none, which can't be told apart.

        Returns:
            The steps that need not be written any more.
        """
        self.replaced = ""
        if self._file is not None and recordings == self._recordings:
            return self.done
        self.close()
        if self._recordings is not None and recordings != self._recordings:
            self._put_aside(recordings)
        self._recordings = recordings
        first = max(self.done, default=-1) + 1
        with contextlib.ExitStack() as begun:  # on a full disk no threads of half a stream stay behind
            begun.callback(self._forget)
            for run in ("reference", "candidate", "diff"):
                sink = self._host_sink if run == "diff" else None
                if sink is None:
                    own = EventFile(self.path / run, first, self._older)
                    sink = begun.enter_context(contextlib.closing(own))
                self._sinks[run] = sink
            self._file = begun.enter_context(open(self.path / DIFFS_FILE, "a", encoding="utf-8"))
            if self._file.tell() == 0:
                names = dict(SIDES.zip(self._names))
                self._write_line({"schema_version": SCHEMA_VERSION, **names, "recordings": list(recordings)})
            self._open = begun.pop_all()
        return self.done

    def write(self, report: Report) -> None:
        """Write one step's report: scalars, the first-diff event if there is a new one, then the line."""
        if self._file is None:
            self.begin()
        step = report.coverage.steps[0]
        if step in self.done:
            return
        for run, scalars in scalars_of(report).items():
            for tag, value in scalars:
                self._sinks[run].scalar(tag, value, step)
        text = self._event(report)
        if text:
            # A tag of its own for each event: TensorBoard keeps only ten texts of one tag.
            self._sinks["diff"].text(f"first_diff/step_{step:08d}", text, step)
        for sink in self._sinks.values():
            sink.flush()
        parted = self.differs
        whole = to_json(report)
        self._first = _first_of(self._first, whole["first_diff"])
        self._count(report.outcome)
        self._write_report(whole, step)
        # Last: a line says that the step's points are out.
        line = _line(report, whole)
        self._write_line(_following(line) if parted else line)
        self.done.add(step)

    def _event(self, report: Report) -> str:
        """What is new in a step (Markdown): the first diff, once that others follow from it, further faults."""
        first = report.first_diff
        if first is None:
            return ""
        lines = []
        place = first.stage, first.reference, first.candidate, first.slot
        # A process that was started again has not seen the first one.
        follows = first.standing is Standing.FOLLOWS or (first.standing is Standing.FIRST and self.differs)
        if not follows and first.standing is Standing.FIRST:
            more = f"\n\n{count_text(report)} in this step." if len(report.failed) > 1 else ""
            lines.append(f"{Standing.FIRST}: **{first.message}**{more}")
        elif follows and place != self._place and not self._follows:
            self._follows = True
            lines.append(f"{Standing.FOLLOWS}: {count_text(report)} in this step, as in those after it.")
        self._place = place
        lines += [f"{Standing.NEW}: **{one.message}**" for one in report.independent]
        return "\n\n".join(lines)

    def _count(self, outcome: str) -> None:
        self.differs = self.differs or outcome == DIFFER
        self.doubtful = self.doubtful or outcome == CANNOT_TELL

    def close(self) -> None:
        """Close the event files and ``diffs.jsonl``; a given sink stays open."""
        self._open.close()

    def _forget(self) -> None:
        self._sinks.clear()
        self._file = None

    def _write_report(self, whole: dict[str, Any], step: int) -> None:
        """Write the report so far, when there is something new in it."""
        so_far = {key: value for key, value in whole.items() if key != "steps"}
        so_far |= {"passed": self.outcome == MATCH, "outcome": self.outcome, "first_diff": self._first}
        if self._first is not None:
            so_far["verdict"] = self._first["message"]
        else:
            del so_far["verdict"]  # of this step alone
        # Coverage is a step's own: that one counts another pair is no news.
        told = {key: value for key, value in so_far.items() if key != "coverage"}
        if told != self._told:
            self._told = told
            write_json(self.path / REPORT_FILE, {**so_far, "step": step})

    def _write_line(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(content) + "\n")
            self._file.flush()

    def _read(self) -> None:
        path = self.path / DIFFS_FILE
        lines = list(_lines(path)) if path.exists() else []
        if not lines:
            return
        names = SIDES.map(lines[0].get)
        if names != self._names:
            raise UsageError(
                f"{path} holds the diffs of {' and '.join(map(str, names))}, not of {' and '.join(self._names)}: "
                "give another log folder"
            )
        noted = lines[0].get("recordings")
        self._older = noted is None
        self._recordings = Both(*map(str, noted)) if isinstance(noted, list) and len(noted) == 2 else _NAMELESS
        for line in lines:
            if line.get("first_diff"):
                self._first = _first_of(self._first, line["first_diff"])
                self._place = _place(line["first_diff"])
                self._follows = self._follows or line["first_diff"].get("standing") == Standing.FOLLOWS.name.lower()
        self.done = {int(line["step"]) for line in lines if "step" in line}
        for line in lines:
            # Lines of an older padiff have no outcome.
            self._count(line.get("outcome", DIFFER if line.get("passed") is False else MATCH))

    def _put_aside(self, recordings: Both[str]) -> None:
        """Rename the lines; without them, `EventFile` drops all of our points."""
        before = self._recordings or recordings
        (self.path / REPORT_FILE).unlink(missing_ok=True)
        os.replace(self.path / DIFFS_FILE, self.path / BEFORE_FILE)
        if self.done:
            others = [name for name, was, now in zip(self._names, before, recordings) if was != now]
            self.replaced = (
                f"{' and '.join(others)} {'were' if len(others) > 1 else 'was'} recorded anew: the log folder "
                f"{self.path} begins anew; its lines of before are in {BEFORE_FILE}"
            )
        self._place, self._first, self._told, self._follows, self.done = None, None, None, False, set()
        self.differs = self.doubtful = False


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a ``diffs.jsonl``; a last line that was cut off is removed from the file."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) != len(content):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    for number, text in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not isinstance(line.get("step", 0), int):
                raise ValueError("no object with a step")
        except ValueError as error:
            raise UsageError(f"{path}, line {number}, is damaged ({error}): give another log folder") from error
        yield line


def line_of(report: Report) -> dict[str, Any]:
    """The line of ``diffs.jsonl`` for one step's report."""
    return _line(report, to_json(report))


def _line(report: Report, whole: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": report.coverage.steps[0],
        "passed": report.passed,
        "outcome": report.outcome,
        "first_diff": whole["first_diff"],
        **({"independent": whole["independent"]} if whole["independent"] else {}),
        **({"settings_differ": whole["settings_differ"]} if whole["settings_differ"] else {}),
        "coverage": whole["coverage"]["share"],
        "diffs": [diff for step in whole["steps"] for diff in step["diffs"]],
    }


def _following(line: dict[str, Any]) -> dict[str, Any]:
    """A line of a step after the first one with a diff, which a process that was started again takes for the first."""
    first, follows = Standing.FIRST.name.lower(), Standing.FOLLOWS.name.lower()
    for one in (line["first_diff"] or {}, *line["diffs"]):
        if one.get("standing") == first:
            one["standing"] = follows
    return line


def scalars_of(report: Report) -> dict[str, Scalars]:
    """Scalars of one step's report, by TensorBoard run: ``reference``, ``candidate``, ``diff``.

    A layer's norm is taken over all of its slots and calls at the stage, its diff is the largest among them. Layers
    are named by the reference's path.
    """
    own = Both(_OwnScalars(), _OwnScalars())
    worst: dict[str, float] = {}
    for diff in report.diffs:
        figures, anchor = diff.figures, diff.pair.anchor
        if figures is None or is_of_loss(anchor):
            continue
        norms = Both(figures.reference_l2, figures.candidate_l2)
        for scalars, (record, (value, norm)) in own.zip(diff.pair.sides.zip(figures.values.zip(norms))):
            if record is not None:
                scalars.add(anchor, value, norm**2)
        if diff.compared:
            layer = "loss" if is_loss(anchor) else anchor.layer
            for metric, value in (("rel_l2", figures.rel_l2), ("max_abs", figures.max_abs)):
                for tag in (f"{anchor.stage}_{metric}/{layer}", f"worst/{anchor.stage}_{metric}"):
                    worst[tag] = max(worst.get(tag, 0.0), value)
    return {**dict(SIDES.zip(own.map(_OwnScalars.all))), "diff": list(worst.items())}


def own_scalars_of(step: Step) -> Scalars:
    """One run's own loss, learning rates and per-layer norms, where there is no other run to compare with."""
    scalars = _OwnScalars()
    for record in step.records:
        if is_of_loss(record):
            continue
        if record.sketch is not None:
            scalars.add(record, 0.0, record.sketch.l2**2)
            continue
        value = record.value
        wide = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
        number = float(value.reshape(())) if record.layer == LOOP else 0.0
        scalars.add(record, number, float(np.square(np.abs(wide)).sum()))
    return scalars.all()


class _OwnScalars:
    """One run's own scalars of a step: what the loop reports, the loss, and the norm of each layer's tensors."""

    def __init__(self) -> None:
        self._loop: Scalars = []
        self._losses: list[float] = []
        self._squares: dict[str, float] = defaultdict(float)

    def add(self, record: Record, value: float, square: float) -> None:
        """Add what is at a record's site: its value, if it is the loop's, and its squared norm."""
        if record.layer != LOOP:
            self._squares[f"{record.stage}_l2/{record.layer}"] += square
        elif record.stage == "loss":
            self._losses.append(value)
        else:
            self._loop.append((record.slot, value))

    def all(self) -> Scalars:
        losses = [("loss", sum(self._losses) / len(self._losses))] if self._losses else []
        return self._loop + losses + [(tag, math.sqrt(square)) for tag, square in self._squares.items()]


def _first_of(known: dict[str, Any] | None, first: dict[str, Any] | None) -> dict[str, Any] | None:
    """The first diff so far. What a tensor shows stands before what the runs only declare differently."""
    if known is None or (first is not None and not known.get("site") and first.get("site")):
        return first
    return known


def _place(first: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(first.get(key) for key in ("stage", "reference", "candidate", "slot"))
