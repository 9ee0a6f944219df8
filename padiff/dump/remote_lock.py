"""One recording process for each rank of a run in a store: a lock that is an object, put only where there is none."""

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

# Seconds that a release waits for a sign of life that is under way. Chosen: many times what a store takes to answer.
_LAST_BEAT = 5.0


class StoreLock(FolderLock):
    """Says that this process records a rank into a run of a store.

    The object says who holds it and since when it was last alive. One whose process has ended on this machine is taken
    over at once, one of another machine after `DEAD` seconds without a sign of life.
    """

    _path: RemotePath
    _beating: threading.Thread | None = None

    def check(self) -> None:
        """Make sure that the run is still there, and still this recorder's.

        Raises:
            FileNotFoundError: the run was removed.
            RunFolderError: another process holds the lock by now.
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
        # A sign of life that is under way would put the lock back.
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
                self._path.store.put(self._path.key, _alive(self._own), new=True)
                break
            except FileExistsError:
                owner = _owner(self._path)
                if owner.get("id") == self._own["id"]:  # it was put, and the answer got lost
                    break
                if owner and _lives(owner):
                    self._own = {}
                    raise BusyError(owner) from None
                self._path.unlink()
        if not self._is_held():  # another one took it at the same moment
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
    """Who holds a lock; empty where nobody does, or nobody knows."""
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
