"""Recording a training loop that a host (Lightning, hapi) runs: what all callbacks share.

A callback is a shell: it tells a `TrainingRecorder` when a batch begins and ends and when the optimizer stepped.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from padiff.compare import Policy
from padiff.dump.local import is_remote, local_folder
from padiff.errors import PadiffError, RunsDifferError, UsageError
from padiff.model.given_map import GivenMap
from padiff.recorder import Recorder
from padiff.recorder.detail import Detail
from padiff.recorder.schedule import Schedule
from padiff.records import CANNOT_TELL, Both, FirstDiff, Report, Step, verdict
from padiff.system.switches import say
from padiff_hooks.event_files import EventFile, ScalarSink
from padiff_hooks.paired import PairedRuns
from padiff_hooks.stream import DiffStream, own_scalars_of

ON_DIFF = ("warn", "stop", "raise")


class TrainingRecorder:
    """Records the steps of a training that somebody else's loop runs, and compares them with a reference run.

    Args:
        dir_path: the run folder to write.
        every_n_steps: which steps are due: a number or a `Schedule`.
        detail, full_every_n_steps: how much is kept of each tensor, and in which due steps all; see `padiff.record`.
        pack, compression, max_bytes: how it is stored, and how large the folder may become; see there.
        white_list, black_list: which layers to record; see `padiff.model.selection.select`.
        layer_map: without a reference, layers of this model that answer, in order, to those of the other run's map;
            with one, also pairs of paths (reference, candidate), a mapping, or a YAML file.
        reference: a run folder, recorded before or growing beside this one, to compare with while training.
        on_diff: what a diff does: ``warn`` once, ``stop`` the training, or ``raise`` `RunsDifferError`.
        logdir: where scalars and first-diff events go (without a reference: this run's own loss and norms).
            Default: nowhere, or the host's TensorBoard logger.
        policy: when a diff passes. Default: `padiff.NoisePolicy`.
        existing: what to do with a run that the folder holds already: ``error``, ``resume``, ``overwrite``.
        on_error: what a writing error does: ``raise``, or ``warn`` and go on without recording.

    Attributes:
        step: number of the step under way.
        first_report: the first report with a diff, or `None`. It is not true in a condition: it has a diff.
    """

    def __init__(
        self,
        dir_path: str | Path,
        *,
        every_n_steps: int | Schedule = 1,
        detail: Any = "full",
        full_every_n_steps: int | Schedule | None = None,
        pack: bool | None = None,
        compression: str = "",
        max_bytes: int | None = None,
        white_list: Iterable[Any] | None = None,
        black_list: Iterable[Any] | None = None,
        layer_map: Any = None,
        reference: str | Path | None = None,
        on_diff: str = "warn",
        logdir: str | Path | None = None,
        policy: Policy | None = None,
        name: str = "",
        start_step: int = 0,
        existing: str = "error",
        on_error: str = "raise",
    ) -> None:
        if on_diff not in ON_DIFF:
            raise UsageError(f"on_diff is one of {', '.join(ON_DIFF)}, got {on_diff!r}")
        for what, path in (("dir_path", dir_path), ("reference", reference), ("logdir", logdir)):
            if path is not None or what == "dir_path":
                local_folder(path, what)
        if reference is None and on_diff != "warn":
            raise UsageError(f"on_diff={on_diff!r} needs a reference run to differ from: give reference='runs/...'")
        if reference is not None and Path(reference).resolve() == Path(dir_path).resolve():
            raise UsageError(f"the reference is this run's own folder, {dir_path}: a run can't be compared with itself")
        self._dir_path = Path(dir_path)
        self._schedule = Schedule.of(every_n_steps)
        self._lists: dict[str, Any] = {
            "white_list": None if white_list is None else list(white_list),
            "black_list": None if black_list is None else list(black_list),
        }
        self._kept: dict[str, Any] = {
            "detail": Detail.of(detail, full_every_n_steps),
            "pack": pack,
            "compression": compression,
            "max_bytes": max_bytes,
        }
        self._own_map, self._pair_map = _split_map(layer_map, reference is not None)
        self._reference = Path(reference) if reference is not None else None
        self._on_diff = on_diff
        self._logdir = logdir
        self._policy = policy
        self._name = name
        self._existing = existing
        self._on_error = on_error
        self._recorder: Recorder | None = None
        self._pairs: PairedRuns | None = None
        self._stream: DiffStream | None = None
        self._host_sink: ScalarSink | None = None
        self._own_sink: ScalarSink | None = None
        self._news: list[Report] = []
        self._remarks: list[str] = []
        self._recordings: Both[str] | None = None
        self._resumes = False
        self._trouble: PadiffError | None = None
        self._compared = 0
        self._worst, self._doubt = 0.0, ""
        self._warned = False
        self.first_report: Report | None = None
        self.step = start_step

    # -- called by the host's callbacks ---------------------------------------------------------------------

    def start(
        self,
        model: Any,
        optimizers: Sequence[Any],
        *,
        resumed: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        logdir: str | Path | None = None,
        sink: ScalarSink | None = None,
    ) -> None:
        """Training begins: make the run folder. What an earlier one that was not ended left is ended before.

        Args:
            resumed: the host goes on with an earlier training; the folder is then resumed too.
            logdir, sink: the host's own log folder and logger, used where no logdir was given.
        """
        self.abort()
        existing = "resume" if resumed and self._existing == "error" else self._existing
        recorder = Recorder(
            model,
            self._dir_path,
            every_n_steps=self._schedule,
            optimizer=list(optimizers) or None,
            layer_map=self._own_map,
            name=self._name,
            start_step=self.step,
            existing=existing,
            on_error=self._on_error,
            rank=rank,
            world_size=world_size,
            on_written=self._written,
            **self._lists,
            **self._kept,
        )
        if self._logdir is None and logdir is not None:
            if is_remote(logdir):
                warnings.warn(
                    f"padiff: the logger's folder is remote ({logdir}), and padiff writes to local folders: give "
                    "logdir= to have scalars and diffs written",
                    RuntimeWarning,
                    stacklevel=3,
                )
            else:
                self._logdir, self._host_sink = logdir, sink
        # Only one process looks at the pairs; a step is whole when all have written.
        if self._reference is not None and not rank and not recorder.watched:
            self._pairs = PairedRuns(
                self._reference, self._dir_path, layer_map=self._pair_map, policy=self._policy, begin=self._begin
            )
        self._recordings, self._resumes = None, existing == "resume"
        recorder.open()
        self._recorder = recorder

    @property
    def first_diff(self) -> FirstDiff | None:
        """Where this training and the reference first part, as far as they were compared; `None` if nowhere."""
        return self.first_report.first_diff if self.first_report is not None else None

    @property
    def due(self) -> bool:
        """Whether the step under way is recorded."""
        return self._recorder is not None and self._recorder.due

    def begin_batch(self) -> None:
        """A batch begins: hooks on, if its step is due."""
        if self._recorder is not None:
            self._recorder.attach()

    def end_batch(self, loss: Any = None, loss_scale: float = 1.0) -> None:
        """A batch ended, with or without an optimizer step: hooks off."""
        if self._recorder is not None:
            if loss is not None:
                self._recorder.log_loss(loss)
            self._recorder.loss_scale = loss_scale
            self._recorder.detach()

    def end_step(self) -> bool:
        """The optimizer stepped. Returns whether the host is asked to stop.

        Raises:
            RunsDifferError: a diff was found and ``on_diff="raise"``.
            WriterError: a step could not be written.
        """
        if self._recorder is None:
            return False
        try:
            was_due = self._recorder.end_step()
            self.step = self._recorder.step
            if was_due and self._pairs is not None and self._on_diff != "warn":
                # To stop at the very step, its comparison has to be waited for.
                self._recorder.flush()
            return self._tell()
        except PadiffError:
            # Not every host tells its callbacks of an exception.
            self.abort()
            raise

    def finish(self) -> None:
        """Training ended: write and compare what is left, take everything off."""
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        if recorder.forked:
            self._leave()
            return
        try:
            recorder.close(finished=True)
            self._compare()
            if self._pairs is not None and not self._compared and self._trouble is None:
                warnings.warn(
                    f"padiff compared nothing with the reference run {self._reference}: it "
                    + ("has none of this run's steps" if self._pairs.started.reference else "was never there"),
                    RuntimeWarning,
                    stacklevel=3,
                )
            self._tell()
            if self._compared and self._trouble is None:
                say(self._summary())
        finally:
            self._close_stream()

    def _summary(self) -> str:
        """What the live comparison came to."""
        steps = f"compared {self._compared} step{'s' if self._compared > 1 else ''} with {self._reference}"
        first = self.first_diff
        if first is not None:
            return f"{steps}: they differ, first at step {first.step}, stage {first.stage}, layer {first.reference}"
        return f"{steps}: {self._doubt or f'they match, largest relative L2 {self._worst:.2g}'}"

    def abort(self) -> None:
        """Training ended by an exception: take everything off, keep what is written."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None and recorder.forked:
            self._leave()
        elif recorder is not None:
            try:
                recorder.close(finished=False, raise_errors=False)
            finally:
                self._close_stream()

    def detach(self) -> None:
        """Take the hooks off; for a host that left a batch by an exception."""
        if self._recorder is not None:
            self._recorder.detach()

    # -- comparing, on the writer's thread ------------------------------------------------------------------

    def _written(self, step: Step) -> None:
        if self._pairs is not None:
            self._compare()
        elif self._reference is None and self._logdir is not None:
            if self._own_sink is None:
                folder = Path(self._logdir) / (self._name or self._dir_path.name)
                # Only a resume has points that go on being true.
                self._own_sink = self._host_sink or EventFile(folder, step.number if self._resumes else 0)
            for tag, value in own_scalars_of(step):
                self._own_sink.scalar(tag, value, step.number)
            self._own_sink.flush()

    def _compare(self) -> None:
        """Compare and stream what both runs have by now. A reference that can't be read does not end the recording."""
        if self._pairs is None or self._trouble is not None:
            return
        try:
            for report in self._pairs.poll():
                self._compared += 1
                stream = self._opened_stream()
                if stream is not None:
                    stream.write(report)
                if report.first_diff is not None:
                    self._news.append(report)
                    if self._recorder is not None and report.failed:
                        self._recorder.mark(report.coverage.steps[0], max(d.excess for d in report.failed))
                elif report.outcome == CANNOT_TELL and not self._doubt:
                    self._doubt = verdict(report)
                    self._remarks.append(self._doubt)
                worst = report.worst
                if worst is not None and worst.figures is not None:
                    self._worst = max(self._worst, worst.figures.rel_l2)
        except PadiffError as error:
            self._trouble = error

    def _begin(self, recordings: Both[str]) -> Collection[int]:
        """Both runs are there, for the first time or with a reference that is another recording than before."""
        anew = self._recordings is not None
        self._recordings = recordings
        if anew:
            self._news.clear()
            self.first_report, self._compared = None, 0
            self._worst, self._doubt = 0.0, ""
            self._remarks.append(f"{self._reference} was recorded anew meanwhile: comparing with it starts over")
        stream = self._opened_stream()
        if stream is not None:
            stream.begin(recordings)
            if stream.replaced and not anew:
                self._remarks.append(stream.replaced)
        return ()

    def _opened_stream(self) -> DiffStream | None:
        if self._stream is None and self._logdir is not None and self._reference is not None:
            names = Both(str(self._reference.resolve()), str(self._dir_path.resolve()))
            self._stream = DiffStream(self._logdir, names, self._host_sink)
        return self._stream

    def _leave(self) -> None:
        """In a fork: comparing and streaming is the parent's; closing would wait for threads that are not here."""
        self._pairs = self._stream = self._own_sink = None

    def _close_stream(self) -> None:
        for stream in (self._stream, self._own_sink):
            if stream is not None:
                stream.close()
        self._stream = self._own_sink = None

    # -- telling, on the loop's thread ----------------------------------------------------------------------

    def _tell(self) -> bool:
        if self._trouble is not None and not self._warned:
            self._warned = True
            if self._on_diff == "raise":
                raise self._trouble
            text = f"padiff can't compare with the reference run, recording goes on: {self._trouble}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        while self._remarks:
            warnings.warn(f"padiff: {self._remarks.pop(0)}", RuntimeWarning, stacklevel=4)
        if not self._news:
            return False
        report = self._news[0]
        self._news.clear()
        first_time = self.first_report is None
        if self.first_report is None:
            self.first_report = report
        message = report.first_diff.message if report.first_diff is not None else ""
        if self._on_diff == "raise":
            raise RunsDifferError(message, report)
        if first_time:
            warnings.warn(f"padiff: {message}", RuntimeWarning, stacklevel=4)
        return self._on_diff == "stop"


def _split_map(layer_map: Any, paired: bool) -> tuple[list[Any] | None, GivenMap | None]:
    """Tell a list of this model's own layers from pairs of layers of two runs."""
    if layer_map is None:
        return None, None
    pairs = isinstance(layer_map, (Mapping, GivenMap, str, Path)) or (
        bool(layer_map) and all(isinstance(item, (tuple, list, Mapping)) and len(item) == 2 for item in layer_map)
    )
    if not pairs:
        return list(layer_map), None
    if not paired:
        raise UsageError(
            "layer_map: pairs of layers answer to each other when two runs are compared; without `reference` give a "
            "list of this model's own layers, or give the pairs to the comparison"
        )
    return None, GivenMap.of(layer_map)
