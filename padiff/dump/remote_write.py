"""The writer of runs in a store. If the store fails or is slow, steps are lost, but the training goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any

from padiff.dump import write
from padiff.dump.format import FINISHED_FILE, RUN_FILE, SCHEMA_VERSION
from padiff.dump.medium import write_json
from padiff.dump.step_files import run_to_json
from padiff.dump.store import RemotePath, StoreError
from padiff.dump.write import RunWriter, Waiting
from padiff.errors import PadiffError, WriterError
from padiff.records import RunInfo, Step
from padiff.records.traces import Pack
from padiff.system.terminal import warn

#: Seconds that the training waits for the store over the whole run, while the queue is full.
PATIENCE = 30.0
#: Seconds in which writing a step is retried, and the pauses before each retry.
RETRYING, PAUSES = 30.0, (0.5, 2.0, 5.0)
#: Seconds that closing waits for queued steps.
CLOSING = 60.0
# Largest number of lost steps that finished.json names; it always holds their count.
_NAMED = 1000


class StoreWriter(RunWriter):
    """A `RunWriter` for a run in a store.

    A step that the store does not accept, or not in time, is lost. The first loss raises a warning, and
    ``finished.json`` lists all of them (``missing_steps``). Later steps are written as usual.
    """

    path: RemotePath

    def __init__(self, path: RemotePath, info: RunInfo, **options: Any) -> None:
        self._numbers: set[int] = set()
        self._waited, self._why, self._said = 0.0, "", False
        #: Numbers of lost steps (at most `_NAMED`), and the count of all.
        self._lost: list[int] = []
        self._count = 0
        self._closing, self._answers = threading.Event(), True
        super().__init__(path, info, **options)

    def flush(self) -> None:
        """Wait until every queued step is written or lost, for `CLOSING` seconds at most."""
        if self._left:
            return
        until = time.monotonic() + CLOSING
        while self._queue.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)
        self._say()
        self._raise_error()

    def close(self, finished: bool = True) -> None:
        """Write the queued steps, for `CLOSING` seconds at most, end the thread and release the run."""
        if self._left:
            return
        write.unregister(self)
        try:
            self._end(CLOSING)
            self._raise_error()
            if not self._rank and self._answers:
                self._finish(finished)
            self._say()
        finally:
            if self._answers:
                self._lock.release()
            else:
                self._lock.abandon()  # releasing would wait for the store again

    def _end(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(max(0.0, until - time.monotonic()))
        self._closing.set()
        if self._thread.is_alive():
            self._answers = False
            self._lose(None, f"it was still being written {seconds:g} seconds after the training had ended")

    def _finish(self, finished: bool) -> None:
        content: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        if self._count:
            content["lost"] = {"steps": sorted(self._lost), "count": self._count, "why": self._why}
        try:
            self._lock.check_held()
            if self._info is not self._described:
                write_json(self.path / RUN_FILE, run_to_json(self._info))
            if finished:
                write_json(self.path / FINISHED_FILE, content)
        except OSError as error:
            self._answers = not isinstance(error, StoreError)
            self._why = self._why or f"the note that the run has ended could not be written: {error}"

    # -- called by the training loop -----------------------------------------------------------------------

    def _is_there(self, number: int) -> bool:
        # Only this process's steps are checked, without a slow query of the store; the lock excludes other processes.
        is_repeated = number in self._numbers
        self._numbers.add(number)
        return is_repeated

    def _enqueue(self, waiting: Waiting) -> None:
        self._say()
        begin = time.monotonic()
        try:
            self._queue.put(waiting, timeout=max(PATIENCE - self._waited, 1e-3))
        except queue.Full:
            self._lose(waiting[0], "the store takes steps more slowly than the training makes them")
        self._waited += time.monotonic() - begin

    def _say(self) -> None:
        """Warn once of lost steps, on the training's thread."""
        if not self._why or self._said:
            return
        self._said = True
        which = f"step {self._lost[0]} is" if self._lost else "something is"
        warn(
            f"{which} not in {self.path}: {self._why}. The training goes on, and so does recording; all steps "
            f"that are left out are named in {FINISHED_FILE}"
        )

    # -- the thread ----------------------------------------------------------------------------------------

    def _store(self, step: Step, info: RunInfo, pack: Pack | None) -> None:
        """Write a step; retry for `RETRYING` seconds if the store fails."""
        until = time.monotonic() + RETRYING
        for pause in (*PAUSES, None):
            try:
                super()._store(step, info, pack)
                return
            except PadiffError:
                raise
            except OSError:
                if pause is None or time.monotonic() + pause > until or self._closing.wait(pause):
                    raise

    def _is_survived(self, error: BaseException, step: Step) -> bool:
        if not isinstance(error, OSError) or isinstance(error, PadiffError) or not self._failed:
            return False
        self._failed = ""
        self._lose(step, str(error) or type(error).__name__)
        return True

    def _lose(self, step: Step | None, why: str) -> None:
        self._count += 1
        if step is not None and len(self._lost) < _NAMED:
            self._lost.append(step.number)
        self._why = self._why or why

    def write_remaining(self, seconds: float) -> None:
        """Write the queued steps and release the run, for a recorder that was not closed.

        Args:
            seconds: timeout.

        Raises:
            WriterError: a step is lost, or was not written in time.
        """
        super().write_remaining(seconds)
        if self._count:
            raise WriterError(f"{self._count} steps are not in {self.path}: {self._why}")
