"""The one door for paths of folders that a user gives: padiff writes to, and reads from, folders of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from padiff.errors import UsageError

# ``s3://bucket``, and what a Path makes of it: ``s3:/bucket``. One letter is a Windows drive.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/")


def is_remote(path: Any) -> bool:
    """Whether a path has a scheme, as ``s3://bucket/run`` has: as a folder it would be made below the current one."""
    return _REMOTE.match(str(path)) is not None


def local_folder(path: Any, what: str) -> Path:
    """The path of a folder on this machine.

    Args:
        path: as the user gave it.
        what: what it is, for the message.

    Raises:
        UsageError: it is no path, or one with a scheme.
    """
    if is_remote(path):
        raise UsageError(
            f"{what}: padiff records to a local folder, and reads from local folders, got {str(path)!r}. Record into a "
            "local folder (or a mounted one) and copy it when the run is over; to read a run, copy it here first"
        )
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"{what} has to be the path of a folder, got {type(path).__name__}")
    return Path(path)
