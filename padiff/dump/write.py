"""The writer of run folders: a background thread with a bounded queue, flushed when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import errno
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from padiff.dump.deduplication import PACKED_FILE, REPLAY_FILE, Deduplication, RankDedup, fold
from padiff.dump.format import FINISHED_FILE, FLOORS, PACKS, RUN_FILE, SCHEMA_VERSION, STEPS, step_folder
from padiff.dump.lock import register_fork_cleanup
from padiff.dump.medium import medium_of, size_of, write_json, write_part
from padiff.dump.pack import PackWriter
from padiff.dump.prepare import Budget, identity_for, prepare, settings_for
from padiff.dump.step_files import PLAIN, run_to_json, write_dump
from padiff.dump.storage import Storage
from padiff.dump.store import AnyPath, as_local, local_only
from padiff.dump.weight_files import room_of, write_pack
from padiff.errors import PadiffError, RunFolderError, UnwritableFolderError, UsageError, WriterError
from padiff.records import RunInfo, Step, make_sketches, settings_at, settings_delta
from padiff.records.traces import Pack

#: Seconds that the interpreter waits at its end for all writers together.
AT_EXIT = 60.0


class Writer(Protocol):
    """A writer that can be flushed at exit."""

    @property
    def path(self) -> AnyPath: ...

    def write_remaining(self, seconds: float) -> None:
        """Write the queued steps, for ``seconds`` at most."""


# Weak references, so that a dropped writer is freed with its queue.
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
_registered: list[bool] = []


def register(writer: Writer) -> None:
    """Register a writer to be flushed at exit."""
    _writers.add(writer)
    if not _registered:
        # Registered late, not on import: exit functions run in reverse order, so padiff's run before the frameworks'.
        _registered.append(True)
        atexit.register(_flush_all)


def unregister(writer: Writer) -> None:
    """Remove a closed writer from those flushed at exit."""
    _writers.discard(writer)


def _flush_all() -> None:
    until = time.monotonic() + AT_EXIT
    for writer in list(_writers):
        message = (
            f"padiff: the recorder of {writer.path} was never closed (leave its `with`, or call close()). What it had "
            "recorded was written now, and the run is not marked as finished"
        )
        try:
            writer.write_remaining(max(0.1, until - time.monotonic()))
        except WriterError as error:
            message += f"; but {error}"
        print(message, file=sys.stderr)  # no warning: turned into an error, it would be lost this late


_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_READ_ONLY = {
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "the folder is read-only for this user",
    errno.EPERM: "the folder is read-only for this user",
}
_HANDLES = {errno.EMFILE: "too many open files in this process", errno.ENFILE: "too many open files on this machine"}
_LOST = frozenset(
    {errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT}
)


def explain_os_error(error: BaseException, folder: AnyPath) -> tuple[str, str]:
    """Return the cause of an error in a run folder, and what to do; both without a full stop."""
    if as_local(folder) is None:
        return str(error) or type(
            error
        ).__name__, "Check the address, the credentials and the network, or give another place"
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return (
            f"{_FULL[number]} ({error})",
            "Free space there, record less (every_n_steps, white_list), or give a folder on another disk",
        )
    if number == errno.EFBIG:
        return (
            f"a file grew beyond what this process may write, or the file system takes ({error})",
            "Raise the limit (`ulimit -f`), or record less (white_list)",
        )
    if number in _READ_ONLY:
        return f"{_READ_ONLY[number]} ({error})", "Make it writable, or give another folder"
    if number in _HANDLES:
        return (
            f"{_HANDLES[number]} ({error})",
            "Raise the limit (`ulimit -n`), or look for what leaves files open: loader workers, sockets, logs",
        )
    if number in _LOST or (number in (errno.ENOENT, errno.ENOTDIR) and not folder.is_dir()):
        return (
            f"the run folder is gone: removed, moved away, or on a network drive that is away ({error})",
            "Bring it back and go on with existing='resume', or give another folder",
        )
    if number in (errno.ENOENT, errno.ENOTDIR):
        return (
            f"the run folder is gone, at least in part: something removed or replaced files of it ({error})",
            "Leave it alone while it is recorded into; go on with existing='resume', or give another folder",
        )
    if number == errno.EIO:
        return f"the disk or network drive reports an error ({error})", "Check it, or give a folder on another disk"
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return (
            f"memory ran out ({error or type(error).__name__})",
            "Record less (white_list, every_n_steps), or free memory",
        )
    text = str(error)
    return (
        text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"
    ), "Mend it, or give another folder"


#: Steps that may wait for the disk; with more, the training loop waits. So memory holds three steps at most: one being
#: recorded, one queued, one being written.
QUEUED_STEPS = 1


class RunWriter:
    """Writer of steps into a run folder, on a background thread. In a fork of its process all calls do nothing.

    Args:
        path: the run folder; created if it does not exist.
        info: description of the run (framework, layers, settings), common to all steps.
        rank: rank of this process; rank 0 also writes ``run.json``.
        storage: storage options; steps with sketches have to be packed.
        existing: ``error``, ``resume`` or ``overwrite`` if the folder already holds a run.
        on_written: called on the writer's thread with each step after it is written.

    Raises:
        UsageError: ``existing`` is none of the three.
        RunFolderError: the folder holds a run (with ``error``), another model's run (with ``resume``), or files
            that are no run; or another process records into it.
        UnwritableFolderError: the folder cannot be created, or not be written to.
    """

    def __init__(
        self,
        path: AnyPath,
        info: RunInfo,
        *,
        rank: int = 0,
        storage: Storage = PLAIN,
        existing: str = "error",
        on_written: Callable[[Step], None] | None = None,
    ) -> None:
        if existing not in ("error", "resume", "overwrite"):
            raise UsageError(f"existing is 'error', 'resume' or 'overwrite', got {existing!r}")
        self.path: AnyPath = Path(path) if isinstance(path, str) else path
        self._medium = medium_of(self.path)
        #: The current description, and the one in ``run.json``; each queued step carries its own.
        self._info = self._described = info
        #: The settings in ``run.json`` of a resumed run, which must not change as earlier steps refer to them.
        self._kept: Mapping[str, Any] | None = None
        self._given = info.settings
        self._rank = rank
        self._replace = existing != "error"
        self._on_written = on_written
        self._deduplication = Deduplication(info)
        #: Steps that this process wrote -> bytes of the latest write of each.
        self.written: dict[int, int] = {}
        self._pack = (
            PackWriter(self.path, self._deduplication, storage.compression, info.world_size) if storage.pack else None
        )
        self._error: BaseException | None = None
        self._failed = ""
        self._queue: queue.Queue[Waiting | None] = queue.Queue(maxsize=QUEUED_STEPS)
        try:
            self._lock = prepare(self.path, info, rank, existing)
            try:
                if rank == 0:
                    self._kept = settings_for(self.path, existing)
                    self._info = self._described = self._identified(info, identity_for(self.path, existing))
                    write_json(self.path / RUN_FILE, run_to_json(self._info))
            except BaseException:
                self._lock.release()
                raise
        except RunFolderError:
            raise
        except OSError as error:
            what, remedy = explain_os_error(error, self.path)
            raise UnwritableFolderError(f"cannot make the run folder {self.path}: {what}. {remedy}") from error
        self._mixed = storage.mixed
        limited = storage.max_bytes is not None and rank == 0
        self._budget = Budget(self.path, storage.max_bytes or 0, info.world_size) if limited else None
        # The thread holds the writer by a weak reference: a recorder that is dropped without being closed (a host that
        # did not pass an exception to its callback) is freed, and its thread ends.
        work = (weakref.ref(self), self._queue)
        self._thread = threading.Thread(target=_work, args=work, name="padiff-writer", daemon=True)
        self._thread.start()
        self._ending = weakref.finalize(self, _end_thread, self._queue)
        self._ending.atexit = False
        self._left = False
        register_fork_cleanup(self)
        register(self)

    # -- called by the training loop -----------------------------------------------------------------------

    def add_step(self, step: Step, pack: Pack | None = None) -> None:
        """Queue a step for writing; wait only while `QUEUED_STEPS` other steps are in the queue.

        Args:
            pack: the data to replay the step, if it was recorded.

        Raises:
            WriterError: an earlier step could not be written, or the run already has a step of this number.
        """
        if self._left:
            return
        self._raise_error()
        if not self._replace and self._is_there(step.number):
            raise WriterError(
                f"step {step.number} stands in {self.path} already: two recorders write into one run folder, or a "
                "step was ended twice. Give each run a folder of its own, or existing='resume' to replace steps"
            )
        if self._kept is not None and not self._rank:
            settings = settings_delta(self._kept, settings_at(self._given, step.settings))
            step = replace(step, settings=settings)
        self._enqueue((step, self._info, pack))

    def set_info(self, info: RunInfo) -> None:
        """Replace the run's description, which is written with the next step. Earlier steps keep their layer trees."""
        self._given = info.settings
        self._info = self._identified(info, self._info.identity)

    def _identified(self, info: RunInfo, identity: str) -> RunInfo:
        return replace(info, identity=identity, settings=info.settings if self._kept is None else self._kept)

    def mark(self, number: int, severity: float) -> None:
        """Set the severity of a step's differences; if the folder's size is limited, the worst steps are kept."""
        if self._budget is not None:
            self._budget.mark(number, severity)

    def flush(self) -> None:
        """Wait until every queued step is written."""
        if self._left:
            return
        self._queue.join()
        self._raise_error()

    def close(self, finished: bool = True) -> None:
        """Write the queued steps, end the thread and release the folder.

        Args:
            finished: mark the run as complete: no further step will come.

        Raises:
            WriterError: a step, or the mark, could not be written.
        """
        if self._left:
            return
        unregister(self)
        self._queue.put(None)
        self._thread.join()
        try:
            self._raise_error()
            if self._rank == 0 and (finished or self._info is not self._described):
                try:
                    self._lock.check_held()
                    if self._info is not self._described:
                        write_json(self.path / RUN_FILE, run_to_json(self._info))
                    if finished:
                        write_json(self.path / FINISHED_FILE, {"schema_version": SCHEMA_VERSION})
                except (OSError, RunFolderError) as error:
                    self._error, self._failed = error, "the note that the run has ended"
                    self._raise_error()
        finally:
            self._lock.release()

    def write_remaining(self, seconds: float) -> None:
        """Write the queued steps and release the folder, for a recorder that was not closed.

        Args:
            seconds: timeout.

        Raises:
            WriterError: a step could not be written, or not in time.
        """
        until = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            raise WriterError(f"steps that were still being written after {seconds:g} seconds are lost")
        self._lock.release()
        self._raise_error()

    def leave_in_fork(self) -> None:
        """Disable this copy of the writer: a fork has no writer thread, and the queue's lock may stay locked."""
        self._left = True
        self._ending.detach()
        unregister(self)

    def _raise_error(self) -> None:
        if self._error is None:
            return
        error, self._error = self._error, None
        goes_on = "on_error='warn' lets the training go on without recording"
        if not self._failed:
            raise WriterError(
                f"the steps in {self.path} are whole, but what follows on a written step (comparing it, TensorBoard) "
                f"failed: {type(error).__name__}: {error}. {goes_on}"
            ) from error
        what, remedy = (str(error), "") if isinstance(error, PadiffError) else explain_os_error(error, self.path)
        raise WriterError(
            f"{self._failed} could not be written to {self.path}: {what}. The steps before it are whole. "
            f"{remedy}; {goes_on}".replace(" ; ", " ")
        ) from error

    def _is_there(self, number: int) -> bool:
        return self._step_path(number).exists()

    def _enqueue(self, waiting: Waiting) -> None:
        self._queue.put(waiting)

    def _step_path(self, number: int) -> AnyPath:
        return self.path / STEPS / step_folder(number)

    # -- the thread ----------------------------------------------------------------------------------------

    def _handle(self, step: Step, info: RunInfo, pack: Pack | None) -> None:
        try:
            if self._error is None:
                self._failed = f"step {step.number}"
                self._store(step, info, pack)
                self._failed = ""
                if self._on_written is not None:
                    self._on_written(step)
        except BaseException as error:  # the training loop raises it in its next call
            if not self._is_survived(error, step):
                self._error = error

    def _store(self, step: Step, info: RunInfo, pack: Pack | None) -> None:
        self._lock.check_held()
        if info is not self._described:
            if self._rank == 0:
                write_json(self.path / RUN_FILE, run_to_json(info))
            self._deduplication.follow(info)
            self._described = info
        make_sketches(step)
        self._write(step, pack)

    def _is_survived(self, error: BaseException, step: Step) -> bool:
        """Return True if recording can go on after an error: only this step is lost."""
        return False

    def _write(self, step: Step, pack: Pack | None) -> None:
        """Write a step atomically, after its pack. Make room first if the folder's size is limited."""
        final = self._step_path(step.number)
        ranks = self._described.world_size
        if self._budget is not None:
            self._budget.make_room(step, self._drop, 0 if pack is None else room_of(pack))
        sizes = []
        place = self.path / PACKS / step_folder(step.number)
        if pack is not None:
            place.parent.mkdir(exist_ok=True)

            def write_its_pack(folder: AnyPath) -> None:
                write_pack(folder, pack, self._once(folder, REPLAY_FILE))
                sizes.append(size_of(folder))

            write_part(place, step.rank, ranks, write_its_pack, fold if ranks > 1 else None)
        elif self._replace and place.exists():
            self._medium.drop(place)  # the pack of the step that is now replaced
        if self._replace and (self.path / FLOORS).exists():
            self._medium.drop(self.path / FLOORS / step_folder(step.number))

        packed = self._pack is not None and not (self._mixed and not _has_sketches(step))

        def write_step(folder: AnyPath) -> None:
            once = self._once(folder, PACKED_FILE if packed else "")
            if self._pack is not None and packed:
                self._pack.write(folder, step, once)
            else:
                # In a store all steps are packed.
                part, target = local_only(folder), local_only(final) / f"rank_{step.rank}"
                write_dump(part, self._described, step, deduplication=self._deduplication, final=target, once=once)
            sizes.append(size_of(folder))
            if self._budget is not None:
                self._budget.written(step, sizes[-1], sum(sizes[:-1]))
            self.written[step.number] = sum(sizes)

        write_part(final, step.rank, ranks, write_step, fold if ranks > 1 else None)

    def _once(self, folder: AnyPath, form: str) -> RankDedup | None:
        """Return the deduplication between ranks for a step; `None` for a single rank, and in a store."""
        run, part = as_local(self.path), as_local(folder)
        if self._described.world_size == 1 or run is None or part is None:
            return None
        return RankDedup(run, part.parent, self._rank, form)

    def _drop(self, number: int) -> None:
        """Delete a step with its pack and floors."""
        self._medium.drop(self._step_path(number))
        self._medium.drop(self.path / PACKS / step_folder(number))
        self._medium.drop(self.path / FLOORS / step_folder(number))


def _has_sketches(step: Step) -> bool:
    return any(record.source.sketched for record in step.records)


#: A queue entry: a step, the description of the run at that time, and the step's pack.
Waiting = tuple[Step, RunInfo, Pack | None]


def _end_thread(steps: queue.Queue[Waiting | None]) -> None:
    # If the queue is full, the thread will see that the writer is gone. Waiting for room could deadlock: this may run
    # on the thread itself.
    with contextlib.suppress(queue.Full):
        steps.put_nowait(None)


def _work(owner: weakref.ref[RunWriter], steps: queue.Queue[Waiting | None]) -> None:
    while True:
        waiting = steps.get()
        writer = owner()
        try:
            if waiting is None or writer is None:
                return
            writer._handle(*waiting)
        except Exception as error:  # if the thread ended here, the training would wait for ever
            if writer is not None:
                writer._error = error
        finally:
            del waiting, writer
            steps.task_done()
