"""Locks of run folders and stores: only one process records each rank, and its lock ends with the process."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import os
import platform
import stat
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Protocol

from padiff.dump.format import RUN_FILE
from padiff.dump.medium import write_json
from padiff.dump.store import AnyPath, RemotePath
from padiff.dump.untrusted import open_plain
from padiff.errors import RunFolderError


class ForkAware(Protocol):
    """An object that belongs to the process that created it."""

    def leave_in_fork(self) -> None:
        """Disable this copy, in a fork. Locks must not be used: threads that do not exist here may hold them."""


# Weak references, so that dropped objects are freed.
_owned: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_fork_cleanup(one: ForkAware) -> None:
    """Register an object whose copies are disabled in forks of this process."""
    _owned.add(one)


def _in_fork() -> None:
    for owned in list(_owned):
        with contextlib.suppress(Exception):
            owned.leave_in_fork()
    _owned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

#: Seconds between two refreshes of the time stamp, and age in seconds at which a holder on another machine counts as
#: dead; used only if the file system has no locks.
BEAT, DEAD = 20.0, 90.0

_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF})


class BusyError(Exception):
    """Raised if another recorder holds the lock; `owner` describes the holder as far as known."""

    def __init__(self, owner: dict[str, Any]) -> None:
        self.owner = owner


class FolderLock:
    """The lock of one rank of a run folder, held by this process; acquired by `take`."""

    _path: Any

    def __init__(self, folder: AnyPath, rank: int) -> None:
        self._folder = folder
        self._path = _path_of(folder, rank)
        self._rank = rank
        self._fd: int | None = None
        self._own: dict[str, Any] = {}
        self._identity: tuple[int, int] = (0, 0)
        self._ended = threading.Event()

    @classmethod
    def acquire(cls, folder: AnyPath, rank: int) -> FolderLock:
        """Acquire the lock of an existing folder.

        Raises:
            RunFolderError: another recorder holds it.
            OSError: the folder cannot be written to.
        """
        lock = cls(folder, rank)
        try:
            lock._acquire()
        except BusyError as busy:
            if busy.owner.get("pid") != os.getpid():
                raise lock._refused(busy.owner) from None
            # A recorder of this process that was dropped without being closed may wait in a reference cycle.
            gc.collect()
            try:
                lock._acquire()
            except BusyError as still:
                raise lock._refused(still.owner) from None
        register_fork_cleanup(lock)
        return lock

    def check_held(self) -> None:
        """Check that the folder still exists and that this recorder still holds its lock.

        Raises:
            FileNotFoundError: the folder was removed or moved away, or replaced.
            RunFolderError: another process holds the lock now.
        """
        try:
            if self._is_held():
                return
        except FileNotFoundError:
            pass
        # Either the hidden file was deleted, or the folder was replaced by another one.
        if not (self._folder / RUN_FILE).exists() or _identity(self._folder) != self._identity:
            raise FileNotFoundError(errno.ENOENT, "the run folder was removed, moved or replaced", str(self._folder))
        self._take_again()

    def release(self) -> None:
        """Release the lock. May be called twice; in a fork of the holder it does not release the parent's lock."""
        if self._own.get("pid") == os.getpid():
            with contextlib.suppress(OSError):
                if self._is_held():
                    self._remove()  # while the lock is held: other processes check that the file still exists
        self._drop()

    def abandon(self) -> None:
        """Release the lock without touching the file, which counts as that of an ended process."""
        self._drop()

    def __del__(self) -> None:
        # For a recorder that is dropped without being closed.
        with contextlib.suppress(Exception):
            self.release()

    # -- acquiring ---------------------------------------------------------------------------------------------

    def _take_again(self) -> None:
        self._drop()
        self._ended = threading.Event()
        try:
            self._acquire()
        except BusyError as busy:
            raise self._refused(busy.owner) from None

    def _acquire(self) -> None:
        self._identity = _identity(self._folder)
        self._own = {"pid": os.getpid(), "machine": machine(), "started": started(os.getpid()), "since": time.time()}
        # A holder removes the file on release: if we locked a removed file, we try again.
        for _ in range(100):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise RunFolderError(f"{self._path} is no plain file: remove it, or give another run folder")
                if not _flock(fd):
                    os.close(fd)
                    fd = -1
                    return self._acquire_by_content()
                if _same(fd, self._path):
                    # On a full disk the text can't be written; the lock holds without it.
                    with contextlib.suppress(OSError):
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, json.dumps(self._own).encode(), 0)
                    self._fd = fd
                    return None
            except BlockingIOError:
                owner = _read_owner(self._path)
                os.close(fd)
                raise BusyError(owner) from None
            except BaseException:
                if fd >= 0:
                    os.close(fd)
                raise
            os.close(fd)
        raise BusyError({})

    def _acquire_by_content(self) -> None:
        owner = _read_owner(self._path)
        if owner and _alive(owner, self._path):
            raise BusyError(owner)
        write_json(self._path, self._own)
        if not self._is_held():  # another process replaced it at the same moment
            raise BusyError(_read_owner(self._path))
        threading.Thread(
            target=_beat, args=(self._path, self._own, self._ended), name="padiff-lock", daemon=True
        ).start()

    def _is_held(self) -> bool:
        if self._fd is not None:
            return _same(self._fd, self._path)
        return bool(self._own) and json.loads(self._path.read_text(encoding="utf-8")) == self._own

    def _remove(self) -> None:
        os.unlink(self._path)

    def _drop(self) -> None:
        self._ended.set()
        self._own = {}
        fd, self._fd = self._fd, None
        if fd is not None:
            # Unlocked, not only closed: a fork may hold a copy of the descriptor, and the lock with it.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def leave_in_fork(self) -> None:
        """Close a fork's copy of the lock file without unlocking, which would unlock the parent's lock too.

        A loader's worker may outlive a killed training; with the file open, it would keep the folder locked.
        """
        fd, self._fd = self._fd, None
        self._own = {}
        if fd is not None:
            os.close(fd)

    def _refused(self, owner: dict[str, Any]) -> RunFolderError:
        if owner.get("pid") == os.getpid() and owner.get("machine") == machine():
            who, remedy = "another recorder of this process", "Close that one first (leave its `with`)"
        elif owner.get("machine") == machine():
            who, remedy = f"process {owner.get('pid')}", "End that process first"
        else:
            who, remedy = "a process on another machine, or in another container,", "End that process first"
            if self._no_locks:
                remedy += f" (a killed one counts as ended after {DEAD:.0f} seconds)"
        since = owner.get("since")
        when = time.strftime(" since %H:%M:%S", time.localtime(since)) if isinstance(since, float) else ""
        return RunFolderError(
            f"{self._folder} is being recorded into: {who} writes rank {self._rank} of it{when}. Two recorders would "
            f"mix their steps, whatever `existing` says. {remedy}, or give this run a folder of its own"
        )

    @property
    def _no_locks(self) -> bool:
        return self._fd is None


