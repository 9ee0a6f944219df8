"""Object stores such as S3: the interface that run folders need, paths in a store, and checks of local paths."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard, final, overload

from padiff.errors import UsageError

#: Url schemes of supported stores -> the package that fsspec needs for each.
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "hdfs": "pyarrow", "memory": ""}

#: Timeout of one operation in seconds, with the client's own retries. An object of 1 GB takes less at 20 MB/s.
OPERATION = 60.0

# Schemes of file systems, where readers can see a half-written file: it is written under another name and renamed.
_RENAMED = {"hdfs", "file"}


class StoreError(OSError):
    """Raised if a store does not answer, answers with an error, or takes too long."""


class Store(Protocol):
    """A thread-safe store of objects under keys such as ``steps/00000010/rank_0/step.safetensors``.

    Each method raises `StoreError` if the store does not answer in time, and `PermissionError` if it refuses access.
    """

    url: str

    def get(self, key: str) -> bytes:
        """Return the content of an object; raise `FileNotFoundError` if it does not exist."""

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from ``start`` to ``end`` (exclusive), fewer if the object is shorter."""

    def write(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Write an object atomically.

        Args:
            new: raise `FileExistsError` if the object exists.
        """

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the keys below a prefix (a folder's name) and the objects' sizes in bytes."""

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""

    def version(self, key: str) -> str:
        """Return a text that changes whenever the object is written; raise `FileNotFoundError` if it does not exist."""


class FsspecStore:
    """A `Store` behind fsspec. It connects on first use, in each process anew.

    Args:
        url: an fsspec url, ``s3://bucket/run``. Endpoint and credentials come from the environment
            (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``) or from fsspec's own configuration.

    Raises:
        UsageError: fsspec, or its package for the scheme, is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._scheme = url.partition(":")[0]
        self._lock = threading.Lock()
        self._opened: tuple[int, Any, str] | None = None
        _check_installed(self._scheme)

    def get(self, key: str) -> bytes:
        return bytes(self._call("cat_file", key))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return bytes(self._call("cat_file", key, start=start, end=end))

    def write(self, key: str, data: bytes, *, new: bool = False) -> None:
        if self._scheme not in _RENAMED:
            self._call("pipe_file", key, data, mode="create" if new else "overwrite")
            return
        if new and self._call("exists", key):  # these file systems cannot check and write in one operation
            raise FileExistsError(f"{self.url}/{key} is there")
        folder, _, name = key.rpartition("/")
        aside = f"{folder}/.{name}.{os.urandom(4).hex()}.partial".lstrip("/")
        self._call("makedirs", folder, exist_ok=True)
        self._call("pipe_file", aside, data)
        self.delete(key)
        _, root = self._open()
        self._call("mv", aside, f"{root}/{key}")

    def list(self, prefix: str = "") -> dict[str, int]:
        _, root = self._open()
        try:
            # With a trailing slash, so that `steps` does not match `steps.old`.
            infos = self._call("find", f"{prefix}/" if prefix else "", detail=True)
        except FileNotFoundError:
            return {}
        keys = {str(path).lstrip("/").removeprefix(f"{root.strip('/')}/"): info for path, info in infos.items()}
        return {key: int(info["size"] or 0) for key, info in keys.items()}

    def delete(self, key: str) -> None:
        try:
            self._call("rm_file", key)
        except FileNotFoundError:
            return

    def version(self, key: str) -> str:
        info = self._call("info", key)
        names = ("ETag", "etag", "generation", "LastModified", "mtime", "created", "size")
        return repr([str(info[name]) for name in names if name in info])

    def _open(self) -> tuple[Any, str]:
        """Return the file system, and the path of the run in it."""
        with self._lock:
            # A fork has copies of the connections, but not the threads that serve them.
            if self._opened is None or self._opened[0] != os.getpid():
                fs = _client(self.url)
                self._opened = os.getpid(), fs, str(fs._strip_protocol(self.url)).rstrip("/")
            return self._opened[1:]

    def _call(self, name: str, key: str, *args: Any, **options: Any) -> Any:
        if sys.is_finalizing():  # the client's threads have ended
            raise StoreError(f"{self.url}: the interpreter is ending")
        try:
            fs, root = self._open()
            path = f"{root}/{key}"
            if not fs.async_impl:
                return getattr(fs, name)(path, *args, **options)
            from fsspec.asyn import sync

            return sync(fs.loop, getattr(fs, f"_{name}"), path, *args, timeout=OPERATION, **options)
        except (FileNotFoundError, FileExistsError):
            raise
        except PermissionError:
            _clients.clear()  # permissions may change, but a client reads credentials only when it is created
            raise
        except TimeoutError as error:
            raise StoreError(f"{self.url} did not answer within {OPERATION:g} seconds ({name} of {key})") from error
        except Exception as error:  # each client library has its own error types
            raise StoreError(f"{self.url}: {name} of {key} failed ({type(error).__name__}: {error})") from error


# The last client of each scheme, with the settings it was created from: creating one takes a tenth of a second.
_clients: dict[str, tuple[object, Any]] = {}
_SETTINGS = ("AWS_", "BOTO_", "FSSPEC_", "GOOGLE_", "GCSFS_", "HADOOP_")


def _client(url: str) -> Any:
    """Return fsspec's file system for a url; stores of one bucket share it while the environment stays the same."""
    scheme = url.partition(":")[0]
    settings = frozenset((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS))
    origin = os.getpid(), url.split("/")[2], settings
    client = _clients.get(scheme)
    if client is None or client[0] != origin:
        from fsspec.core import url_to_fs

        # Listings must not be cached: other processes write into the run while it is watched.
        fs, _ = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        _clients[scheme] = client = origin, fs
    return client[1]


def _check_installed(scheme: str) -> None:
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        client = SCHEMES.get(scheme, "")
        packages = " and ".join(filter(None, ("fsspec", client)))
        more = f" {client}" if client not in ("", "s3fs") else ""
        raise UsageError(
            f"{scheme}:// is reached through {packages}, which is not installed ({error}): "
            f"pip install 'padiff-hooks[stores]'{more}"
        ) from None


class RemoteStatus(NamedTuple):
    """Status of an object, as `os.stat_result` of a file."""

    st_size: int


@final
@dataclass(frozen=True)
class RemotePath:
    """A path in a store: the key of an object, or the prefix of keys, used like a folder.

    A store has no folders of its own: a folder exists as long as an object lies below it.

    Attributes:
        store: the store.
        key: the key, with parts joined by slashes; empty: the store's root.
    """

    store: Store
    key: str = ""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return type(other) is RemotePath and str(self) == str(other)

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    @property
    def parent(self) -> RemotePath:
        """Return the folder that holds this path; the root is its own parent."""
        return RemotePath(self.store, self.key.rpartition("/")[0])

    def exists(self) -> bool:
        """Return True if an object with this key, or below it, exists."""
        try:
            self.store.version(self.key)
        except FileNotFoundError:
            return self.is_dir()
        return True

    def is_file(self) -> bool:
        return self.stat_or_none() is not None

    def is_dir(self) -> bool:
        return bool(self.store.list(self.key))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a store creates folders with their objects."""

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the paths directly in this folder."""
        for name in self.names():
            yield self / name

    def names(self) -> list[str]:
        """Return the sorted names of the entries directly in this folder."""
        start = len(self.key) + 1 if self.key else 0
        return sorted({key[start:].partition("/")[0] for key in self.store.list(self.key)} - {""})

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the paths below that match a pattern, level by level."""
        first, _, remainder = pattern.partition("/")
        for entry in self.iterdir():
            if fnmatchcase(entry.name, first):
                yield from entry.glob(remainder) if remainder else (entry,)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object below this folder, by key; or of this object."""
        sizes = self.store.list(self.key)
        status = None if sizes else self.stat_or_none()
        return sizes if status is None else {self.key: status.st_size}

    def stat_or_none(self) -> RemoteStatus | None:
        """Return the status of the object, or `None` if it does not exist."""
        above = self.store.list(self.parent.key)
        return RemoteStatus(above[self.key]) if self.key in above else None

    def stat(self) -> RemoteStatus:
        status = self.stat_or_none()
        if status is None:
            raise FileNotFoundError(f"there is no {self}")
        return status

    def read_bytes(self) -> bytes:
        return self.store.get(self.key)

    def write_bytes(self, data: bytes) -> None:
        """Write the object atomically."""
        self.store.write(self.key, data)

    def unlink(self, missing_ok: bool = False) -> None:
        self.store.delete(self.key)

    def remove(self) -> None:
        """Delete all objects below this folder, in reverse order of their keys."""
        for key in sorted(self.store.list(self.key), reverse=True):
            self.store.delete(key)

    def resolve(self) -> RemotePath:
        return self


#: A local path, or a path in a store.
AnyPath = Path | RemotePath


def as_local(path: AnyPath) -> Path | None:
    """Return a path of this machine as it is; `None` for a place in a store."""
    return None if type(path) is RemotePath else path


def local_only(path: AnyPath) -> Path:
    """Return a path of this machine as it is.

    Raises:
        TypeError: the path is a place in a store.
    """
    if type(path) is RemotePath:
        raise TypeError(f"{path} lies in a store")
    return path


def as_remote(path: AnyPath) -> RemotePath | None:
    """Return a place in a store as it is; `None` for a path of this machine."""
    return path if type(path) is RemotePath else None


def lies_in(inner: AnyPath, outer: AnyPath) -> bool:
    """Return True if a path equals another one or lies below it."""
    ends = [path.resolve() for path in (inner, outer)]
    return type(inner) is type(outer) and f"{ends[0]}/".startswith(f"{str(ends[1]).rstrip('/')}/")


def is_location(value: object) -> TypeGuard[str | AnyPath]:
    """Return True if a value names the place of a run: a path, a url, or a place in a store."""
    return isinstance(value, (str, os.PathLike)) or type(value) is RemotePath


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
