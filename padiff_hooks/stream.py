"""Streaming of diffs to TensorBoard and to ``diffs.jsonl``, with neither torch nor tensorflow.

The log folder has three TensorBoard runs. ``reference`` and ``candidate`` hold the loss and the learning rate of each
run under the same tags, so that TensorBoard draws both curves in one chart. ``diff`` holds the verdict and a curve for
each layer (`tags`).

``diffs.jsonl`` has a line for each compared step (`step_lines`) and is the source of truth. A restart continues after
the last line if the two run folders still hold the recordings that the first line names.

``report.json`` is the report so far in the form of `to_json`, without its steps; the page shows it beside the steps.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from padiff.dump.medium import write_json
from padiff.dump.store import absolute, local_folder
from padiff.errors import UsageError
from padiff.records import CANNOT_TELL, DIFFER, MATCH, SIDES, Both, Report, Standing
from padiff.records.declared import OF_LAYERS
from padiff.report_formats import page_words, to_json
from padiff_hooks.event_files import EventFile, ScalarSink
from padiff_hooks.heat_picture import HeatPicture, place_of
from padiff_hooks.news import News
from padiff_hooks.scalars import Tagging
from padiff_hooks.step_lines import StepLines, damage_named, parsed
from padiff_hooks.tags import FIRST_DIFF, LAYERS, PICTURE, check_tags

DIFFS_FILE = "diffs.jsonl"
REPORT_FILE = "report.json"
#: File for the lines of earlier recordings.
BEFORE_FILE = "diffs.before.jsonl"
SCHEMA_VERSION = 1

# Identities of recordings without an identity, which can't be distinguished.
_NAMELESS = Both("", "")


class DiffStream:
    """A writer of one report per step to TensorBoard and ``diffs.jsonl``.

    `begin` sets the recordings of the reports. A log of earlier recordings in the same run folders is renamed.

    Args:
        logdir: the log folder, created if necessary.
        names: names that identify the two runs; a log folder of other runs is refused.
        host: a logger (of a Trainer) that gets the verdict's tags, ten at most, instead of the run ``diff``.
        tags: which curves are written: ``"layers"``, one for each layer and stage; ``"worst"``, the ten worst layers of
            each stage; ``"all"``, norms of each run and maxima too.

    Attributes:
        done: the steps that were written, by this process or an earlier one.
        differs: True if a step had a diff.
        doubtful: True if the outcome of a step is ``cannot tell``.
        replaced: sentence on the log that `begin` renamed, and the reason; empty if none.

    Raises:
        UsageError: the log folder holds the diffs of other runs, ``diffs.jsonl`` is damaged, or ``tags`` is unknown.
    """

    def __init__(
        self, logdir: str | Path, names: Both[str], host: ScalarSink | None = None, tags: str = LAYERS
    ) -> None:
        self.path = absolute(local_folder(logdir, "logdir"))
        self._names, self._host, self._tags = names, host, check_tags(tags)
        self._sinks: dict[str, ScalarSink] = {}
        self._file: BinaryIO | None = None
        self._open = contextlib.ExitStack()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the log folder {self.path}: {error}") from error
        self._recordings: Both[str] | None = None
        self._older = False
        self.replaced = ""
        self._forget_steps()
        self._read()

    def _forget_steps(self) -> None:
        self._first: dict[str, Any] | None = None
        #: The first diff that the diagnostic is about, and the diagnostic.
        self._diagnosed: dict[str, Any] | None = None
        self._diagnostic: dict[str, Any] | None = None
        self._written_so_far: Any = None
        self._news = News()
        self._lines = StepLines()
        self._tagging = Tagging(self._tags)
        self._picture = HeatPicture(self._tagging.numbered)
        self._drawn: int | None = None
        self.done: set[int] = set()
        self.differs = self.doubtful = False

    @property
    def outcome(self) -> str:
        """Return the outcome of all steps, with the values of `padiff.Report.outcome`."""
        return DIFFER if self.differs else CANNOT_TELL if self.doubtful else MATCH

    def begin(self, recordings: Both[str] = _NAMELESS) -> Collection[int]:
        """Continue the log of two recordings, or start a new log if the present one is of other recordings.

        Args:
            recordings: identities of the recordings; empty for recordings without an identity, which can't be
                distinguished.

        Returns:
            The steps that are written already.
        """
        self.replaced = ""
        if self._file is not None and recordings == self._recordings:
            return self.done
        self.close()
        if self._recordings is not None and recordings != self._recordings:
            self._put_aside(recordings)
        self._recordings = recordings
        first = max(self.done, default=-1) + 1
        with contextlib.ExitStack() as begun:  # closes the threads of a partly opened stream if the disk is full
            begun.callback(self._forget)
            for run in ("reference", "candidate", "diff"):
                event_file = EventFile(self.path / run, first, self._older)
                self._sinks[run] = begun.enter_context(contextlib.closing(event_file))
            self._sinks["verdict"] = self._host or self._sinks["diff"]
            self._file = begun.enter_context(open(self.path / DIFFS_FILE, "ab"))
            begun.callback(self._draw)  # callbacks run in reverse order: draw before the files are closed
            if self._file.tell() == 0:
                names = dict(SIDES.zip(self._names))
                self._write_line({"schema_version": SCHEMA_VERSION, **names, "recordings": list(recordings)})
            self._open = begun.pop_all()
        return self.done

    def write(self, report: Report) -> None:
        """Write one step's report: the points, the text on new faults, and last the line of ``diffs.jsonl``."""
        if self._file is None:
            self.begin()
        step = report.coverage.steps[0]
        if step in self.done:
            return
        scalars_of_step = self._tagging.scalars_of(report)
        to = {
            **dict(SIDES.zip(scalars_of_step.own)),
            "diff": scalars_of_step.layers,
            "verdict": scalars_of_step.verdict,
        }
        for run, scalars in to.items():
            for tag, value in scalars:
                self._sinks[run].scalar(tag, value, step)
        text = self._news.markdown(report, self.differs)
        if text:
            self._sinks["verdict"].add_text(FIRST_DIFF, text, step)
        parted = self.differs
        report_json = to_json(report)
        line = self._lines.line(report, report_json)
        if self._news.first_text and not parted:
            line["text"] = self._news.first_text
        if scalars_of_step.curves:
            line["curves"] = scalars_of_step.curves
        self._add(line)
        # Draw rarely, when the number of steps is a power of two: TensorBoard keeps ten pictures of a tag.
        if len(self.done).bit_count() == 1 or self.differs != parted:
            self._draw()
        for sink in self._sinks.values():
            sink.write_out()
        self._write_report(report_json, step)
        # The line comes last: it certifies that the step's points are written.
        self._write_line(_following(line) if parted else line)

    def _add(self, line: Mapping[str, Any]) -> None:
        """Add a line, new or from the file, to the first diff, the picture and the outcome."""
        step, first = int(line["step"]), line.get("first_diff")
        self._first = _first_of(self._first, first)
        self._picture.add(step, self._lines.rows(line), self._lines.sites)
        shown = self._first if self._first is not None and self._first.get("site") else None
        if shown is not None:
            self._picture.first = _place_of(shown)
        self.done.add(step)
        # Lines of an older padiff have no "outcome".
        outcome = line.get("outcome", DIFFER if line.get("passed") is False else MATCH)
        self.differs = self.differs or outcome == DIFFER
        self.doubtful = self.doubtful or outcome == CANNOT_TELL

    def _draw(self) -> None:
        """Draw the heat map of all steps so far, unless the latest step is drawn already."""
        step = max(self.done, default=None)
        if step is None or step == self._drawn or "verdict" not in self._sinks:
            return
        pixels = self._picture.draw()
        if pixels is not None:
            self._sinks["verdict"].image(PICTURE, pixels, step)
        self._drawn = step

    def close(self) -> None:
        """Close the event files and ``diffs.jsonl``; the host's logger stays open."""
        self._open.close()

    def _forget(self) -> None:
        self._sinks.clear()
        self._file = None

    def _write_report(self, report_json: dict[str, Any], step: int) -> None:
        """Write the report so far if more than its coverage has changed."""
        so_far = {key: value for key, value in report_json.items() if key != "steps"}
        so_far |= {"passed": self.outcome == MATCH, "outcome": self.outcome, "first_diff": self._first}
        of_this_step = {key: so_far.pop(key) for key in ("verdict", "diagnostic")}
        if self._first is not None:
            so_far["verdict"] = self._first["message"]
            if self._diagnosed is not self._first:
                self._diagnosed, self._diagnostic = self._first, of_this_step["diagnostic"]
            so_far["diagnostic"] = self._diagnostic
        so_far |= {"words": words} if (words := page_words(so_far)) else {}
        # Coverage describes one step: a change in the number of pairs is no reason to write.
        now = {key: value for key, value in so_far.items() if key != "coverage"}
        if now != self._written_so_far:
            self._written_so_far = now
            write_json(self.path / REPORT_FILE, {**so_far, "step": step})

    def _write_line(self, content: Mapping[str, Any]) -> None:
        if self._file is not None:
            text = json.dumps(content, separators=(",", ":")).encode() + b"\n"
            self._file.write(text)
            self._file.flush()
            self._lines.size += len(text)

    def _read(self) -> None:
        """Read the existing lines, and remove an incomplete last line from the file."""
        path, complete, head = self.path / DIFFS_FILE, 0, None
        if not path.exists():
            return
        with open(path, "rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break
                line, complete = parsed(text, path, number), complete + len(text)
                if head is None:
                    head = line
                    self._read_head(line, path)
                with damage_named(path, number):
                    self._lines.learn(line, len(text))
                    if "step" in line:
                        self._learn(line)
        if complete != path.stat().st_size:
            os.truncate(path, complete)

    def _read_head(self, head: Mapping[str, Any], path: Path) -> None:
        names = SIDES.map(head.get)
        if names != self._names:
            raise UsageError(
                f"{path} holds the diffs of {' and '.join(map(str, names))}, not of {' and '.join(self._names)}: "
                "give another log folder"
            )
        noted = head.get("recordings")
        self._older = noted is None
        self._recordings = Both(*map(str, noted)) if isinstance(noted, list) and len(noted) == 2 else _NAMELESS

    def _learn(self, line: Mapping[str, Any]) -> None:
        """Restore the state from a step that an earlier process wrote."""
        rows, sites = self._lines.rows(line), self._lines.sites
        self._tagging.learn([place_of(sites[number]) for number in rows.sites.tolist()], rows, line.get("curves", {}))
        self._news.learn(line)
        self._add(line)

    def _put_aside(self, recordings: Both[str]) -> None:
        """Rename ``diffs.jsonl``, and forget its steps; `EventFile` then drops all points that padiff wrote."""
        before = self._recordings or recordings
        (self.path / REPORT_FILE).unlink(missing_ok=True)
        os.replace(self.path / DIFFS_FILE, self.path / BEFORE_FILE)
        if self.done:
            others = [name for name, was, now in zip(self._names, before, recordings) if was != now]
            self.replaced = (
                f"{' and '.join(others)} {'were' if len(others) > 1 else 'was'} recorded anew: the log folder "
                f"{self.path} begins anew; its old lines are in {BEFORE_FILE}"
            )
        self._forget_steps()


def _following(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a step after the first diff, with its standing ``first`` changed to ``follows``.

    A restarted process has not seen the first diff, so its comparison takes a later one for the first.
    """
    first, follows = Standing.FIRST.name.lower(), Standing.FOLLOWS.name.lower()
    first_diff = line["first_diff"]
    if first_diff is not None and first_diff.get("standing") == first:
        line["first_diff"] = {**first_diff, "standing": follows, "picture": None}
    line["diffs"] = [{**diff, "standing": follows} if diff.get("standing") == first else diff for diff in line["diffs"]]
    return line


def _first_of(earlier: dict[str, Any] | None, first: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the earlier of two first diffs; the first tensor that shows a layer's setting replaces the setting."""
    if earlier is None or first is None or earlier.get("site") or not first.get("site"):
        return first if earlier is None else earlier
    same = (first.get("reference"), first.get("candidate")) == (earlier.get("reference"), earlier.get("candidate"))
    return first if same and (earlier.get("why") or {}).get("kind") in OF_LAYERS else earlier


def _place_of(first: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return the stage, layer and step of a first diff that a tensor shows."""
    site = (first["stage"], first["site"].get("reference"), first["site"].get("candidate"))
    return (*place_of(site), int(first["step"]))
