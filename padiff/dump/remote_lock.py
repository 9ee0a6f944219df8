"""Locks of runs in a store: one recording process per rank, through an object that only one process can create."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
from typing import Any

from padiff.dump.format import RUN_FILE
from padiff.dump.lock import BEAT, DEAD, BusyError, FolderLock, machine, runs_here, started
from padiff.dump.remote_path import RemotePath

# Seconds that a release waits for a running refresh of the lock. Chosen: many times the response time of a store.
_LAST_BEAT = 5.0


class StoreLock(FolderLock):
    """The lock of one rank of a run in a store, held by this process.

    The lock's object holds the process and the time of its last refresh. A lock of a process that has ended on this
    machine is taken over at once, one of another machine `DEAD` seconds after its last refresh.
    """

    _path: RemotePath
    _beating: threading.Thread | None = None

    def check_held(self) -> None:
        """Check that the run still exists and that this recorder still holds its lock.

        Raises:
            FileNotFoundError: the run was removed.
            RunFolderError: another process holds the lock now.
            StoreError: the store does not answer.
        """
        if self._is_held():
            return
        if not (self._folder / RUN_FILE).exists():
            raise FileNotFoundError(errno.ENOENT, "the run was removed", str(self._folder))
        self._take_again()

    def release(self) -> None:
        if sys.is_finalizing():
            return
        self._ended.set()
        # A running refresh would write the lock's object again.
        beating = self._beating
        if self._own.get("pid") == os.getpid() and beating is not None and beating is not threading.current_thread():
            beating.join(_LAST_BEAT)
        super().release()

    def _acquire(self) -> None:
        self._own = {
            "pid": os.getpid(),
            "machine": machine(),
            "started": started(os.getpid()),
            "since": time.time(),
            "id": os.urandom(8).hex(),
        }
        for _ in range(2):
            try:
                self._path.store.write(self._path.key, _alive(self._own), new=True)
                break
            except FileExistsError:
                owner = _owner(self._path)
                if owner.get("id") == self._own["id"]:  # the object was written, but the store's answer got lost
                    break
                if owner and _lives(owner):
                    self._own = {}
                    raise BusyError(owner) from None
                self._path.unlink()
        if not self._is_held():  # another process took it at the same moment
            self._own = {}
            raise BusyError(_owner(self._path))
        self._beating = threading.Thread(
            target=_beat, args=(self._path, self._own, self._ended), name="padiff-lock", daemon=True
        )
        self._beating.start()

    def _is_held(self) -> bool:
        return bool(self._own) and _owner(self._path).get("id") == self._own["id"]

    def _remove(self) -> None:
        self._path.unlink()


def _alive(own: dict[str, Any]) -> bytes:
    return json.dumps({**own, "alive": time.time()}).encode()


def _owner(path: RemotePath) -> dict[str, Any]:
    """Return the holder in a lock's object; empty if the object does not exist or can't be parsed."""
    try:
        content = json.loads(path.store.get_range(path.key, 0, 4096))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _lives(owner: dict[str, Any]) -> bool:
    here = runs_here(owner)
    if here is not None:
        return here
    alive = owner.get("alive")
    return isinstance(alive, (int, float)) and time.time() - alive < DEAD


def _beat(path: RemotePath, own: dict[str, Any], ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            if _owner(path).get("id") == own["id"]:
                path.write_bytes(_alive(own))
