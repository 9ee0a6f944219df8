"""The output of a recorder: a run folder, a run in memory or a proxy's dumps, and the handling of writing errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from padiff.dump.format import STEPS
from padiff.dump.medium import size_of
from padiff.dump.remote_write import StoreWriter
from padiff.dump.storage import Storage
from padiff.dump.store import AnyPath, StoreError, absolute, as_local, as_remote, run_folder, shown
from padiff.dump.write import RunWriter
from padiff.errors import PadiffError, UnwritableFolderError, UsageError, WriterError
from padiff.frameworks.base import Framework
from padiff.recorder.copying import SMALL_BYTES, SMALL_SHARE, Copier
from padiff.recorder.options import Detail, Schedule, Target
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.tensor_copy import StepCache
from padiff.records import (
    RunInfo,
    Sketched,
    Step,
    bytes_text,
    make_sketches,
    run_card,
    run_line,
    run_text,
    sources_of,
)
from padiff.records.traces import Pack
from padiff.sketches.samples import Samples
from padiff.sketches.sketch import Kind
from padiff.system.terminal import say, warn

#: Default maximum size of a run in memory, in bytes.
MAX_BYTES = 1_000_000_000


class MemoryRun:
    """A `Run` whose steps are in memory; ``record(model)`` without a folder makes one.

    Args:
        info: facts that hold for all steps.
        max_bytes: maximum size in bytes. Above it the oldest steps are dropped, except the first step of the run and
            the latest one. Default: `MAX_BYTES`.

    Attributes:
        max_bytes: maximum size in bytes.
        dropped: numbers of the dropped steps.
        packs: replay packs, by step number.
    """

    def __init__(self, info: RunInfo, max_bytes: float | None = None) -> None:
        self._info = info
        self.max_bytes = MAX_BYTES if max_bytes is None else max_bytes
        self.dropped: list[int] = []
        self._steps: dict[int, Step] = {}
        self._sizes: dict[int, int] = {}
        self.packs: dict[int, Pack] = {}
        self._finished = False

    @property
    def name(self) -> str:
        return self._info.name or self._info.framework

    @property
    def info(self) -> RunInfo:
        return self._info

    def numbers(self) -> list[int]:
        return sorted(self._steps)

    def steps(self, number: int) -> list[Step]:
        return [self._steps[number]]

    def finished(self) -> bool:
        return self._finished

    def __str__(self) -> str:
        return run_text(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows for the run."""
        return run_card(self)

    def __repr__(self) -> str:
        return f"<MemoryRun: {run_line(self)}>"

    # The methods of `padiff.recorder.output.Sink`, as in the writer of a folder.

    def add_step(self, step: Step, pack: Pack | None = None) -> None:
        make_sketches(step)
        self._steps[step.number] = step
        self._sizes[step.number] = bytes_of(step)
        if pack is not None:
            self.packs[step.number] = pack
            self._sizes[step.number] += pack.nbytes
        for number in self.numbers()[1:-1]:
            if sum(self._sizes.values()) <= self.max_bytes:
                break
            del self._steps[number], self._sizes[number]
            self.packs.pop(number, None)
            self.dropped.append(number)

    def set_info(self, info: RunInfo) -> None:
        self._info = info

    def flush(self) -> None:
        pass

    def close(self, finished: bool = True) -> None:
        self._finished = finished


def bytes_of(step: Step) -> int:
    """Return the size of a step's values in bytes; arrays that several records share count once."""
    arrays = [a for s in sources_of(step) for a in ([s.row] if isinstance(s, Sketched) else s.arrays)]
    return sum({id(array): array.nbytes for array in arrays}.values())


class Sink(Protocol):
    """Destination of finished steps."""

    def add_step(self, step: Step, pack: Pack | None = None) -> None: ...

    def set_info(self, info: RunInfo) -> None: ...

    def flush(self) -> None: ...

    def close(self, finished: bool = True) -> None: ...


