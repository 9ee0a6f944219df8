"""Recording of a training loop that a host (Lightning, hapi, a Trainer) runs, for all callbacks.

A callback is a thin shell that calls a `TrainingRecorder` when a batch begins or ends and when the optimizer steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padiff.dump import open_run
from padiff.dump.prepare import missing_steps_lines
from padiff.dump.store import AnyPath, absolute, is_remote, run_folder
from padiff.errors import PadiffError
from padiff.model.tree import LiveModel
from padiff.recorder import Recorder, record
from padiff.records import FirstDiff, Report, Step
from padiff.replaying import ReplayBatch
from padiff.replaying.session import runs_of
from padiff.replaying.step_runner import change_as_asked
from padiff.system.guard import Failure, Guard, guarded
from padiff.system.terminal import say, warn
from padiff.weights.start import start
from padiff.weights.stored import open_stored
from padiff_hooks.event_files import ScalarSink
from padiff_hooks.live import LiveComparison
from padiff_hooks.options import TrainingOptions, check, lasting, make_folders_absolute, split_map
from padiff_hooks.own_curves import OwnCurves
from padiff_hooks.replaying import HostReplay
from padiff_hooks.tags import LAYERS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from padiff.recorder.tracer import Prelude


class TrainingRecorder:
    """A recorder of the steps that a host's loop trains, which also compares them with a reference run.

    Args:
        dir_path: the run folder to write.
        options: the options of `padiff_hooks.options.TrainingOptions`, which include those of `padiff.record`
            (`padiff.recorder.options.RunOptions`).

    Attributes:
        step: number of the current step.
        is_complete: True if the training stops because of ``stop_after``.
        guard: guard that keeps errors of padiff from the training.
    """

    def __init__(self, dir_path: str | AnyPath, **options: Unpack[TrainingOptions]) -> None:
        self.step = 0
        self._live: LiveComparison | None = None
        self._replay: HostReplay | None = None
        self._recorder: Recorder | None = None
        self._host_sink: ScalarSink | None = None
        self._own: OwnCurves | None = None
        self._resumes = False
        #: True in the one process of a training that prints messages.
        self._says = True
        self._has_failed = self._is_set_up = self.is_complete = False
        self._stop_after: int | None = None
        self._steps = 0
        raises = options.get("replay") is not None or options.get("on_error") == "raise"
        self.guard = Guard(self._failed, raises=raises)
        self._set_up(dir_path, options)

    @guarded(passing=(PadiffError,))
    def _set_up(self, dir_path: str | AnyPath, options: TrainingOptions) -> None:
        check(dir_path, options)
        make_folders_absolute(options)
        reference, on_diff = options.pop("reference", None), options.pop("on_diff", "warn")
        start_from, replay = options.pop("start_from", None), options.pop("replay", None)
        floors, float64 = runs_of(options.pop("floors", False)), options.pop("float64", False)
        self._logdir = options.pop("logdir", None)
        self._stop_after = options.pop("stop_after", None)
        self._tags = options.pop("tags", LAYERS)
        self._to_host = options.pop("log_to_host", True)
        self._dir_path = absolute(run_folder(dir_path, "dir_path"))
        followed = None if reference is None else run_folder(reference, "reference")
        paired = reference is not None or start_from is not None or replay is not None
        own_map, pair_map = split_map(options.pop("layer_map", None), paired)
        self._start_from, self._pair_map = start_from, pair_map
        policy = options.pop("policy", None)
        if followed is not None:
            self._live = LiveComparison(followed, self._dir_path, on_diff, pair_map, policy, self._tags)
        if replay is not None:
            existing = options.get("existing", "error")
            self._replay = HostReplay(
                replay, self._dir_path, pair_map, policy, existing, on_diff, floors, bool(float64)
            )
        self.step = options.get("start_step", 0)
        self._options = lasting(options)
        self._own_map = own_map
        self._is_set_up = True

    # -- called by the host's callbacks ---------------------------------------------------------------------

    @guarded(passing=(PadiffError,))
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
        settings: Mapping[str, Any] | None = None,
        logs_loss: bool = False,
        end: int | None = None,
        prelude: Prelude | None = None,
    ) -> None:
        """Start recording when the training begins; a recording that was not ended before is aborted.

        Args:
            model: the model.
            optimizers: its optimizers.
            resumed: True if the host continues an earlier training; the run folder is then resumed, too.
            rank, world_size: rank of this process and number of processes, if the host knows them.
            logdir, sink: log folder and logger of the host, used if the option ``logdir`` is not set.
            settings: settings of the training that the host knows (`padiff.records.declared`).
            logs_loss: True if the host logs the loss of each micro-batch; models may also return their loss.
            end: the step that the training ends before, if the host knows it.
            prelude: listener to what the loop has computed so far.

        Raises:
            RunsDifferError: the reference is set differently, and ``on_diff="raise"``.
        """
        if not self._is_set_up:
            return
        self.abort()
        self._has_failed = False
        self.guard.reset()
        if self._replay is not None:
            self._replay.start(model, optimizers, settings or {}, world_size)
            return
        if self._start_from is not None and not resumed:
            self._start_equal(self._start_from, model, optimizers, quiet=bool(rank))
        if not resumed:
            change_as_asked(model)
        options = self._options.copy()
        options["start_step"] = self.step
        if resumed and options.get("existing", "error") == "error":
            options["existing"] = "resume"
        recorder = record(
            model,
            self._dir_path,
            optimizer=list(optimizers) or None,
            layer_map=self._own_map,
            rank=rank,
            world_size=world_size,
            on_written=self._written,
            **options,
        )
        if self._logdir is None and logdir is not None:
            if is_remote(logdir):
                warn(
                    f"the logger's folder is remote ({logdir}), and padiff writes to local folders: give "
                    "logdir= to have scalars and diffs written"
                )
            else:
                self._logdir, self._host_sink = logdir, sink if self._to_host else None
        self._says = not rank
        if self._live is not None:
            self._live.start(not rank and not recorder.watched, self._logdir, self._host_sink)
        self._resumes = options.get("existing") == "resume"
        recorder.declare(settings or {})
        recorder.expect_end(end)
        if logs_loss:
            recorder.loss_is_logged()
        recorder.open()
        recorder.prelude = prelude
        self._recorder = recorder
        if self._live is not None:
            try:
                self._live.check_settings(self.step, recorder.info)
            except PadiffError:
                self.abort()
                raise

    def _start_equal(self, source: str | Path, model: Any, optimizers: Sequence[Any], quiet: bool) -> None:
        """Load the recorded state into the model, and into the optimizers if the run recorded their parameters' state.

        Optimizers for which only a learning rate was recorded are not changed: the rate is a setting to be compared.
        """
        stored = open_stored(source, beside=LiveModel.from_model(model).info)
        has_state = any(state.parameters for state in stored.optimizers or ())
        start(stored, model, optimizers if has_state else (), self._pair_map, quiet=quiet)

    @property
    def first_report(self) -> Report | None:
        """Return the first report with a diff, or `None`.

        A report with a diff is false in a condition: test `first_diff` instead.
        """
        if self._replay is not None:
            report = self._replay.report
            return report if report is not None and report.first_diff is not None else None
        return self._live.first_report if self._live is not None else None

    @property
    def first_diff(self) -> FirstDiff | None:
        """Return the first difference between this training and the reference; `None` if none was found so far."""
        return self.first_report.first_diff if self.first_report is not None else None

    @property
    @guarded(default=False)
    def due(self) -> bool:
        """Return True if the current step is recorded."""
        return self._recorder is not None and self._recorder.due

    @property
    def report(self) -> Report | None:
        """Return the report of a replay once the training is over; `None` without a replay."""
        return self._replay.report if self._replay is not None else None

    @guarded(passing=(PadiffError,))
    def begin_batch(self, batch: Any = None, inputs: Any = None, labels: Any = None) -> ReplayBatch | None:
        """Add the hooks when a batch begins, if its step is due.

        Args:
            batch: the whole batch, if the host does not separate inputs and labels.
            inputs, labels: arguments of the model, and further arguments of the loss, if the host separates them.

        Returns:
            The recorded batch to train on instead if a run is replayed, or else `None`.
        """
        if self._replay is not None:
            return self._replay.begin_batch()
        if self._recorder is None:
            return None
        self._recorder.attach()
        if batch is not None:
            self._recorder.give_batch(batch)
        elif inputs is not None:
            self._recorder.log_batch(inputs, labels)
        return None

    @guarded(passing=(PadiffError,))
    def log_loss(self, loss: Any) -> None:
        """Record the loss of the current batch, for a host that knows it before the batch ends."""
        if self._recorder is not None:
            self._recorder.log_loss(loss)

    @guarded(passing=(PadiffError,))
    def declare_division(self, name: str, loss: float, loss_scale: float) -> None:
        """Declare the whole number by which the loss was divided before backward, if the recorder can compute it.

        Args:
            name: name of the setting.
            loss: the undivided loss of the micro-batch.
            loss_scale: the factor of loss scaling.
        """
        began = self._recorder.backward_began_at if self._recorder is not None else None
        if self._recorder is None or not began or not math.isfinite(began) or not math.isfinite(loss):
            return
        divided = loss * loss_scale / began
        if divided >= 0.5 and abs(divided - round(divided)) < 1e-3 * divided:
            self._recorder.declare({name: round(divided)})

    @guarded(passing=(PadiffError,))
    def carried(self, micro_batches: int) -> None:
        """Note that the host begins the step again, with gradients left from a number of earlier micro-batches."""
        if self._recorder is not None:
            self._recorder.carried(micro_batches)

    @property
    def replayed_batches(self) -> Sequence[ReplayBatch]:
        """Return the micro-batches of the step that is replayed; empty without a replay."""
        return self._replay.batches if self._replay is not None else ()

    @guarded(passing=(PadiffError,))
    def end_batch(self, loss: Any = None, loss_scale: float = 1.0) -> None:
        """Record the loss of a batch that ended, with or without an optimizer step, and remove the hooks."""
        if self._replay is not None:
            self._replay.end_batch(loss_scale)
        if self._recorder is not None:
            if loss is not None:
                self._recorder.log_loss(loss)
            self._recorder.loss_scale = loss_scale
            self._recorder.detach()

    @guarded(default=False, passing=(PadiffError,))
    def end_step(self) -> bool:
        """End the current step after an optimizer step, and return True if the host has to stop.

        Raises:
            RunsDifferError: a diff was found and ``on_diff="raise"``.
            WriterError: a step could not be written.
        """
        if self._replay is not None:
            return self._replay.end_step()
        if self._recorder is None:
            return False
        try:
            was_due = self._recorder.end_step()
            self.step = self._recorder.step
            self._steps += 1
            self.is_complete = self._steps == self._stop_after
            if self._live is None:
                return self.is_complete
            if was_due and self._live.waits:
                self._recorder.flush()
            return self._live.say() or self.is_complete
        except PadiffError:
            # Not every host calls its callbacks after an exception.
            self.abort()
            raise

    @guarded(passing=(PadiffError,))
    def flush_steps(self) -> None:
        """Wait until all finished steps are written, compared and streamed."""
        if self._recorder is not None:
            self._recorder.flush()

    @guarded(passing=(PadiffError,))
    def finish(self) -> None:
        """Write and compare the remaining steps when the training ends, and remove all hooks."""
        if self._replay is not None:
            self._replay.end_training()
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        if recorder.forked:
            self._leave()
            return
        try:
            recorder.close(finished=True)
            if self._live is not None:
                self._live.compare()
                self._live.warn_of_nothing()
                self._live.say()
                summary = self._live.summary()
                if summary:
                    say(summary, alarming=self._live.first_report is not None)
            elif recorder.info.world_size > 1 and self._says:
                with contextlib.suppress(PadiffError):  # no step was written
                    for line in missing_steps_lines(open_run(self._dir_path), str(self._dir_path)):
                        say(line, alarming=True)
        finally:
            self._close_streams()

    @guarded(passing=(PadiffError,))
    def abort(self) -> None:
        """Remove all hooks after an exception in the training; steps that are written stay."""
        if self._replay is not None:
            self._replay.abort()
        recorder, self._recorder = self._recorder, None
        if recorder is not None and recorder.forked:
            self._leave()
        elif recorder is not None:
            try:
                recorder.close(finished=False, raise_errors=False)
            finally:
                self._close_streams()

    @guarded(passing=(PadiffError,))
    def remove_hooks(self) -> None:
        """Remove the hooks, for a host that left a batch by an exception."""
        if self._replay is not None:
            self._replay.remove_hooks()
        if self._recorder is not None:
            self._recorder.detach()

    def _written(self, step: Step) -> None:
        """Compare or draw a step that was written; runs on the writer's thread."""
        if self._live is not None:
            self._live.compare(self._recorder)
        elif self._logdir is not None:
            try:
                if self._own is None:
                    folder = Path(self._logdir) / (self._options.get("name") or self._dir_path.name)
                    self._own = OwnCurves(folder, self._tags, self._host_sink, self._resumes)
                self._own.write(step)
            except Exception as error:
                if self._options.get("on_error") == "raise":
                    raise
                say(f"no more curves go to {self._logdir}: {Failure.from_error(error).text}", alarming=True)
                self._logdir = None

    def _failed(self, failure: Failure) -> None:
        """Stop recording after an error of padiff's own."""
        if self._has_failed:
            return
        self._has_failed = True
        say(f"Recording stops: an error of padiff's own, {failure.text}. The training goes on", alarming=True)
        self.abort()

    def _leave(self) -> None:
        """Drop the open streams in a forked process, where they belong to the parent."""
        self._own = None
        if self._live is not None:
            self._live.release_in_fork()

    def _close_streams(self) -> None:
        curves, self._own = self._own, None
        for stream in (self._live, curves):
            if stream is not None:
                stream.close()
