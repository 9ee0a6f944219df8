"""A recorder: which steps are due, hooks on and off, and where finished steps go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from padiff.dump.forks import own
from padiff.dump.local import shown
from padiff.errors import PadiffError, UsageError, WriterError
from padiff.frameworks import framework_of
from padiff.recorder.aside import aside
from padiff.recorder.capture import Capture
from padiff.recorder.claims import Claim, claimed
from padiff.recorder.description import Description
from padiff.recorder.detail import Detail
from padiff.recorder.evaluation import TrainingHistory
from padiff.recorder.failures import Failures
from padiff.recorder.layers import Layers
from padiff.recorder.levels import FULL_BYTES, LevelsOfSteps
from padiff.recorder.memory import MemoryRun
from padiff.recorder.optimizers import optimizers_of
from padiff.recorder.options import Identity, Scope, Target
from padiff.recorder.output import Output, Sink
from padiff.recorder.owned import LastOwned
from padiff.recorder.packing import bytes_owned, say_size
from padiff.recorder.processes import OtherRanks
from padiff.recorder.proxies import check_as_made, dump_arguments, unwrapped
from padiff.recorder.schedule import Schedule
from padiff.recorder.settings import DeclaredSettings
from padiff.recorder.under_way import UnderWay
from padiff.recorder.warn import RecorderWarnings
from padiff.records import RunInfo, Step
from padiff.records.pack import Pack
from padiff.system.distribution import warn_of_older
from padiff.system.guard import Failure, Guard, guarded, weakly
from padiff.system.memory import keep_freed
from padiff.system.switches import say

# What forks of a training hold of its recorders. Never freed there: it may be memory of a device that a fork has not.
_of_the_parent: list[Any] = []
# How often hooks are taken off where that fails: each try goes on where the one before failed.
_TRIES = 3


class Recorder(UnderWay):
    """Records the training of one model; made by `record`, used in a ``with``.

    ``try_dump()`` ends a step. A loop with a host of its own (a callback) uses `open`, `attach`, `detach`,
    `end_step` and `close` instead of the ``with``.

    Args:
        replay_of: the identity of the run whose packed steps are done again; `None` where none are.

    Attributes:
        step: number of the step under way.
        watched: whether `padiff doctor` looks on; live comparison is then left out.
        forked: whether this process is a fork of the one that opened the recorder; nothing is recorded here then.
    """

    watched = False
    #: Called before a recorder is made: who records a script from outside leaves a script that does so by itself.
    leaving: ClassVar[list[Callable[[], None]]] = []

    def __init__(
        self, model: Any, scope: Scope, target: Target, identity: Identity, replay_of: str | None = None
    ) -> None:
        super().__init__()
        self.guard, self._failures = Guard(weakly(self._failed), target.on_error == "raise"), Failures()
        self._ending = False
        warn_of_older()
        model, white_list, black_list, layer_map = unwrapped(model, scope.white_list, scope.black_list, scope.layer_map)
        self._framework = framework_of(model)
        self._model = self._framework.layers.unwrap(model)
        self._scheduled = scope.every_n_steps is not None
        self._schedule = Schedule.of(1 if scope.every_n_steps is None else scope.every_n_steps)
        detail = Detail.of(scope.detail, scope.full_every_n_steps)
        if target.pack is False:
            detail = detail.without_auto()
        self._output = Output(target, detail)
        self._optimizers = optimizers_of(scope.optimizer, self._framework)
        with self._framework.hooks.aside():
            self._layers = Layers(self._model, self._framework, white_list, black_list, layer_map or ())
            detail.check(self._layers.nodes)
            if not self._layers.chosen:
                raise UsageError("the white and black lists leave no layer to record")
            self._description = Description(self._framework, self._layers, self._schedule, detail, identity, replay_of)
            self._settings = DeclaredSettings(self._framework, self._layers, self._optimizers)
        self._levels = LevelsOfSteps(detail, scope.functions, FULL_BYTES / self.info.world_size)
        packs = scope.replay_every_n_steps
        # Traced in all steps as steps with a pack are: functions too, and what goes into layers in full.
        self._replays, self._functions = replay_of is not None, scope.functions
        self._packs = None if packs is None else Schedule.of(packs)
        self._owned = LastOwned()
        self._history = TrainingHistory(trains=bool(self._optimizers))
        self._claim: Claim | None = None
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
        # A body that never called try_dump() was one step. Whatever else is under way is unfinished.
        ended = False
        try:
            if kind is None and not self._dumped and self._capture is not None and not self._capture.empty:
                self._warnings.folded(self._capture)
                self.end_step()
            ended = kind is None
        finally:
            self.close(finished=ended, raise_errors=ended)
            if self._output.sink is not None:  # closing failed
                self.close(finished=False, raise_errors=False)

    @guarded(default=False, passing=(PadiffError,))
    def try_dump(self, per_step: int | str | Path | None = None, dir_path: str | Path | None = None) -> bool:
        """End a step; it is written if it is due. Returns whether it was.

        Args:
            per_step, dir_path: as a proxy's ``try_dump`` takes them. What `record` was not given, ``every_n_steps`` and
                a folder, the first call sets; its step is recorded. Otherwise they have to be what the recorder was
                made with.

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
        """Take from the first ``try_dump`` what the recorder was not made with."""
        schedule = self._schedule
        if every is not None and not self._scheduled:
            schedule = Schedule(every, first=self.step)
        check_as_made(every, None, schedule, self._output)
        if dir_path is not None and self._output.folder is None and self._output.run is not None:
            self._move(dir_path)
        if schedule is not self._schedule:
            self._schedule = schedule
            self._description.with_schedule(schedule)
            self._do(lambda sink: sink.describe(self.info))

    def _move(self, dir_path: str | Path) -> None:
        """Write to a folder what would be kept in memory."""
        self._output.move(dir_path, self.info, self._description.rank)
        self._others.look_into(self._output.folder)
        self._levels.listen(self._output.folder)

    # -- for hosts -----------------------------------------------------------------------------------------

    @property
    @guarded(default=False)
    def due(self) -> bool:
        """Whether the step under way is to be recorded."""
        return self._output.active and self._output.sink is not None and (self._schedule.due(self.step) or self._packed)

    @property
    def _packed(self) -> bool:
        """Whether a pack is kept of the step under way."""
        return self._packs is not None and self._records_part("replay packs") and self._packs.due(self.step)

    @guarded()
    def loss_is_logged(self) -> None:
        """A host logs each micro-batch's loss: what the model itself gives as `loss` is then none of its activations,
        as hosts divide it differently.
        """
        self._loss_logged = True

    @property
    @guarded()
    def info(self) -> RunInfo:
        """What holds for all steps: the framework, the layer tree."""
        return self._description.info

    @property
    @guarded()
    def run(self) -> MemoryRun | None:
        """The run in memory, `None` where the steps go to a folder."""
        return self._output.run

    @guarded()
    def expect_end(self, step: int | None) -> None:
        """Say which step the training ends before, as far as that is known: how large the run becomes depends on it."""
        self._end = step

    @guarded(passing=(UsageError,))
    def declare(self, settings: Mapping[str, Any]) -> None:
        """Declare settings of the training that a trainer knows: names and plain values as `padiff.records.settings`
        has them. What the recorder sees itself takes precedence.
        """
        self._settings.declare(settings)

    @property
    @guarded(default=False)
    def active(self) -> bool:
        """False once recording has stopped after an error."""
        return self._output.active

    @guarded(passing=(PadiffError,))
    def open(self) -> None:
        """Make the run folder (or the run in memory) and claim the model.

        Raises:
            UsageError: another recorder is recording the model.
            RunFolderError: the folder holds a run already, and ``existing`` does not say what to do with it; another
                process records into it; or it cannot be written to (but with ``on_error="warn"``).
        """
        if self._output.sink is not None:
            raise UsageError("this recorder is open already; a recorder records one model once")
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
        keep_freed()
        self._levels.listen(self._output.folder)
        before = self._output.size_before() / self.info.world_size
        self._levels.begin(lambda: bytes_owned(self._framework, self._layers.nodes), before)
        if self._packs is not None and not self.watched and not self._description.rank:
            say_size(self._packs, self._framework, self._layers.nodes, self._optimizers)
        self._claim = Claim.set(self._model, self)
        own(self)

    @guarded(passing=(UsageError,))
    @aside
    def attach(self) -> None:
        """Put the hooks on, if the step under way is due. Several times a step where a host needs it."""
        if self.guard.tripped or not self.due:
            return
        if self._capture is None:
            whole = self._packed or self._replays
            records, levels = self._output.records(self._framework), self._levels.of(self.step, full=self._packed)
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
                consuming=self._settings.look,
                functions=self._records_part("function calls")
                and (self._levels.functions or (whole and self._functions)),
                losses=self._records_part("losses"),
                packing=self._packed,
                whole=whole,
                loss_logged=self._loss_logged,
                guard=self.guard,
                history=self._history,
            )
        if self._hooked is not None:
            self._capture.take_over(self._hooked)
            self._hooked = None
        try:
            self._capture.attach()
        except BaseException:
            self._capture.detach()
            raise

    def _stepped(self, times: int) -> None:
        """An optimizer has stepped so often in the step under way."""
        if self._entered and not self._dumped:
            self._warnings.unended(times)

    def end_step(self, go_on: bool = False) -> bool:
        """End the step under way and hand it on if it was due. Returns whether it was.

        ``go_on`` begins the next step, as `attach` does; hooks that are on stay on for it.
        """
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
        self._output.pool.keep = self.due
        step, pack = self._finish(keep_hooks=go_on and self.due)
        if go_on:
            # Before the writer's thread is woken, with which the interpreter then has to be shared.
            self.attach()
        written = step is not None and self._do(lambda sink: sink.put(step, pack))
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
    def take(self) -> Step | None:
        """End what is recorded of the step under way and give it, instead of handing it on: the step is still under way
        for whoever records it again. `None`: there is nothing of it.
        """
        capture, self._capture = self._capture, None
        self._owned.clear()  # the parameters may be of another dtype
        if capture is None or self.guard.tripped:
            return None
        try:
            capture.raise_interrupt()
            if capture.empty:
                return None
            scale = self.loss_scale if math.isfinite(self.loss_scale) and self.loss_scale > 0 else 1.0
            return capture.finish(self._description.rank, scale)
        finally:
            capture.detach()

    # -- errors of padiff's own ----------------------------------------------------------------------------

    def _failed(self, failure: Failure) -> None:
        step = self.step - self._ending if self._output.sink is not None else None
        line = self._failures.add(step, failure)
        if line:
            say(line, alarming=True)

    def _records_part(self, part: str) -> bool:
        return part not in self._failures.parts

    def _recover(self) -> None:
        """Drop the step under way. After an error, have the run say so, and let hooks work again."""
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
            sink.describe(self._description.info)

    @aside
    def _finish(self, keep_hooks: bool) -> tuple[Step | None, Pack | None]:
        """What was recorded of the step that ends; `None` where it was not due. And its pack, where one is kept."""
        # Never out of reach: an interrupt in what follows must find the hooks.
        capture = self._hooked = self._capture
        self._capture = None
        sink = self._output.sink
        if capture is None or sink is None:
            return None, None
        self._warnings.called(capture)
        if capture.empty:
            self.detach()
            self._layers.look()
            return None, None
        scale = self.loss_scale if math.isfinite(self.loss_scale) and self.loss_scale > 0 else 1.0
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
            news = (first and self._description.with_settings(self._settings.first or {})) or news
        changed = self._layers.settle()
        if changed:
            self._owned.clear()
            self._description.with_layers()
        if news or changed:
            sink.describe(self._description.info)
        if not capture.called:
            self._layers.look()  # as a whole the model may have become another one, of which nothing is hooked
        elif changed:
            self._warnings.changed(capture, self._layers.changes)
        self._warnings.stepped(capture)
        return step, pack

    @guarded()
    def mark(self, step: int, severity: float) -> None:
        """Say how bad a recorded step is: under ``max_bytes`` the worst ones are kept."""
        self._output.mark(step, severity)

    @guarded(passing=(WriterError,))
    def flush(self) -> None:
        """Wait until every finished step is written."""
        self._do(lambda sink: sink.flush())

    @guarded(passing=(WriterError,))
    def close(self, finished: bool = True, raise_errors: bool = True) -> None:
        """Take the hooks off, write what is finished, free the model. May be called twice."""
        self._recover()
        if self._claim is not None:
            self._claim.remove()
            self._claim = None
        try:
            if self._output.close(finished) and not self.watched:
                if not self._description.rank:
                    self._output.say_what_is_there(self.info.world_size)
                lacking = self._others.ended()
                if lacking:
                    say(lacking)
        except WriterError:
            # In a `with` that is left by an exception, that exception is the one to see.
            if raise_errors:
                raise
        finally:
            self._owned.clear()

    def __str__(self) -> str:
        folder = self._output.folder
        place = f"into {shown(folder)}" if folder is not None else "in memory"
        due = f"every {self._schedule.every} steps" if self._schedule.steps is None else "at chosen steps"
        state = "recording" if self._output.sink is not None else "closed"
        return (
            f"{state} {type(self._model).__name__} ({self._framework.name}) {place}, {due}: step {self.step} is under "
            f"way, {len(self._output)} recorded"
        )

    def __repr__(self) -> str:
        return f"<Recorder {self}>"

    def leave_in_fork(self) -> None:
        """The run is the parent's, whose thread writes it: hooks off, the model free, nothing is recorded any more."""
        self.forked = True
        _of_the_parent.append((self._capture, self._hooked, self._output.sink, self._owned))
        self._owned = LastOwned()
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


class InertRecorder(Recorder):
    """Stands for a recorder that an error of padiff's own kept from being made; records nothing."""

    def __init__(self, start_step: int) -> None:
        UnderWay.__init__(self)
        self.guard = Guard()
        self.step, self.loss_scale, self.forked = start_step, 1.0, False

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def try_dump(self, *_: Any, **__: Any) -> bool:
        return self.end_step()

    def end_step(self, go_on: bool = False) -> bool:
        self.step += 1
        return False

    def attach(self) -> None:
        pass

    def close(self, *_: Any, **__: Any) -> None:
        pass

    def __str__(self) -> str:
        return f"recording nothing: step {self.step} is under way"
