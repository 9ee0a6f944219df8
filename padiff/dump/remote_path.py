"""Paths in a store, with the methods of `pathlib.Path` that padiff needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, TypeGuard, final

from padiff.dump.store import Store


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
