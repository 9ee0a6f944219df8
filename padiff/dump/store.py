"""Object stores such as S3: the interface that run folders need, and its implementation by fsspec.

Local folders are no store: they are written and read by path.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Protocol

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
