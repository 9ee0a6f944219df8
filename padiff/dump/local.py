"""Checks of paths that a user gives: run folders may lie in a store, all other folders are local."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, overload

from padiff.dump.remote_path import AnyPath, RemotePath, as_local, as_remote
from padiff.dump.store import SCHEMES, FsspecStore
from padiff.errors import UsageError

# Matches ``s3://bucket`` and ``s3:/bucket`` (the form of a Path). A single letter is a Windows drive.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/")


def is_remote(path: Any) -> bool:
    """Return True if a path has a url scheme, as in ``s3://bucket/run``."""
    return _REMOTE.match(str(path)) is not None


def run_folder(path: Any, what: str) -> AnyPath:
    """Return the location of a run: a local folder, or a place in a store.

    Args:
        path: the path or url from the user.
        what: name of the argument, for error messages.

    Raises:
        UsageError: the value is no path, its url scheme is not supported, or a package for the scheme is not installed.
    """
    place = as_remote(path)
    if place is not None:
        return place
    if not is_remote(path):
        return local_folder(path, what)
    # A Path has collapsed `//` to `/`.
    scheme, _, key = str(path).partition(":")
    if scheme not in SCHEMES:
        raise UsageError(
            f"{what}: runs are recorded to and read from local folders, and {', '.join(f'{s}://' for s in SCHEMES)}; "
            f"got {str(path)!r}. Record into one of these"
        )
    key = key.strip("/")
    if not key or (scheme != "memory" and "/" not in key) or ".." in key.split("/"):
        raise UsageError(
            f"{what} has to name a bucket and a place in it, as {scheme}://bucket/run does, got {str(path)!r}"
        )
    return RemotePath(FsspecStore(f"{scheme}://{key}"))


@overload
def absolute(folder: Path) -> Path: ...


@overload
def absolute(folder: AnyPath) -> AnyPath: ...


def absolute(folder: AnyPath) -> AnyPath:
    """Return a folder as an absolute path, as the training may change the working directory; a place in a store as is.

    Raises:
        UsageError: the path is relative, and the working directory is gone.
    """
    local = as_local(folder)
    if local is None:
        return folder
    try:
        return local.absolute()
    except OSError as error:
        raise UsageError(f"{folder}: the working directory is gone ({error}). Give an absolute path") from error


def shown(folder: AnyPath) -> str:
    """Return a folder as messages show it: relative to the working directory if it lies below."""
    local = as_local(folder)
    if local is not None:
        try:
            return str(local.relative_to(Path.cwd()))
        except (OSError, ValueError):
            pass
    return str(folder)


def local_folder(path: Any, what: str) -> Path:
    """Return a user's path of a local folder as a `Path`.

    Args:
        path: the path from the user.
        what: name of the argument, for error messages.

    Raises:
        UsageError: the value is no path, or has a url scheme.
    """
    if is_remote(path):
        raise UsageError(
            f"{what} has to be a local folder, got {str(path)!r}: only runs are recorded to and read from "
            "stores. Give a local folder, or copy it here first"
        )
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"{what} has to be the path of a folder, got {type(path).__name__}")
    return Path(path)
