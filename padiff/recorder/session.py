"""A recorder: which steps are due, hooks on and off, and where finished steps go."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from padiff.dump.forks import own
from padiff.dump.local import local_folder
from padiff.dump.storage import Storage
from padiff.dump.write import RunWriter
from padiff.dump.zoom import Requests
from padiff.environment import fingerprint
from padiff.errors import UnwritableFolderError, UsageError, WriterError
from padiff.frameworks import framework_of
from padiff.recorder.buffers import Buffers
from padiff.recorder.capture import Capture
from padiff.recorder.detail import Detail, Levels
from padiff.recorder.layers import Layers
from padiff.recorder.mark import Mark, marked
from padiff.recorder.memory import MemoryRun
from padiff.recorder.optimizers import optimizers_of
from padiff.recorder.options import Identity, Scope, Target
from padiff.recorder.parameters import View
from padiff.recorder.proxies import check_as_made, unwrapped
from padiff.recorder.schedule import Schedule
from padiff.recorder.warn import Notices
from padiff.records import RunInfo, Step, bytes_text
from padiff.sketches.samples import Samples
from padiff.sketches.sketch import Kind
from padiff.system.distribution import warn_of_older
from padiff.system.switches import say

# What forks of a training hold of its recorders. Never freed there: it may be memory of a device that a fork has not.
_of_the_parent: list[Any] = []


class Sink(Protocol):
    """Where finished steps go."""

    def put(self, step: Step) -> None: ...

    def describe(self, info: RunInfo) -> None: ...

    def flush(self) -> None: ...

    def close(self, finished: bool = True) -> None: ...


class Recorder:
    """Records the training of one model; made by `record`, used in a ``with``.

    ``try_dump()`` ends a step. A loop with a host of its own (a callback) uses `open`, `attach`, `detach`,
    `end_step` and `close` instead of the ``with``.

    Attributes:
        step: number of the step under way.
        run: the `MemoryRun` that the steps go to, `None` where they go to a folder.
        active: false once recording was given up after a writing error (``on_error="warn"``).
        watched: whether `padiff doctor` looks on; live comparison is then left out.
        forked: whether this process is a fork of the one that opened the recorder; nothing is recorded here then.
    """

    watched = False

    def __init__(self, model: Any, scope: Scope, target: Target, identity: Identity) -> None:
        warn_of_older()
        model, white_list, black_list, layer_map = unwrapped(model, scope.white_list, scope.black_list, scope.layer_map)
        self._framework = framework_of(model)
        self._model = self._framework.unwrap(model)
        self._schedule = Schedule.of(scope.every_n_steps)
        self._detail = Detail.of(scope.detail, scope.full_every_n_steps)
        self._storage = Storage.of(target.pack, target.compression, target.max_bytes, self._detail.sketches)
        every = self._detail.full_every_n_steps
        self._full = None if every is None else Schedule.of(every)
        self._optimizers = optimizers_of(scope.optimizer, self._framework)
        self._layers = Layers(self._model, self._framework, white_list, black_list, layer_map or ())
        self._detail.check(self._layers.nodes)
        if not self._layers.chosen:
            raise UsageError("the white and black lists leave no layer to record")
        rank, world_size = self._framework.distributed()
        self._rank = rank if identity.rank is None else identity.rank
        self._info = RunInfo(
            framework=self._framework.name,
            framework_version=self._framework.version,
            layers=self._layers.described(),
            name=identity.name,
            world_size=world_size if identity.world_size is None else identity.world_size,
            layer_map=self._layers.mapped,
            recording={
                "every_n_steps": self._schedule.told(),
                "layers": len(self._layers.chosen),
                **self._detail.told(),
            },
            environment=fingerprint(self._framework, self._layers.nodes),
        )
        self._dir_path = local_folder(target.dir_path, "dir_path") if target.dir_path is not None else None
        self._target = target
        self._views: dict[int, View] = {}
        self._counts: dict[Kind, int] = {}
        self._requests: Requests | None = None
        self._sparing = Levels(self._detail)
        #: Bytes of each step that this process wrote.
        self._written: Mapping[int, int] = {}
        self._buffers = Buffers()
        self._sink: Sink | None = None
        self._capture: Capture | None = None
        #: The capture of the step before, whose hooks are still on for the step under way.
        self._hooked: Capture | None = None
        self._mark: Mark | None = None
        self._entered = self._dumped = False
        self._autocast_known = False
        self._notices = Notices()
        self.loss_scale: float = 1.0
        self.step = scope.start_step
        self.active = True
        self.forked = False
        self.run: MemoryRun | None = None

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A body that never called try_dump() was one step. Whatever else is under way is unfinished.
        ended = False
        try:
            if kind is None and not self._dumped and self._capture is not None and not self._capture.empty:
                self._notices.folded(self._capture)
                self.end_step()
            ended = kind is None
        finally:
            self.close(finished=ended, raise_errors=ended)

    def try_dump(self, per_step: int | str | Path | None = None, dir_path: str | Path | None = None) -> bool:
        """End a step; it is written if it is due. Returns whether it was.

        Args:
            per_step, dir_path: as a proxy's ``try_dump`` takes them. A recorder is told both when it is made, so they
                have to be what it was made with.

        Raises:
            WriterError: an earlier step could not be written (with ``on_error="raise"``).
            UsageError: the recorder was made with another number of steps, or another folder.
        """
        check_as_made(per_step, dir_path, self._schedule, self._dir_path)
        self._dumped = True
        return self.end_step(go_on=True)

    def log_loss(self, loss: Any) -> None:
        """Record the loss of a micro-batch: a number, or a tensor of one element. Costs nothing if not due."""
        if self._capture is not None:
            self._capture.log_loss(loss)

    # -- for hosts -----------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the step under way is to be recorded."""
        return self.active and self._sink is not None and self._schedule.due(self.step)

    @property
    def info(self) -> RunInfo:
        """What holds for all steps: the framework, the layer tree."""
        return self._info

    def open(self) -> None:
        """Make the run folder (or the run in memory) and claim the model.

        Raises:
            UsageError: another recorder is recording the model.
            RunFolderError: the folder holds a run already, and ``existing`` does not say what to do with it; another
                process records into it; or it cannot be written to (with ``on_error="raise"``).
        """
        if self._sink is not None:
            raise UsageError("this recorder is open already; a recorder records one model once")
        if marked(self._model):
            raise UsageError(
                "another recorder is recording this model: leave its `with` (or close it) first. "
                "One recorder can record all that two would"
            )
        if self._dir_path is None:
            self.run = MemoryRun(self._info, self._storage.max_bytes)
            self._sink = self.run
        else:
            try:
                writer = RunWriter(
                    self._dir_path,
                    self._info,
                    rank=self._rank,
                    storage=self._storage,
                    existing=self._target.existing,
                    on_written=self._target.on_written,
                    on_done=self._buffers.recycle,
                )
                self._sink, self._written = writer, writer.written
            except UnwritableFolderError as error:
                if self._target.on_error == "raise":
                    raise
                self.active = False
                warnings.warn(f"padiff does not record, the training goes on: {error}", RuntimeWarning, stacklevel=3)
                return
            if self._detail.sketches:
                self._requests = Requests(self._dir_path)
        self._mark = Mark.set(self._model, self)
        own(self)

    def attach(self) -> None:
        """Put the hooks on, if the step under way is due. Several times a step where a host needs it."""
        if not self.due:
            return
        if self._capture is None:
            # In memory, arrays stay with the run; on their way to a folder, they come back when they are written.
            kept = self.run is not None
            empty = np.empty if kept else self._buffers.empty
            self._capture = Capture(
                self.step,
                self._framework,
                self._layers.nodes,
                self._layers.chosen,
                self._optimizers,
                empty,
                parameters=self._layers.owning,
                levels=self._levels(),
                views=self._views,
                samples=Samples(empty, None if kept else self._buffers.take_back, self._framework.fetch, self._counts),
                layers=self._layers,
                stepped=self._stepped,
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
            self._notices.unended(times)

    def _levels(self) -> Levels:
        """How much is kept in the step under way."""
        if self._full is not None and self._full.due(self.step):
            return Levels(self._detail, full=True)
        zoomed = self._requests.due(self.step) if self._requests is not None else None
        if zoomed:
            return Levels(self._detail, full=zoomed)
        return self._sparing

    def detach(self) -> None:
        """Take the hooks off; the step goes on."""
        for capture in (self._capture, self._hooked):
            if capture is not None:
                capture.detach()
        self._hooked = None

    def discard(self) -> None:
        """Forget what was recorded of the step under way."""
        self.detach()
        self._capture = None

    def end_step(self, go_on: bool = False) -> bool:
        """End the step under way and hand it on if it was due. Returns whether it was.

        ``go_on`` begins the next step, as `attach` does; hooks that are on stay on for it.
        """
        if self._capture is not None:
            self._capture.raise_interrupt()
        if self.forked:
            self._notices.forked()
        self.step += 1
        self._buffers.keep = self.due
        step = self._finish(keep_hooks=go_on and self.due)
        if go_on:
            # Before the writer's thread is woken, with which the interpreter then has to be shared.
            self.attach()
        written = step is not None and self._guard(lambda sink: sink.put(step))
        if self.run is not None and self.run.dropped:
            self._notices.dropped(self.run)
        self._notices.tell()
        return written

    def _finish(self, keep_hooks: bool) -> Step | None:
        """What was recorded of the step that ends; `None` where it was not due."""
        # Never out of reach: an interrupt in what follows must find the hooks.
        capture = self._hooked = self._capture
        self._capture = None
        if capture is None or self._sink is None:
            return None
        self._notices.called(capture)
        if capture.empty:
            self.detach()
            self._layers.look()
            return None
        scale = self.loss_scale if math.isfinite(self.loss_scale) and self.loss_scale > 0 else 1.0
        step = capture.finish(self._rank, scale, detach=not keep_hooks)
        if not keep_hooks:
            self._hooked = None
        self._notices.left_out(capture)
        info = self._with_autocast(self._info, capture.autocast)
        changed = self._layers.settle()
        if changed:
            info = self._with_layers(info)
        if info is not self._info:
            self._info = info
            self._sink.describe(info)
        if not capture.called:
            self._layers.look()  # as a whole the model may have become another one, of which nothing is hooked
        elif changed:
            self._notices.changed(capture, self._layers.changes)
        self._notices.stepped(capture)
        return step

    def _with_autocast(self, info: RunInfo, autocast: Mapping[str, Any]) -> RunInfo:
        """Autocast is on inside of the loop only: what a first recorded call sees is what the training has."""
        if self._autocast_known or not autocast:
            return info
        self._autocast_known = True
        known = info.environment
        same = all(known.get(name) == value for name, value in autocast.items())
        return info if same else replace(info, environment={**known, **autocast})

    def _with_layers(self, info: RunInfo) -> RunInfo:
        """The layers as they are now."""
        self._views.clear()  # they keep the parameters that they are of
        layers = self._layers
        recording = {**info.recording, "layers": len(layers.chosen)}
        return replace(info, layers=layers.described(), layer_map=layers.mapped, recording=recording)

    def mark(self, step: int, badness: float) -> None:
        """Say how bad a recorded step is: under ``max_bytes`` the worst ones are kept."""
        if isinstance(self._sink, RunWriter):
            self._sink.mark(step, badness)

    def flush(self) -> None:
        """Wait until every finished step is written."""
        self._guard(lambda sink: sink.flush())

    def close(self, finished: bool = True, raise_errors: bool = True) -> None:
        """Take the hooks off, write what is finished, free the model. May be called twice."""
        self.discard()
        if self._mark is not None:
            self._mark.remove()
            self._mark = None
        if self._sink is None:
            return
        try:
            if self.active:
                if self._guard(lambda sink: sink.close(finished)) and finished:
                    self._say_what_is_there()
            else:  # it was told already, and a run that was given up is not finished
                with contextlib.suppress(WriterError):
                    self._sink.close(finished=False)
        except WriterError:
            # In a `with` that is left by an exception, that exception is the one to see.
            if raise_errors:
                raise
        finally:
            self._sink = None
            self._buffers.clear()
            self._views.clear()

    def _say_what_is_there(self) -> None:
        if self._dir_path is None or self._rank or self.watched:
            return
        count, size = len(self._written), sum(self._written.values())
        if not count:
            why = "none was due, or nothing of the model was called in those that were"
            say(f"recorded no step in {self._dir_path}: {why}")
            return
        of_rank = f" of rank 0 of {self._info.world_size}" if self._info.world_size > 1 else ""
        say(f"recorded {count} step{'s' if count > 1 else ''}, {bytes_text(size)}{of_rank}, in {self._dir_path}")

    def __str__(self) -> str:
        place = f"into {self._dir_path}" if self._dir_path is not None else "in memory"
        due = f"every {self._schedule.every} steps" if self._schedule.steps is None else "at chosen steps"
        written = len(self.run.numbers()) if self.run is not None else len(self._written)
        state = "recording" if self._sink is not None else "closed"
        return (
            f"{state} {type(self._model).__name__} ({self._framework.name}) {place}, {due}: step {self.step} is under "
            f"way, {written} recorded"
        )

    def __repr__(self) -> str:
        return f"<Recorder {self}>"

    def leave_in_fork(self) -> None:
        """The run is the parent's, whose thread writes it: hooks off, the model free, nothing is recorded any more."""
        self.forked = True
        _of_the_parent.append((self._capture, self._hooked, self._sink, dict(self._views)))
        self.detach()
        self._capture = self._sink = None
        if self._mark is not None:
            self._mark.remove()
            self._mark = None

    def _guard(self, call: Callable[[Sink], None]) -> bool:
        if self._sink is None:
            return False
        try:
            call(self._sink)
        except WriterError as error:
            self.active = False
            self.discard()
            if self._target.on_error == "raise":
                raise
            warnings.warn(f"padiff stops recording, the training goes on: {error}", RuntimeWarning, stacklevel=4)
            return False
        return True