class Output:
    """The run folder, or the run in memory, that finished steps are handed to.

    Args:
        target: options of storing steps.
        detail: recording levels.

    Attributes:
        folder: the run folder; `None` for a run in memory.
        run: the run in memory; `None` for a folder, and before `open`.
        sink: destination of the steps; `None` while the output is not open.
        active: False once recording has stopped after an error.
    """

    def __init__(self, target: Target, detail: Detail) -> None:
        self._detail = detail
        self._aim(target)
        self.run: MemoryRun | None = None
        self.sink: Sink | None = None
        self.active = True
        #: Bytes of each step that this process wrote.
        self._sizes: Mapping[int, int] = {}
        self._counts: dict[Kind, int] = {}
        self._known = StepCache()

    def _aim(self, target: Target) -> None:
        self._target, detail = target, self._detail
        self._storage = Storage.from_options(
            target.pack, target.compression, target.max_bytes, detail.sketches, mixed=detail.automatic
        )
        self.folder = None if target.dir_path is None else absolute(run_folder(target.dir_path, "dir_path"))
        if self.folder is not None and as_local(self.folder) is None:
            self._storage = self._storage.in_store(target.pack)

    def move(self, dir_path: str | AnyPath, info: RunInfo, rank: int) -> None:
        """Change a run in memory that has no step yet to a run in a folder.

        Raises:
            UsageError: the folder's name or the options of the run are wrong.
            RunFolderError: the folder cannot be recorded into.
        """
        before, run = self._target, self.run
        try:
            self._aim(replace(before, dir_path=dir_path))
            self.run = self.sink = None
            self.open(info, rank)
        except PadiffError:
            self._aim(before)
            self.run = self.sink = run
            raise

    def is_named(self, dir_path: str | AnyPath) -> bool:
        """Return True if ``dir_path`` names the folder, also after a change of the working directory."""
        if self.folder is None or str(dir_path) == str(self._target.dir_path):
            return self.folder is not None
        return absolute(run_folder(dir_path, "dir_path")) == self.folder

    def size_before(self) -> int:
        """Return the size in bytes of the steps already on disk if a run is resumed, else 0."""
        if self.folder is None or self._target.existing != "resume":
            return 0
        return size_of(self.folder / STEPS)

    def open(self, info: RunInfo, rank: int) -> None:
        """Create the run folder or the run in memory.

        Raises:
            RunFolderError: the folder cannot be recorded into. If the folder is only not writable,
                ``on_error="warn"`` makes this a warning.
        """
        if self.folder is None:
            self.run = self.sink = MemoryRun(info, self._storage.max_bytes)
            return
        options: dict[str, Any] = {
            "rank": rank,
            "storage": self._storage,
            "existing": self._target.existing,
            "on_written": self._target.on_written,
        }
        try:
            remote = as_remote(self.folder)
            writer = RunWriter(self.folder, info, **options) if remote is None else StoreWriter(remote, info, **options)
        except UnwritableFolderError as error:
            # A store that does not answer is no mistake in its name: it costs the records, not the training.
            if self._target.on_error != "warn" and not isinstance(error.__cause__, StoreError):
                raise
            self.active = False
            warn(f"nothing is recorded, the training goes on: {error}")
            return
        self.sink, self._sizes = writer, writer.written

    def records(self, framework: Framework) -> RecordBuffer:
        """Return a new buffer for the records of a step."""
        limit = self._storage.max_bytes
        room = SMALL_BYTES if limit is None else min(SMALL_BYTES, limit * SMALL_SHARE)
        samples = Samples(bring=framework.tensors.fetch, counts=self._counts)
        return RecordBuffer(Copier(framework, samples, room), self._known)

    def do(self, call: Callable[[Sink], None]) -> bool:
        """Call a function with the sink. Returns True if there was a sink and no error.

        Raises:
            WriterError: a step could not be written (with ``on_error="raise"``).
        """
        if self.sink is None:
            return False
        try:
            call(self.sink)
        except WriterError as error:
            self.active = False
            if self._target.on_error == "raise":
                raise
            warn(f"recording stops, the training goes on: {error}")
            return False
        return True

    def mark(self, step: int, severity: float) -> None:
        """Set the severity of a recorded step: with ``max_bytes``, the most severe steps are not deleted."""
        if isinstance(self.sink, RunWriter):
            self.sink.mark(step, severity)

    def close(self, finished: bool) -> bool:
        """Write the remaining steps and close the sink. Returns True if the run is finished."""
        if self.sink is None:
            return False
        try:
            if self.active:
                return self.do(lambda sink: sink.close(finished)) and finished
            # The error was reported already, and a run that was stopped by it is not finished.
            with contextlib.suppress(WriterError):
                self.sink.close(finished=False)
            return False
        finally:
            self.sink = None
            self.forget()

    def forget(self) -> None:
        """Drop the cache of facts from earlier steps, which refers to the layers."""
        self._known = StepCache()

    def say_what_is_there(self, processes: int) -> None:
        """Print the number and size of the recorded steps to standard error; called by rank 0 of ``processes``."""
        if self.folder is None:
            return
        count, size = len(self._sizes), sum(self._sizes.values())
        if not count:
            why = "none was due, or nothing of the model was called in those that were"
            say(f"recorded no step in {shown(self.folder)}: {why}")
            return
        of_rank = f" of rank 0 of {processes}" if processes > 1 else ""
        say(f"recorded {count} step{'s' if count > 1 else ''}, {bytes_text(size)}{of_rank}, in {shown(self.folder)}")

    def __len__(self) -> int:
        """Return the number of recorded steps."""
        return len(self.run.numbers() if self.run is not None else self._sizes)


