"""Explanations of operating system errors for users."""

from __future__ import annotations

import errno

from padiff.dump.remote_path import AnyPath, as_local

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
