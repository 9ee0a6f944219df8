"""Stores of objects, such as S3: what a run folder needs of one, and those that fsspec reaches.

Folders of this machine are no store: they are written and read by path, and mapped into memory.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Protocol

from padiff.errors import UsageError

#: What runs are recorded to and read from; the packages that fsspec needs for each.
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "hdfs": "pyarrow", "memory": ""}

#: Seconds that one operation may take, the client's own retries included. An object of 1 GB takes less at 20 MB/s.
OPERATION = 60.0

# Schemes of file systems, where a file that is written is seen half: there it is written aside and renamed.
_RENAMED = {"hdfs", "file"}


class StoreError(OSError):
    """A store does not answer, answers with an error, or takes too long."""


class Store(Protocol):
    """Objects under keys such as ``steps/00000010/rank_0/step.safetensors``. May be used by several threads.

    Each method raises `StoreError` where the store does not answer in time, and `PermissionError` where it refuses.
    """

    url: str

    def get(self, key: str) -> bytes:
        """All of an object; `FileNotFoundError` where there is none."""

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes of an object from start up to, not including, end: fewer where it ends before."""

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Put an object, whole at once for whoever looks.

        Args:
            new: only where there is none yet; `FileExistsError` else.
        """

    def list(self, prefix: str = "") -> dict[str, int]:
        """The keys below a prefix (a folder's name), and their sizes in bytes."""

    def delete(self, key: str) -> None:
        """Take an object away; one that is not there is no error."""

    def version(self, key: str) -> str:
        """Changes when the object is put again; `FileNotFoundError` where there is none."""


class FsspecStore:
    """A `Store` that fsspec reaches. It connects when it is first used, in each process by itself.

    Args:
        url: as fsspec takes it, ``s3://bucket/run``. Addresses and credentials are the environment's
            (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``), or those of fsspec's own configuration.

    Raises:
        UsageError: fsspec, or what it needs for the scheme, is not installed.
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

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        if self._scheme not in _RENAMED:
            self._call("pipe_file", key, data, mode="create" if new else "overwrite")
            return
        if new and self._call("exists", key):  # the file system has nothing that looks and writes at once
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
            # With its slash: `steps` is not to find `steps.old`.
            found = self._call("find", f"{prefix}/" if prefix else "", detail=True)
        except FileNotFoundError:
            return {}
        keys = {str(path).lstrip("/").removeprefix(f"{root.strip('/')}/"): info for path, info in found.items()}
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
        """The file system, and where the run lies in it."""
        with self._lock:
            # A fork has copies of the connections, and none of the threads that serve them.
            if self._opened is None or self._opened[0] != os.getpid():
                fs = _client(self.url)
                self._opened = os.getpid(), fs, str(fs._strip_protocol(self.url)).rstrip("/")
            return self._opened[1:]

    def _call(self, name: str, key: str, *args: Any, **options: Any) -> Any:
        if sys.is_finalizing():  # the threads that would serve it are gone
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
            _clients.clear()  # what it may do can change, and a client looks only when it is made
            raise
        except TimeoutError as error:
            raise StoreError(f"{self.url} did not answer within {OPERATION:g} seconds ({name} of {key})") from error
        except Exception as error:  # each client has errors of its own
            raise StoreError(f"{self.url}: {name} of {key} failed ({type(error).__name__}: {error})") from error


# The last client of each scheme, and what it was made of: to make one takes a tenth of a second.
_clients: dict[str, tuple[object, Any]] = {}
_SETTINGS = ("AWS_", "BOTO_", "FSSPEC_", "GOOGLE_", "GCSFS_", "HADOOP_")


def _client(url: str) -> Any:
    """fsspec's file system of a url, shared by the stores of one bucket as long as the environment stays the same."""
    scheme = url.partition(":")[0]
    settings = frozenset((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS))
    made_of = os.getpid(), url.split("/")[2], settings
    found = _clients.get(scheme)
    if found is None or found[0] != made_of:
        from fsspec.core import url_to_fs

        # Listings are not to be remembered: others write into the run while it is watched.
        fs, _ = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        _clients[scheme] = found = made_of, fs
    return found[1]


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
