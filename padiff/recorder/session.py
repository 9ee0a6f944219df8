"""The recorder of a training: it schedules steps, attaches and detaches hooks, and hands finished steps on."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from padiff.dump.lock import register_fork_cleanup
from padiff.dump.store import shown
from padiff.errors import PadiffError, UsageError, WriterError
from padiff.frameworks import framework_of
from padiff.frameworks.hooking import Handle
from padiff.recorder.capture import Capture, CurrentStep, RecorderWarnings
from padiff.recorder.description import DeclaredSettings, Description, OtherRanks, optimizers_of
from padiff.recorder.failures import Failures, aside
from padiff.recorder.layers import Layers, ModelLease, claimed, group
from padiff.recorder.levels import FULL_BYTES, LevelsOfSteps
from padiff.recorder.model_copies import LeftOut, left_out_of
from padiff.recorder.model_hooks import TrainingHistory
from padiff.recorder.options import Detail, Identity, Schedule, Scope, Target
from padiff.recorder.output import MemoryRun, Output, Sink, check_as_made, dump_arguments, unwrapped
from padiff.recorder.packing import bytes_owned, say_size
from padiff.recorder.parameter_map import ParameterMapCache
from padiff.recorder.tracer import Prelude
from padiff.records import RunInfo, Step
from padiff.records.recorded import left_out_line
from padiff.records.traces import Pack, without_code
from padiff.system.guard import Failure, Guard, guarded, weakly
from padiff.system.terminal import say, warn_of_older

# Objects of the parent's recorders in a forked process. Never freed: they may hold memory of a device that the fork
# cannot access.
_of_the_parent: list[Any] = []
# Number of attempts to remove the hooks; each attempt continues where the previous one failed.
_TRIES = 3


class Recorder(CurrentStep):
    """Recorder of the training of one model; made by `record`, used in a ``with``.

    ``end_step()`` ends a step, as ``try_dump()`` does. A callback of a trainer uses `open`, `attach`, `detach`,
    `end_step` and `close` instead of the ``with``.

    Args:
        replay_of: identity of the run whose packed steps are replayed; `None` if the run is no replay.

    Attributes:
        step: number of the current step.
        watched: True if `padiff doctor` observes the recording; live comparison is then off.
        forked: True if this process is a fork of the one that opened the recorder; nothing is recorded then.
    """

    watched = False
    #: Functions that are called before a recorder is made: `padiff run` then leaves the recording to the script.
    leaving: ClassVar[list[Callable[[], None]]] = []

    def __init__(
        self, model: Any, scope: Scope, target: Target, identity: Identity, replay_of: str | None = None
    ) -> None:
        super().__init__()
        self.guard, self._failures = Guard(weakly(self._failed), target.on_error == "raise"), Failures()
        self._ending = False
        warn_of_older()
        if isinstance(model, Mapping):
            model = group(model)
        model, white_list, black_list, layer_map = unwrapped(model, scope.white_list, scope.black_list, scope.layer_map)
        self._framework = framework_of(model)
        self._model = self._framework.layers.unwrap(model)
        self._type = type(self._model)
        self._scheduled = scope.every_n_steps is not None
        self._schedule = Schedule.from_argument(1 if scope.every_n_steps is None else scope.every_n_steps)
        detail = Detail.from_arguments(scope.detail, scope.full_every_n_steps)
        if target.pack is False:
            detail = detail.without_auto()
        self._output = Output(target, detail)
        self._optimizers = optimizers_of(scope.optimizer, self._framework)
        with self._framework.hooks.aside():
            self._layers = Layers(self._model, self._framework, white_list, black_list, layer_map or ())
            detail.check_patterns(self._layers.nodes)
            if not self._layers.chosen:
                raise UsageError("the white and black lists leave no layer to record")
            self._description = Description(self._framework, self._layers, self._schedule, detail, identity, replay_of)
            self._settings = DeclaredSettings(self._framework, self._layers, self._optimizers)
        self._levels = LevelsOfSteps(detail, scope.functions, FULL_BYTES / self.info.world_size)
        packs = scope.replay_every_n_steps
        # A replay traces every step like a step with a pack: functions, and the inputs of layers in full.
        self._replays, self._functions = replay_of is not None, scope.functions
        self._sources = scope.sources
        self._packs = None if packs is None else Schedule.from_argument(packs)
        self._owned = ParameterMapCache()
        self._history = TrainingHistory(trains=bool(self._optimizers))
        self._claim: ModelLease | None = None
        self._before_capture: Handle | None = None
        self._compilations: Handle | None = None
        self._entered = self._dumped = self._loss_logged = False
        self._warnings = RecorderWarnings()
        self._others = OtherRanks(
            self._framework,
            self._output.folder,
            self._description.rank,
            self.info.world_size,
            given=identity.world_size is not None,
        )
        self.loss_scale: float = 1.0
        self.step = self._begin = scope.start_step
        self._end: int | None = None
        self.forked = False
        self._left_out: LeftOut | None = None
        #: Listener to what the loop computed before this recorder was made.
        self.prelude: Prelude | None = None

    # -- the with ------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self.open()
        self._entered = True
        try:
            self.attach()
        except BaseException:
            self.close(finished=False)
            raise
        return self

    @guarded(default=None, passing=(WriterError,))
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A body that never called try_dump() is one step. Otherwise the current step is unfinished and dropped.
        ended = False
        try:
            if kind is None and not self._dumped and self._capture is not None and not self._capture.empty:
                self._warnings.folded(self._capture)
                self.end_step(go_on=False)
            ended = kind is None
        finally:
            self.close(finished=ended, raise_errors=ended)
            if self._output.sink is not None:  # closing failed
                self.close(finished=False, raise_errors=False)

    @guarded(default=False, passing=(PadiffError,))
    def try_dump(self, per_step: int | str | Path | None = None, dir_path: str | Path | None = None) -> bool:
        """End a step, and write it if it is due. Returns True if it was written.

        Args:
            per_step, dir_path: step interval and folder, as in ``try_dump`` of `create_model`. The first call sets
                ``every_n_steps`` and the folder if `record` did not get them; the step of that call is recorded.
                Otherwise they must equal the options of the recorder.

        Raises:
            WriterError: an earlier step could not be written (with ``on_error="raise"``).
            UsageError: the recorder was made with another number of steps, or another folder.
            RunFolderError: the folder of the first call holds a run already.
        """
        every, folder = dump_arguments(per_step, dir_path)
        if not self._dumped:
            self._settle(every, folder)
        check_as_made(every, folder, self._schedule, self._output)
        self._dumped = True
        return self.end_step(go_on=True)

    def _settle(self, every: int | None, dir_path: str | Path | None) -> None:
        """Set the interval and the folder from the first ``try_dump``, if the recorder was made without them."""
        schedule = self._schedule
        if every is not None and not self._scheduled:
            schedule = Schedule(every, first=self.step)
        check_as_made(every, None, schedule, self._output)
        if dir_path is not None and self._output.folder is None and self._output.run is not None:
            self._move(dir_path)
        if schedule is not self._schedule:
            self._schedule = schedule
            self._description.with_schedule(schedule)
            self._do(lambda sink: sink.set_info(self.info))

    def _move(self, dir_path: str | Path) -> None:
        """Write the run to a folder instead of memory."""
        self._output.move(dir_path, self.info, self._description.rank)
        self._others.look_into(self._output.folder)
        self._levels.listen(self._output.folder)

    # -- for hosts -----------------------------------------------------------------------------------------

    @property
    @guarded(default=False)
    def due(self) -> bool:
        """Return True if the current step is to be recorded."""
        return self._output.active and self._output.sink is not None and (self._schedule.due(self.step) or self._packed)

    @property
    def _packed(self) -> bool:
        """Return True if the current step gets a replay pack."""
        return self._packs is not None and self._records_part("replay packs") and self._packs.due(self.step)

    @guarded()
    def loss_is_logged(self) -> None:
        """Note that a host (trainer) logs the loss of each micro-batch.

        The output `loss` of the model is then not recorded as an activation, as hosts scale it differently.
        """
        self._loss_logged = True

    @property
    @guarded()
    def info(self) -> RunInfo:
        """Return the facts that hold for all steps: the framework, the layer tree."""
        return self._description.info

    @property
    @guarded()
    def run(self) -> MemoryRun | None:
        """Return the run in memory, or None if steps are written to a folder."""
        return self._output.run

    @guarded()
    def expect_end(self, step: int | None) -> None:
        """Set the step that the training ends before (`None`: unknown), to estimate the size of the run."""
        self._end = step

    @guarded(passing=(UsageError,))
    def declare(self, settings: Mapping[str, Any]) -> None:
        """Declare settings of the training that a trainer knows.

        Names and plain values are those of `padiff.records.declared`. Settings that the recorder reads itself take
        precedence.
        """
        self._settings.declare(settings)

    @property
    @guarded(default=False)
    def active(self) -> bool:
        """Return False once recording has stopped after an error."""
        return self._output.active

    @guarded(passing=(PadiffError,))
    def open(self) -> None:
        """Make the run folder (or the run in memory) and reserve the model for this recorder.

        Raises:
            UsageError: another recorder is recording the model.
            RunFolderError: the folder holds a run already and ``existing`` is ``"error"``; another process records into
                the folder; or the folder is not writable (only a warning with ``on_error="warn"``).
        """
        if self._output.sink is not None:
            raise UsageError("this recorder is open already; a recorder records one model once")
        if self._model is None:
            raise UsageError("this recorder is closed; a recorder records one model once: make another one")
        if claimed(self._model):
            raise UsageError(
                "another recorder is recording this model: leave its `with` (or close it) first. "
                "One recorder can record all that two would"
            )
        with self._framework.hooks.aside():
            self._description.with_settings(self._settings.read())
        self._output.open(self._description.info, self._description.rank)
        if self._output.sink is None:
            return
        with self._framework.hooks.aside():
            self._left_out = left_out_of(self._model, self._optimizers, sys._getframe(1))
        self._levels.listen(self._output.folder)
        before = self._output.size_before() / self.info.world_size
        self._levels.begin(lambda: bytes_owned(self._framework, self._layers.nodes), before)
        if self._packs is not None and not self.watched and not self._description.rank:
            say_size(self._packs, self._framework, self._layers.nodes, self._optimizers)
        self._claim = ModelLease.set(self._model, self)
        # What is still on its way from the device would break the capture of a CUDA graph.
        self._before_capture = self._framework.hooks.before_capture(_flush_of(weakref.ref(self)), self.guard)
        self._compilations = self._framework.hooks.on_compilations()
        register_fork_cleanup(self)

    @guarded(passing=(UsageError,))
    @aside
    def attach(self) -> None:
        """Attach the hooks if the current step is due. A host may call this several times in a step."""
        if self.guard.tripped or not self.due:
            return
        if self._compilations is None:
            self._compilations = self._framework.hooks.on_compilations()
        if self._capture is None:
            full_inputs = self._packed or self._replays
            records, levels = (
                self._output.records(self._framework),
                self._levels.levels_of(self.step, full=self._packed),
            )
            if self._framework.hooks.READ:
                levels.fill(self._layers.nodes)
            records.copier.grant(self._levels.room)
            self._capture = Capture(
                self.step,
                self._layers,
                self._optimizers,
                records,
                levels,
                self._owned,
                self._stepped,
                consuming=self._settings.before_step,
                functions=self._records_part("function calls")
                and (self._levels.functions or (full_inputs and self._functions)),
                losses=self._records_part("losses"),
                packing=self._packed,
                whole=full_inputs,
                loss_logged=self._loss_logged,
                guard=self.guard,
                history=self._history,
                prelude=self.prelude,
            )
            self.prelude = None
        if self._hooked is not None:
            self._capture.take_over(self._hooked)
            self._hooked = None
        try:
            self._capture.attach()
        except BaseException:
            self._capture.detach()
            raise

    def _stepped(self, times: int) -> None:
        """Warn if the number of optimizer steps shows that ``try_dump`` is missing. ``times`` counts this step's."""
        if self._entered and not self._dumped:
            self._warnings.unended(times)

    def end_step(self, go_on: bool | None = None) -> bool:
        """End the current step, and write it if it is due. Returns True if it was written.

        A step is all that was called since the last one: also without an optimizer, a loss or gradients.

        Args:
            go_on: True to begin the next step, as `attach` does, with the attached hooks. Default: True in a ``with``,
                False for a host, which attaches the hooks itself.
        """
        if go_on is None:
            go_on = self._entered
        self._dumped = True
        if self._capture is not None:
            self._capture.raise_interrupt()
        self.step += 1
        self._ending = True
        try:
            written = self.guard.run(self._hand_on, go_on)
        finally:
            self._ending = False
        if self.guard.tripped:
            self._recover()
            if go_on:
                self.attach()
        return bool(written)

    def _hand_on(self, go_on: bool) -> bool:
        if self.forked:
            self._warnings.forked()
        step, pack = self._finish(keep_hooks=go_on and self.due)
        if go_on:
            # Before the writer's thread wakes up and competes for the interpreter.
            self.attach()
        written = step is not None and self._do(lambda sink: sink.add_step(step, pack))
        if written:
            self._failures.recorded()
        if written and not self.watched:
            self._warnings.say(self._others.handed_on())
        if self.run is not None and self.run.dropped:
            self._warnings.dropped(self.run)
        self._warnings.give()
        return written

    @guarded(passing=(WriterError,))
    @aside
    def pop_step(self) -> Step | None:
        """Return the records of the current step without handing the step on, or None if nothing was recorded.

        The step does not end, so that it can be recorded again.
        """
        capture, self._capture = self._capture, None
        self._owned.clear()  # the parameters may be of another dtype
        if capture is None or self.guard.tripped:
            return None
        try:
            capture.raise_interrupt()
            if capture.empty:
                return None
            return capture.finish(self._description.rank, self._scale(capture))
        finally:
            capture.detach()

    def _scale(self, capture: Capture) -> float:
        """Return the step's loss scale: the one that a host has set, else that of the scaler that the loop called."""
        scale = self.loss_scale
        if scale == 1 and capture.losses is not None:
            scale = capture.losses.scale
        return scale if math.isfinite(scale) and scale > 0 else 1.0

    # -- errors of padiff's own ----------------------------------------------------------------------------

    def _failed(self, failure: Failure) -> None:
        step = self.step - self._ending if self._output.sink is not None else None
        line = self._failures.add(step, failure)
        if line:
            say(line, alarming=True)

    def _records_part(self, part: str) -> bool:
        return part not in self._failures.parts

    def _recover(self) -> None:
        """Drop the current step; after an error, note the error in the run and reset the guard of the hooks."""
        for _ in range(_TRIES):
            self.guard.reset()
            self.discard()
            if not self.guard.tripped:
                break
        self.guard.reset()
        self._owned.clear()
        self._output.forget()
        sink = self._output.sink
        if self._failures.stopped:
            self._output.active = False
        if sink is not None and self._description.with_errors(self._failures.lines):
            sink.set_info(self._description.info)

    @aside
    def _finish(self, keep_hooks: bool) -> tuple[Step | None, Pack | None]:
        """Return the records and the pack of the step that ends; each is None if there is none."""
        # Always stored in an attribute: after an interrupt in the code below the hooks must be removable.
        capture = self._hooked = self._capture
        self._capture = None
        sink = self._output.sink
        if capture is None or sink is None:
            return None, None
        self._warnings.called(capture)
        if capture.empty:
            self.detach()
            self._layers.refresh()
            return None, None
        scale = self._scale(capture)
        step = capture.finish(self._description.rank, scale, detach=not keep_hooks)
        if not keep_hooks:
            self._hooked = None
        steps = None if self._end is None else self._schedule.count(self._begin, self._end)
        expected = self._levels.recorded(step, steps)
        if expected and self._output.folder is not None and not self.watched and not self._description.rank:
            say(expected)
        pack = None if capture.packing is None else capture.packing.finish(self._description.rank, scale)
        self._warnings.left_out(capture)
        news = self._description.with_autocast(capture.autocast)
        if not self._description.rank:
            first, settings = self._settings.first is None, self._settings.of_step(capture.settings)
            step = replace(step, settings=settings)
            if first:
                news = self._description.with_settings(self._settings.first or {}) or news
                news = (self._sources and self._description.with_lines(self._settings.optimizers())) or news
        if not self._sources and step.trace.functions:
            step = replace(step, trace=without_code(step.trace))
        changed = self._layers.settle()
        if changed:
            self._owned.clear()
            self._description.with_layers()
        if news or changed:
            sink.set_info(self._description.info)
        if not capture.called:
            self._layers.refresh()  # the model may have new layers, without hooks
        elif changed:
            self._warnings.changed(capture, self._layers.changes)
        self._warnings.stepped(capture)
        return step, pack

    @guarded()
    def mark(self, step: int, severity: float) -> None:
        """Set the severity of a recorded step: with ``max_bytes``, the most severe steps are not deleted."""
        self._output.mark(step, severity)

    @guarded(passing=(WriterError,))
    def flush(self) -> None:
        """Wait until every finished step is written."""
        self._do(lambda sink: sink.flush())

    @guarded(passing=(WriterError,))
    def close(self, finished: bool = True, raise_errors: bool = True) -> None:
        """Remove the hooks, write the finished steps, and release the model. May be called twice."""
        self._recover()
        self._say_what_is_left_out()
        if self._claim is not None:
            self._claim.remove()
            self._claim = None
        if self._before_capture is not None:
            self._before_capture.remove()
            self._before_capture = None
        if self._compilations is not None:
            self._compilations.remove()
            self._compilations = None
        try:
            if self._output.close(finished) and not self.watched:
                if not self._description.rank:
                    self._output.say_what_is_there(self.info.world_size)
                lacking = self._others.ended()
                if lacking:
                    say(lacking)
        except WriterError:
            # If an exception ends the `with`, a writing error must not replace that exception.
            if raise_errors:
                raise
        finally:
            self._owned.clear()
        if self._output.sink is None and not self.forked:
            self._release()

    def _release(self) -> None:
        """Let go of the model and the optimizers: a script that deletes them may keep the recorder."""
        if self._model is not None:
            self._model, self._optimizers, self.prelude = None, [], None
            self._layers.release()
            self._settings.release()
            self._levels.release()

    @guarded()
    @aside
    def _say_what_is_left_out(self) -> None:
        left_out, self._left_out, sink = self._left_out, None, self._output.sink
        names = left_out.changed() if left_out is not None and sink is not None else []
        if sink is not None and names:
            self._description.with_left_out(names)
            sink.set_info(self.info)
            if not self.watched and not self._description.rank:
                say(f"not recorded: {left_out_line(names)}")

    def __str__(self) -> str:
        folder = self._output.folder
        place = f"into {shown(folder)}" if folder is not None else "in memory"
        due = f"every {self._schedule.every} steps" if self._schedule.steps is None else "at chosen steps"
        state = "recording" if self._output.sink is not None else "closed"
        return (
            f"{state} {self._type.__name__} ({self._framework.name}) {place}, {due}: step {self.step} is under "
            f"way, {len(self._output)} recorded"
        )

    def __repr__(self) -> str:
        return f"<Recorder {self}>"

    def leave_in_fork(self) -> None:
        """Stop recording in a forked process, as the run belongs to the parent: remove hooks, release the model."""
        self.forked = True
        _of_the_parent.append((self._capture, self._hooked, self._output.sink, self._owned))
        self._owned = ParameterMapCache()
        self.detach()
        self._capture = self._output.sink = None
        if self._claim is not None:
            self._claim.remove()
            self._claim = None

    def _do(self, call: Callable[[Sink], None]) -> bool:
        try:
            return self._output.do(call)
        finally:
            if not self._output.active:
                self.discard()


def _flush_of(alive: weakref.ref[Recorder]) -> Callable[[], None]:
    """Return a function that waits until a recorder has written its steps, and does not keep the recorder alive."""

    def flush() -> None:
        recorder = alive()
        if recorder is not None:
            recorder.flush()

    return flush


class InertRecorder(Recorder):
    """Recorder that records nothing; used if an internal error of padiff prevents making a real one."""

    def __init__(self, start_step: int) -> None:
        CurrentStep.__init__(self)
        self.guard = Guard()
        self.step, self.loss_scale, self.forked = start_step, 1.0, False

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def try_dump(self, *_: Any, **__: Any) -> bool:
        return self.end_step()

    def end_step(self, go_on: bool | None = None) -> bool:
        self.step += 1
        return False

    def attach(self) -> None:
        pass

    def close(self, *_: Any, **__: Any) -> None:
        pass

    def __str__(self) -> str:
        return f"recording nothing: step {self.step} is under way"
