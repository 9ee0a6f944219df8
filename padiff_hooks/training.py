"""Recording a training loop that a host (Lightning, hapi, a Trainer) runs: what all callbacks share.

A callback is a shell: it tells a `TrainingRecorder` when a batch begins and ends and when the optimizer stepped.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padiff.dump import open_run
from padiff.dump.local import absolute, is_remote, run_folder
from padiff.dump.lost import lost_lines
from padiff.dump.remote_path import AnyPath
from padiff.errors import PadiffError
from padiff.model.live_model import LiveModel
from padiff.recorder import Recorder, record
from padiff.records import FirstDiff, Report, Step
from padiff.replaying import ReplayBatch
from padiff.replaying.replay_function import runs_of
from padiff.system.guard import Failure, Guard, guarded
from padiff.system.switches import say
from padiff.system.warn import warn
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


class TrainingRecorder:
    """Records the steps of a training that somebody else's loop runs, and compares them with a reference run.

    Args:
        dir_path: the run folder to write.
        options: each is described in `padiff_hooks.options.TrainingOptions` and, what `padiff.record` takes too, in
            `padiff.recorder.options.RunOptions`.

    Attributes:
        step: number of the step under way.
    """

    def __init__(self, dir_path: str | AnyPath, **options: Unpack[TrainingOptions]) -> None:
        check(dir_path, options)
        make_folders_absolute(options)
        reference, on_diff = options.pop("reference", None), options.pop("on_diff", "warn")
        start_from, replay = options.pop("start_from", None), options.pop("replay", None)
        floors, float64 = runs_of(options.pop("floors", False)), options.pop("float64", False)
        self._logdir = options.pop("logdir", None)
        self._tags = options.pop("tags", LAYERS)
        self._to_host = options.pop("log_to_host", True)
        self._dir_path = absolute(run_folder(dir_path, "dir_path"))
        followed = None if reference is None else run_folder(reference, "reference")
        paired = reference is not None or start_from is not None or replay is not None
        own_map, pair_map = split_map(options.pop("layer_map", None), paired)
        self._start_from, self._pair_map = start_from, pair_map
        policy = options.pop("policy", None)
        self._live: LiveComparison | None = None
        if followed is not None:
            self._live = LiveComparison(followed, self._dir_path, on_diff, pair_map, policy, self._tags)
        self._replay: HostReplay | None = None
        if replay is not None:
            existing = options.get("existing", "error")
            self._replay = HostReplay(
                replay, self._dir_path, pair_map, policy, existing, on_diff, floors, bool(float64)
            )
        self.step = options.get("start_step", 0)
        self._options = lasting(options)
        self._own_map = own_map
        self._recorder: Recorder | None = None
        self._host_sink: ScalarSink | None = None
        self._own: OwnCurves | None = None
        self._resumes = False
        #: Whether this process speaks for all of a training's.
        self._says = True
        self._has_failed = False
        self.guard = Guard(self._failed, raises=replay is not None or options.get("on_error") == "raise")

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
    ) -> None:
        """Training begins: make the run folder. What an earlier one that was not ended left is ended before.

        Args:
            resumed: the host goes on with an earlier training; the folder is then resumed too.
            logdir, sink: the host's own log folder and logger, used where no logdir was given.
            settings: what the host knows that the training is set to (`padiff.records.settings`).
            logs_loss: whether the host logs each micro-batch's loss, and models may give theirs as an output.
            end: the step that the training ends before, where the host knows it.

        Raises:
            RunsDifferError: the reference is set differently, and ``on_diff="raise"``.
        """
        self.abort()
        self._has_failed = False
        self.guard.reset()
        if self._replay is not None:
            self._replay.start(model, optimizers, settings or {}, world_size)
            return
        if self._start_from is not None and not resumed:
            self._start_equal(self._start_from, model, optimizers, quiet=bool(rank))
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
                    f"padiff: the logger's folder is remote ({logdir}), and padiff writes to local folders: give "
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
        self._recorder = recorder
        if self._live is not None:
            try:
                self._live.look(self.step, recorder.info)
            except PadiffError:
                self.abort()
                raise

    def _start_equal(self, source: str | Path, model: Any, optimizers: Sequence[Any], quiet: bool) -> None:
        """Put the model where a recorded run was, and the optimizers where they held something by then.

        A learning rate alone is left as it is: it is what the training is set to, and is compared.
        """
        stored = open_stored(source, beside=LiveModel.of(model).info)
        held = any(state.parameters for state in stored.optimizers or ())
        start(stored, model, optimizers if held else (), self._pair_map, quiet=quiet)

    @property
    def first_report(self) -> Report | None:
        """The first report with a diff, or `None`. It is not true in a condition: it has a diff."""
        if self._replay is not None:
            report = self._replay.report
            return report if report is not None and report.first_diff is not None else None
        return self._live.first_report if self._live is not None else None

    @property
    def first_diff(self) -> FirstDiff | None:
        """Where this training and the reference first part, as far as they were compared; `None` if nowhere."""
        return self.first_report.first_diff if self.first_report is not None else None

    @property
    @guarded(default=False)
    def due(self) -> bool:
        """Whether the step under way is recorded."""
        return self._recorder is not None and self._recorder.due

    @property
    def report(self) -> Report | None:
        """What a replay came to, once it is over; `None` where there was none."""
        return self._replay.report if self._replay is not None else None

    @guarded(passing=(PadiffError,))
    def begin_batch(self, batch: Any = None, inputs: Any = None, labels: Any = None) -> ReplayBatch | None:
        """A batch begins: hooks on, if its step is due.

        Args:
            batch: all of it, where the host does not tell what of it is which; or else
            inputs, labels: what the model is called with, and what the loss takes besides.

        Returns:
            The batch to train on instead, where a run is replayed.
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
        """The loss of the batch under way, where it is known before the batch ends."""
        if self._recorder is not None:
            self._recorder.log_loss(loss)

    @guarded(passing=(PadiffError,))
    def declare_division(self, name: str, loss: float, loss_scale: float) -> None:
        """Declare by how much a loss was divided before backward began at it, as far as that is seen.

        Args:
            name: of the setting.
            loss: the whole loss of the micro-batch.
            loss_scale: what it was multiplied by besides.
        """
        began = self._recorder.backward_began_at if self._recorder is not None else None
        if self._recorder is None or not began or not math.isfinite(began) or not math.isfinite(loss):
            return
        divided = loss * loss_scale / began
        if divided >= 0.5 and abs(divided - round(divided)) < 1e-3 * divided:
            self._recorder.declare({name: round(divided)})

    @guarded(passing=(PadiffError,))
    def carried(self, micro_batches: int) -> None:
        """The host begins a step anew, with the gradients of so many micro-batches that it did for it."""
        if self._recorder is not None:
            self._recorder.carried(micro_batches)

    @property
    def replayed_batches(self) -> Sequence[ReplayBatch]:
        """The micro-batches of the step that is done again."""
        return self._replay.batches if self._replay is not None else ()

    @guarded(passing=(PadiffError,))
    def end_batch(self, loss: Any = None, loss_scale: float = 1.0) -> None:
        """A batch ended, with or without an optimizer step: hooks off."""
        if self._replay is not None:
            self._replay.end_batch(loss_scale)
        if self._recorder is not None:
            if loss is not None:
                self._recorder.log_loss(loss)
            self._recorder.loss_scale = loss_scale
            self._recorder.detach()

    @guarded(default=False, passing=(PadiffError,))
    def end_step(self) -> bool:
        """The optimizer stepped. Returns whether the host is asked to stop.

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
            if self._live is None:
                return False
            if was_due and self._live.waits:
                self._recorder.flush()
            return self._live.say()
        except PadiffError:
            # Not every host tells its callbacks of an exception.
            self.abort()
            raise

    @guarded(passing=(PadiffError,))
    def flush(self) -> None:
        """Wait until every step that ended is written, compared and streamed."""
        if self._recorder is not None:
            self._recorder.flush()

    @guarded(passing=(PadiffError,))
    def finish(self) -> None:
        """Training ended: write and compare what is left, take everything off."""
        if self._replay is not None:
            self._replay.finish()
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
                    for line in lost_lines(open_run(self._dir_path), str(self._dir_path)):
                        say(line, alarming=True)
        finally:
            self._close_streams()

    @guarded(passing=(PadiffError,))
    def abort(self) -> None:
        """Training ended by an exception: take everything off, keep what is written."""
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
    def detach(self) -> None:
        """Take the hooks off; for a host that left a batch by an exception."""
        if self._replay is not None:
            self._replay.detach()
        if self._recorder is not None:
            self._recorder.detach()

    def _written(self, step: Step) -> None:
        """On the writer's thread."""
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
        """In a fork: what is open is the parent's."""
        self._own = None
        if self._live is not None:
            self._live.leave()

    def _close_streams(self) -> None:
        own, self._own = self._own, None
        for stream in (self._live, own):
            if stream is not None:
                stream.close()