def unwrapped(
    model: Any, white_list: Iterable[Any] | None, black_list: Iterable[Any] | None, layer_map: Sequence[Any] | None
) -> tuple[Any, Iterable[Any] | None, Iterable[Any] | None, Sequence[Any] | None]:
    """Return the model inside of a proxy, with the proxy's lists and layer map as defaults.

    A model that is no proxy is returned unchanged. The class is checked, as some models have every attribute. A white
    list makes a black list void, so the proxy's two lists are used together, if both arguments are `None`.
    """
    if not hasattr(type(model), "padiff_model"):
        return model, white_list, black_list, layer_map
    if white_list is None and black_list is None:
        white_list, black_list = model.padiff_lists
    return model.padiff_model, white_list, black_list, model.padiff_layer_map if layer_map is None else layer_map


def dump_arguments(per_step: Any, dir_path: Any) -> tuple[int | None, Any]:
    """Return the step interval and the folder from the arguments of a proxy's ``try_dump``.

    Raises:
        UsageError: the step interval is not a whole number of at least 1.
    """
    if isinstance(per_step, (str, os.PathLike)):
        return None, per_step
    if per_step is not None and (isinstance(per_step, bool) or not isinstance(per_step, int) or per_step < 1):
        raise UsageError(f"per_step has to be a whole number of at least 1, got {per_step!r}")
    return per_step, dir_path


def check_as_made(per_step: int | None, dir_path: Any, schedule: Schedule, output: Output) -> None:
    """Check that the arguments of a proxy's ``try_dump`` agree with the options of the recorder.

    Raises:
        UsageError: the folder or the step interval differs.
    """
    if dir_path is not None and not output.is_named(dir_path):
        folder = output.folder
        raise UsageError(
            f"try_dump: this recorder {f'writes to {shown(folder)}' if folder else 'keeps its steps in memory'}, not "
            f"in {dir_path}: give the folder to padiff.record(model, dir_path), or to the first try_dump"
        )
    if per_step is not None and (schedule.steps is not None or schedule.every != per_step):
        raise UsageError(
            f"try_dump: this recorder was made with every_n_steps={schedule.described()!r}, not with "
            f"per_step={per_step}. Give padiff.record every_n_steps={per_step} (steps 0, {per_step}, ...), or "
            f"every_n_steps=padiff.Schedule(every={per_step}, first={per_step - 1}), which are the steps that a "
            f"proxy's per_step={per_step} dumps"
        )
