"""The temporary folder of ``padiff fix``, which a later ``padiff fix`` deletes if its own process was killed.

A file in the folder holds an ``flock`` for as long as its process lives. The kernel releases it however the process
ends, so that a folder whose lock is free belongs to nobody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: killed processes leave their folder
    fcntl = None  # type: ignore[assignment]

_PREFIX, _MARK = "padiff-fix-", ".padiff-fix"
# Another machine may use the same folder for temporary files; its locks say nothing here.
_TEXT = f"temporary folder of padiff fix on {os.uname().nodename if hasattr(os, 'uname') else ''}\n".encode()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a temporary folder, and delete it at the end; delete those of killed processes first."""
    _delete_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    handle = None
    try:
        handle = _mark(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _mark(folder: Path) -> int | None:
    """Write the locked file that says whose folder it is; return its descriptor, `None` if there are no locks."""
    if fcntl is None:
        return None
    draft = folder / f"{_MARK}.new"
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, _TEXT)
        os.rename(draft, folder / _MARK)  # found by others only while it is locked
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def _delete_abandoned(parent: Path) -> None:
    """Delete the temporary folders of this user's processes that were killed."""
    if fcntl is None:
        return
    try:
        names = [name for name in os.listdir(parent) if name.startswith(_PREFIX)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            handle = os.open(parent / name / _MARK, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if _is_own(parent / name, handle):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(parent / name, ignore_errors=True)
            finally:
                os.close(handle)


def _is_own(folder: Path, handle: int) -> bool:
    """Return True if a folder and the file in it were made by `temporary_folder`, for this user, on this machine."""
    states = [os.lstat(folder), os.fstat(handle)]
    if any(state.st_uid != os.getuid() for state in states):
        return False
    return (
        stat.S_ISDIR(states[0].st_mode) and stat.S_ISREG(states[1].st_mode) and os.read(handle, len(_TEXT) + 1) == _TEXT
    )
