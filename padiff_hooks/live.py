"""Comparing a training with a reference run while it goes on: compared as steps are written, said as steps end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from padiff.compare import Policy
from padiff.dump.local import shown
from padiff.dump.remote_path import AnyPath
from padiff.errors import PadiffError, RunsDifferError
from padiff.model.given_map import GivenMap
from padiff.recorder import Recorder
from padiff.records import CANNOT_TELL, Both, Report, RunInfo, Standing, printable, verdict
from padiff.system.guard import Failure
from padiff.system.warn import warn
from padiff_hooks.event_files import ScalarSink
from padiff_hooks.news import CAUSE_KNOWN
from padiff_hooks.paired import PairedRuns
from padiff_hooks.stream import DiffStream
from padiff_hooks.tags import LAYERS


class LiveComparison:
    """Compares what both runs have by now; the reference is recorded before, or grows beside the candidate.

    A reference that can't be read does not end the recording.

    Args:
        reference, candidate: the run folders.
        on_diff: ``warn``, ``stop`` or ``raise``.
        layer_map, policy: as `PairedRuns` takes them.
        tags: which curves are streamed, as `DiffStream` takes it.

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
        """A training begins.

        Args:
            compares: whether this process does it: only one looks at the pairs, a step is whole when all have written.
            logdir, sink: where diffs are streamed to, and the host's logger that gets the verdict.
        """
        self._logdir, self._host_sink, self._recordings = logdir, sink, None
        if compares:
            self._pairs = PairedRuns(
                self._reference, self._candidate, layer_map=self._layer_map, policy=self._policy, begin=self._begin
            )

    def look(self, step: int, info: RunInfo) -> None:
        """The candidate is there, and its first step is to come: is it set as the reference is? Says so at once; to
        stop is asked for when the first step ends.

        Args:
            info: what the candidate says of itself.

        Raises:
            RunsDifferError: it is not, and ``on_diff="raise"``.
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
        """Whether to wait for a step's comparison: to stop at that very step."""
        return self._pairs is not None and self._on_diff != "warn"

    def compare(self, recorder: Recorder | None = None) -> None:
        """Compare and stream what both runs have by now.

        Args:
            recorder: of the candidate, while it records: it keeps the worst steps.
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
        except Exception as error:  # a curve, a verdict: recording goes on
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
            if self.first_report is not None or len(self._news) > 1:
                # With the first diff they are reported; later ones are news by themselves.
                self._remarks += [f"{Standing.NEW}: {printable(one.message)}" for one in report.independent]
        elif report.outcome == CANNOT_TELL and not self._doubt:
            self._doubt = verdict(report)
            self._remarks.append(self._doubt)
        worst = report.worst
        if worst is not None and worst.figures is not None:
            self._worst = max(self._worst, worst.figures.rel_l2)

    def _add_lost(self, lines: list[str]) -> None:
        """What is not compared, though it was recorded in part."""
        self._lost += map(printable, lines)
        self._remarks += self._lost[len(self._lost) - len(lines) :]

    def _begin(self, recordings: Both[str]) -> Collection[int]:
        """Both runs are there, for the first time or with a reference that is another recording than before."""
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
        """Close what diffs are streamed to."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def leave(self) -> None:
        """In a fork: comparing and streaming is the parent's; closing would wait for threads that are not here."""
        self._pairs = self._stream = None

    # -- on the loop's thread -------------------------------------------------------------------------------

    def say(self) -> bool:
        """Warn of what is new, or raise it, as ``on_diff`` has it. Returns whether the host is asked to stop.

        Raises:
            RunsDifferError: a diff was found and ``on_diff="raise"``.
        """
        if self._trouble is not None and not self._warned:
            self._warned = True
            known = isinstance(self._trouble, PadiffError)
            if self._on_diff == "raise" and known:
                raise self._trouble
            why = self._trouble if known else f"an error of padiff's own, {Failure.from_error(self._trouble).text}"
            text = f"padiff can't compare with the reference run, recording goes on: {why}"
            warn(text)
        while self._remarks:
            warn(f"padiff: {self._remarks.pop(0)}")
        if not self._news:
            stops, self._stops = self._stops, False
            return stops
        report = self._news[0]
        self._news.clear()
        first_time = self.first_report is None
        if self.first_report is None or not self.first_report.coverage.steps:
            self.first_report = report
        message = verdict(report)
        if self._on_diff == "raise":
            raise RunsDifferError(message, report)
        if first_time:
            warn(f"padiff: {message}")
        return self._on_diff == "stop"

    def warn_of_nothing(self) -> None:
        """Warn where nothing was compared in all of the training."""
        if self._pairs is not None and not self._compared and self._trouble is None:
            why = "has none of this run's steps" if self._pairs.started.reference else "was never there"
            warn(f"padiff compared nothing with the reference run {shown(self._reference)}: it {why}")

    def summary(self) -> str:
        """What it came to; empty where there is nothing to sum up."""
        if not self._compared or self._trouble is not None:
            return ""
        steps = f"compared {self._compared} step{'s' if self._compared > 1 else ''} with {shown(self._reference)}"
        first = self.first_report.first_diff if self.first_report is not None else None
        if first is not None:
            many = f"; {self._following} later step{'s' * (self._following > 1)}" if self._following else ""
            rest = f"{many} follow{'s' * (self._following == 1)} from it" if many else ""
            where = f"step {first.step}, stage {first.stage}, layer {first.reference}"
            return f"{steps}: they differ, first at {where}{rest}"
        lost = f"; {self._lost[-1]}" if self._lost else ""
        return f"{steps}: {self._doubt or f'they match, largest relative L2 {self._worst:.2g}{lost}'}"
