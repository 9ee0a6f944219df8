"""Where a recorder's steps go, and what a writing error does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from padiff.dump.budget import size_of
from padiff.dump.format import STEPS
from padiff.dump.local import absolute, run_folder, shown
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.remote_write import StoreWriter
from padiff.dump.spool import SpoolOfStep, Spools
from padiff.dump.storage import Storage
from padiff.dump.store import StoreError
from padiff.dump.write import RunWriter
from padiff.errors import PadiffError, UnwritableFolderError, WriterError
from padiff.frameworks.base import Framework
from padiff.recorder.array_pool import ArrayPool
from padiff.recorder.copying import SMALL_BYTES, SMALL_SHARE, Copier
from padiff.recorder.detail import Detail
from padiff.recorder.known import Known
from padiff.recorder.memory import MemoryRun
from padiff.recorder.options import Target
from padiff.recorder.record_buffer import RecordBuffer
from padiff.records import RunInfo, Step, Storable, bytes_text
from padiff.records.pack import Pack
from padiff.sketches.cuts import Kind
from padiff.sketches.samples import Samples
from padiff.system.switches import say
from padiff.system.warn import warn


class Sink(Protocol):
    """What takes finished steps."""

    def put(self, step: Step, pack: Pack | None = None) -> None: ...

    def describe(self, info: RunInfo) -> None: ...

    def flush(self) -> None: ...

    def close(self, finished: bool = True) -> None: ...


class Output:
    """A run folder, or a run in memory, that finished steps go to.

    Args:
        target: where to, and what a writing error does.
        detail: what is kept.

    Attributes:
        folder: the run folder, `None` where the run is kept in memory.
        run: the run in memory.
        sink: what takes the steps; `None` while it is not open.
        active: false once recording has stopped after an error.
        pool: memory for a step's copies, which comes back when the step is written.
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
        self._known = Known()
        self._spools: Spools | None = None

    def _aim(self, target: Target) -> None:
        self._target, detail = target, self._detail
        self._storage = Storage.of(
            target.pack, target.compression, target.max_bytes, detail.sketches, mixed=detail.automatic
        )
        self.folder = None if target.dir_path is None else absolute(run_folder(target.dir_path, "dir_path"))
        if isinstance(self.folder, RemotePath):
            self._storage = self._storage.in_store(target.pack)

    def move(self, dir_path: str | AnyPath, info: RunInfo, rank: int) -> None:
        """Write to a folder from now on, instead of keeping in memory a run that has no step yet.

        Raises:
            UsageError, RunFolderError: as `open`.
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
        """Return True if a caller names the folder by this path: the working directory may have changed since."""
        if self.folder is None or str(dir_path) == str(self._target.dir_path):
            return self.folder is not None
        return absolute(run_folder(dir_path, "dir_path")) == self.folder

    def size_before(self) -> int:
        """Bytes of steps that a run has which is gone on with."""
        if self.folder is None or self._target.existing != "resume":
            return 0
        return size_of(self.folder / STEPS)

    def open(self, info: RunInfo, rank: int) -> None:
        """Make the run.

        Raises:
            RunFolderError: the folder can't be recorded into (but with ``on_error="warn"``, where it can't be written
                to).
        """
        if self.folder is None:
            self.run = self.sink = MemoryRun(info, self._storage.max_bytes)
            return
        options: dict[str, Any] = {
            "rank": rank,
            "storage": self._storage,
            "existing": self._target.existing,
            "on_written": self._target.on_written,
            "on_done": self.pool.recycle,
        }
        try:
            writer: RunWriter
            if isinstance(self.folder, RemotePath):
                writer = StoreWriter(self.folder, info, **options)
            else:
                writer = RunWriter(self.folder, info, **options)
        except UnwritableFolderError as error:
            # A store that does not answer is none that was named wrongly: it costs records only.
            if self._target.on_error != "warn" and not isinstance(error.__cause__, StoreError):
                raise
            self.active = False
            warn(f"padiff: nothing is recorded, the training goes on: {error}")
            return
        self.sink, self._sizes = writer, writer.written
        # Elsewhere it is decided later what of a step is stored, and whether there is room for it.
        storage = self._storage
        if storage.pack and not (storage.compression or storage.mixed or storage.max_bytes) and info.world_size == 1:
            self._spools = None if isinstance(self.folder, RemotePath) else Spools(self.folder / STEPS, info)

    def records(self, framework: Framework) -> RecordBuffer:
        """For a step's records. In memory its arrays stay with the run, on their way to a folder they come back."""
        empty, take_back = (np.empty, None) if self.run is not None else (self.pool.empty, self.pool.take_back)
        limit = self._storage.max_bytes
        room = SMALL_BYTES if limit is None else min(SMALL_BYTES, limit * SMALL_SHARE)
        samples = Samples(empty, take_back, framework.tensors.fetch, self._counts)
        return RecordBuffer(Copier(framework, empty, samples, room, self._keep()), self._known)

    def _keep(self) -> Callable[[Storable], np.ndarray | None] | None:
        """What writes a step's tensors into its file as they are copied, where that can be done."""
        if self._spools is None or not self._spools.useful:
            return None
        return SpoolOfStep(self._spools).keep

    def do(self, call: Callable[[Sink], None]) -> bool:
        """Hand something on to the sink. Returns whether that went well.

        Raises:
            WriterError: it did not (with ``on_error="raise"``).
        """
        if self.sink is None:
            return False
        try:
            call(self.sink)
        except WriterError as error:
            self.active = False
            if self._target.on_error == "raise":
                raise
            warn(f"padiff: recording stops, the training goes on: {error}")
            return False
        return True

    def mark(self, step: int, severity: float) -> None:
        """Say how bad a recorded step is: under ``max_bytes`` the worst ones are kept."""
        if isinstance(self.sink, RunWriter):
            self.sink.mark(step, severity)

    def close(self, finished: bool) -> bool:
        """Write what is left. Returns whether the run is finished now."""
        if self.sink is None:
            return False
        try:
            if self.active:
                return self.do(lambda sink: sink.close(finished)) and finished
            # The error was said already, and a run that was given up is not finished.
            with contextlib.suppress(WriterError):
                self.sink.close(finished=False)
            return False
        finally:
            self.sink = None
            self.forget()
            self.pool.clear()

    def forget(self) -> None:
        """Forget what steps so far had in common, and with it the layers."""
        self._known = Known()

    def say_what_is_there(self, processes: int) -> None:
        """Say on standard error what was recorded into the folder by the first of so many processes."""
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
        """How many steps there are."""
        return len(self.run.numbers() if self.run is not None else self._sizes)
