"""Comparison of a training with a reference run while the training runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from padiff.compare import Policy, diagnose
from padiff.dump.store import AnyPath, shown
from padiff.errors import PadiffError, RunsDifferError
from padiff.model.given_map import GivenMap
from padiff.recorder import Recorder
from padiff.records import CANNOT_TELL, Both, Report, RunInfo, Standing, printable, verdict
from padiff.records.diagnostic import diagnostic_of, position_text
from padiff.records.diagnostic_text import diagnostic_text
from padiff.system.guard import Failure
from padiff.system.language import translated
from padiff.system.terminal import warn
from padiff_hooks.event_files import ScalarSink
from padiff_hooks.news import CAUSE_KNOWN
from padiff_hooks.paired import PairedRuns
from padiff_hooks.stream import DiffStream
from padiff_hooks.tags import LAYERS


class LiveComparison:
    """A comparison of a growing run with a reference, which is finished or grows at the same time.

    Steps are compared on the writer's thread as they are written; differences are reported on the loop's thread when
    a step ends. A reference that can't be read does not end the recording.

    Args:
        reference, candidate: the run folders.
        on_diff: ``warn``, ``stop`` or ``raise``.
        layer_map, policy: the arguments of `PairedRuns`.
        tags: which curves are streamed, see `DiffStream`.

    Attributes:
        first_report: the first report with a diff, or `None`.
    """

    def __init__(
        self,
        reference: AnyPath,
        candidate: AnyPath,
        on_diff: str,
        layer_map: GivenMap | None,
        policy: Policy | None,
        tags: str = LAYERS,
    ) -> None:
        self._reference, self._candidate, self._on_diff = reference, candidate, on_diff
        self._names = Both(shown(reference), shown(candidate))
        self._layer_map, self._policy, self._tags = layer_map, policy, tags
        self._logdir: str | Path | None = None
        self._host_sink: ScalarSink | None = None
        self._pairs: PairedRuns | None = None
        self._stream: DiffStream | None = None
        self._news: list[Report] = []
        self._remarks: list[str] = []
        self._lost: list[str] = []
        self._recordings: Both[str] | None = None
        self._trouble: Exception | None = None
        self._compared = self._following = 0
        self._worst, self._doubt = 0.0, ""
        self._warned = self._stops = False
        self.first_report: Report | None = None

    def start(self, compares: bool, logdir: str | Path | None, sink: ScalarSink | None) -> None:
        """Prepare for a training that begins.

        Args:
            compares: True if this process compares. Only one process of a distributed training does, because a step
                is complete only when all processes have written it.
            logdir: folder that diffs are streamed to.
            sink: logger of the host that gets the verdict.
        """
        self._logdir, self._host_sink, self._recordings = logdir, sink, None
        if compares:
            self._pairs = PairedRuns(
                self._reference, self._candidate, layer_map=self._layer_map, policy=self._policy, begin=self._begin
            )

    def check_settings(self, step: int, info: RunInfo) -> None:
        """Compare the settings of both runs before the first step, and report differences at once.

        With ``on_diff="stop"``, the training is stopped when the first step ends.

        Args:
            step: number of the first step.
            info: description of the candidate.

        Raises:
            RunsDifferError: the settings differ, and ``on_diff="raise"``.
        """
        if self._pairs is None:
            return
        try:
            report = self._pairs.before(step, info)
        except Exception as error:
            self._trouble = error
            return
        if report is not None:
            self._news.append(report)
            self._stops = self.say()

    @property
    def waits(self) -> bool:
        """Return True if each step waits for its comparison, so that the training can stop at the step that differs."""
        return self._pairs is not None and self._on_diff != "warn"

    def compare(self, recorder: Recorder | None = None) -> None:
        """Compare and stream the new steps that both runs have.

        Args:
            recorder: the candidate's recorder while it records; failed steps are marked in the recorder, so that it
                keeps the worst ones.
        """
        if self._pairs is None or self._trouble is not None:
            return
        try:
            for report in self._pairs.poll():
                self._add(report)
                self._remarks += map(printable, self._pairs.ranks)
                if recorder is not None and report.first_diff is not None and report.failed:
                    recorder.mark(report.coverage.steps[0], max(d.excess for d in report.failed))
            self._add_lost(self._pairs.lost())
        except Exception as error:  # curves and verdicts must not end the recording
            self._trouble = error

    def _add(self, report: Report) -> None:
        self._compared += 1
        stream = self._opened_stream()
        if stream is not None:
            stream.write(report)
        if report.explained is not None:
            self._remarks.append(f"{CAUSE_KNOWN}: {printable(report.explained.message)}")
            if self.first_report is not None and self.first_report.first_diff is not None:
                self.first_report = replace(self.first_report, first_diff=report.explained)
        first = report.first_diff
        if first is not None:
            self._news.append(report)
            self._following += first.standing is Standing.FOLLOWS
            if self.first_report is not None and diagnose.shows(report, self.first_report):
                self.first_report = report
                self._remarks.append(f"it shows now: {printable(position_text(first))}")
            if self.first_report is not None or len(self._news) > 1:
                # Further faults in the step of the first diff are part of its verdict; later ones are separate remarks.
                self._remarks += [f"{Standing.NEW}: {printable(fault.message)}" for fault in report.independent]
        elif report.outcome == CANNOT_TELL and not self._doubt:
            self._doubt = verdict(report)
            self._remarks.append(self._doubt)
        worst = report.worst
        if worst is not None and worst.figures is not None:
            self._worst = max(self._worst, worst.figures.rel_l2)

    def _add_lost(self, lines: list[str]) -> None:
        """Add remarks on steps that were recorded in part and can't be compared."""
        self._lost += map(printable, lines)
        self._remarks += self._lost[len(self._lost) - len(lines) :]

    def _begin(self, recordings: Both[str]) -> Collection[int]:
        """Start the comparison when both runs exist, or start it again when one of them was recorded again."""
        anew = self._recordings is not None
        self._recordings = recordings
        if anew:
            self._news.clear()
            self.first_report, self._compared, self._following = None, 0, 0
            self._worst, self._doubt = 0.0, ""
            self._lost.clear()
            self._remarks.append(f"{shown(self._reference)} was recorded again; comparing starts again")
        stream = self._opened_stream()
        if stream is not None:
            stream.begin(recordings)
            if stream.replaced and not anew:
                self._remarks.append(stream.replaced)
        return ()

    def _opened_stream(self) -> DiffStream | None:
        if self._stream is None and self._logdir is not None:
            names = Both(str(self._reference.resolve()), str(self._candidate.resolve()))
            self._stream = DiffStream(self._logdir, names, self._host_sink, self._tags)
        return self._stream

    def close(self) -> None:
        """Close the stream of diffs."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def release_in_fork(self) -> None:
        """Drop the comparison and the stream in a forked process, where they belong to the parent.

        They are not closed: that would wait for threads that do not exist in this process.
        """
        self._pairs = self._stream = None

    # -- on the loop's thread -------------------------------------------------------------------------------

    def say(self) -> bool:
        """Warn of new differences, or raise them if ``on_diff="raise"``; return True if the host has to stop.

        Raises:
            RunsDifferError: a diff was found and ``on_diff="raise"``.
        """
        if self._trouble is not None and not self._warned:
            self._warned = True
            is_padiff_error = isinstance(self._trouble, PadiffError)
            if self._on_diff == "raise" and is_padiff_error:
                raise self._trouble
            why = (
                self._trouble
                if is_padiff_error
                else f"an error of padiff's own, {Failure.from_error(self._trouble).text}"
            )
            warn(f"can't compare with the reference run, recording goes on: {why}")
        while self._remarks:
            warn(self._remarks.pop(0))
        if not self._news:
            stops, self._stops = self._stops, False
            return stops
        report = self._news[0]
        self._news.clear()
        first_time = self.first_report is None
        if self.first_report is None or not self.first_report.coverage.steps:
            self.first_report = report
        message = f"{translated('the runs differ')}\n{diagnostic_text(diagnostic_of(report, self._names))}"
        if self._on_diff == "raise":
            raise RunsDifferError(message, report)
        if first_time:
            warn(message, lines=True)
        return self._on_diff == "stop"

    def warn_of_nothing(self) -> None:
        """Warn if no step was compared in the whole training."""
        if self._pairs is not None and not self._compared and self._trouble is None:
            why = "has none of this run's steps" if self._pairs.started.reference else "was never there"
            warn(translated(f"compared nothing with the reference run {shown(self._reference)}: it {why}"))

    def summary(self) -> str:
        """Return the result of the comparison in a sentence; empty if nothing was compared."""
        if not self._compared or self._trouble is not None:
            return ""
        steps = f"compared {self._compared} step{'s' if self._compared > 1 else ''} with {shown(self._reference)}"
        first = self.first_report.first_diff if self.first_report is not None else None
        if first is not None:
            many = f"; {self._following} later step{'s' * (self._following > 1)}" if self._following else ""
            consequence = f"{many} follow{'s' * (self._following == 1)} from it" if many else ""
            return translated(f"{steps}: they differ, first at {printable(position_text(first))}{consequence}")
        lost = f"; {self._lost[-1]}" if self._lost else ""
        return translated(f"{steps}: {self._doubt or f'they match, largest relative L2 {self._worst:.2g}{lost}'}")
