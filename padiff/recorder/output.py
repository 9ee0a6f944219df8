"""The output of a recorder: a run folder or a run in memory, and the handling of writing errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from padiff.dump.format import STEPS
from padiff.dump.local import absolute, run_folder, shown
from padiff.dump.medium import size_of
from padiff.dump.remote_path import AnyPath, as_local, as_remote
from padiff.dump.remote_write import StoreWriter
from padiff.dump.spool import PreallocatedFiles, SpoolOfStep
from padiff.dump.storage import Storage
from padiff.dump.store import StoreError
from padiff.dump.write import RunWriter
from padiff.errors import PadiffError, UnwritableFolderError, WriterError
from padiff.frameworks.base import Framework
from padiff.recorder.array_pool import ArrayPool
from padiff.recorder.copying import SMALL_BYTES, SMALL_SHARE, Copier
from padiff.recorder.detail import Detail
from padiff.recorder.memory import MemoryRun
from padiff.recorder.options import Target
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.step_cache import StepCache
from padiff.records import RunInfo, Step, Storable, bytes_text
from padiff.records.pack import Pack
from padiff.sketches.cuts import Kind
from padiff.sketches.samples import Samples
from padiff.system.switches import say
from padiff.system.warn import warn


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
        pool: pool of memory for copies, which is used again after a step is written.
    """

    def __init__(self, target: Target, detail: Detail) -> None:
        self._detail = detail
        self._aim(target)
        self.run: MemoryRun | None = None
        self.sink: Sink | None = None
        self.active = True
        self.pool = ArrayPool()
        #: Bytes of each step that this process wrote.
        self._sizes: Mapping[int, int] = {}
        self._counts: dict[Kind, int] = {}
        self._known = StepCache()
        self._spools: PreallocatedFiles | None = None

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
        local = as_local(self.folder)
        options: dict[str, Any] = {
            "rank": rank,
            "storage": self._storage,
            "existing": self._target.existing,
            "on_written": self._target.on_written,
            "on_done": self.pool.recycle,
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
        # In all other cases it is only decided at the end of a step what is stored, and if there is space for the step.
        storage = self._storage
        if storage.pack and not (storage.compression or storage.mixed or storage.max_bytes) and info.world_size == 1:
            self._spools = None if local is None else PreallocatedFiles(local / STEPS, info)

    def records(self, framework: Framework) -> RecordBuffer:
        """Return a new buffer for the records of a step.

        Arrays of a run in memory stay with the run; arrays that are written to a folder return to the pool.
        """
        empty, take_back = (np.empty, None) if self.run is not None else (self.pool.empty, self.pool.take_back)
        limit = self._storage.max_bytes
        room = SMALL_BYTES if limit is None else min(SMALL_BYTES, limit * SMALL_SHARE)
        samples = Samples(empty, take_back, framework.tensors.fetch, self._counts)
        return RecordBuffer(Copier(framework, empty, samples, room, self._keep()), self._known)

    def _keep(self) -> Callable[[Storable], np.ndarray | None] | None:
        """Return the function that writes tensors into the step's file as they are copied, or None without one."""
        if self._spools is None or not self._spools.useful:
            return None
        return SpoolOfStep(self._spools).keep

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
            self.pool.clear()

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