def _path_of(folder: AnyPath, rank: int) -> Any:
    return folder / f".rank_{rank}.lock"


def is_recording(folder: Path, rank: int) -> bool:
    """Return True if a process records a rank into a folder, judged by the content of the lock file.

    The lock itself is not tried, as that could disturb a process that acquires it at the same moment.
    """
    path = _path_of(folder, rank)
    owner = _read_owner(path)
    return bool(owner) and _alive(owner, path)


def _flock(fd: int) -> bool:
    """Lock a file; return False if the operating system or the file system has no locks.

    Raises:
        BlockingIOError: another process or descriptor holds the lock.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked") from None
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _identity(folder: AnyPath) -> tuple[int, int]:
    try:
        status = os.stat(str(folder))
    except OSError:
        return (-1, -1)
    return (status.st_dev, status.st_ino)


def _read_owner(path: Path) -> dict[str, Any]:
    try:
        with open_plain(path) as file:
            content = json.loads(file.read(4096))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def machine() -> str:
    """Return a digest that identifies this machine and container; no clear text, as run folders are shared."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:12]


def started(pid: int) -> str:
    """Return the start time of a process as ``/proc`` gives it, or an empty text if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def runs_here(owner: dict[str, Any]) -> bool | None:
    """Return True if a holder's process runs on this machine, False if it has ended, `None` if that can't be known."""
    pid = owner.get("pid")
    if owner.get("machine") != machine() or not isinstance(pid, int) or pid <= 0 or os.name != "posix":
        return None
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (OSError, OverflowError):
        return False
    return bool(started(pid) == owner.get("started", ""))


def _alive(owner: dict[str, Any], path: Path) -> bool:
    here = runs_here(owner)
    if here is not None:
        return here
    try:
        return time.time() - os.stat(path).st_mtime < DEAD
    except OSError:
        return False


def _beat(path: Path, owner: dict[str, Any], ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            if _read_owner(path) == owner:
                os.utime(path)


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
                self._path.store.write(self._path.key, _remote_alive(self._own), new=True)
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
            target=_remote_beat, args=(self._path, self._own, self._ended), name="padiff-lock", daemon=True
        )
        self._beating.start()

    def _is_held(self) -> bool:
        return bool(self._own) and _owner(self._path).get("id") == self._own["id"]

    def _remove(self) -> None:
        self._path.unlink()


def _remote_alive(own: dict[str, Any]) -> bytes:
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


def _remote_beat(path: RemotePath, own: dict[str, Any], ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            if _owner(path).get("id") == own["id"]:
                path.write_bytes(_remote_alive(own))
