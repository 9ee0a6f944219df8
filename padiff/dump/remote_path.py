"""Places in a store, with what of a path the rooms ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from padiff.dump.store import Store


class RemoteStatus(NamedTuple):
    """What is known of an object."""

    st_size: int


@dataclass(frozen=True)
class RemotePath:
    """A place in a store: a key, or a part of one, as a folder is part of a path. A store has no folders: one is there
    as long as something is below it.

    Attributes:
        store: where.
        key: the parts of the key, joined by slashes; empty: the store's own url.
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
        return isinstance(other, RemotePath) and str(self) == str(other)

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
        """What this is below of; of the store's own url itself."""
        return RemotePath(self.store, self.key.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is an object, or something below."""
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
        """Nothing to do: what is put makes its folders."""

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies directly in this folder."""
        for name in self.names():
            yield self / name

    def names(self) -> list[str]:
        """Names of what lies directly in this folder."""
        start = len(self.key) + 1 if self.key else 0
        return sorted({key[start:].partition("/")[0] for key in self.store.list(self.key)} - {""})

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """What fits a pattern of names, one for each folder on the way."""
        first, _, rest = pattern.partition("/")
        for entry in self.iterdir():
            if fnmatchcase(entry.name, first):
                yield from entry.glob(rest) if rest else (entry,)

    def sizes(self) -> dict[str, int]:
        """Bytes of every object below this folder, or of this one, by key."""
        found = self.store.list(self.key)
        status = None if found else self.stat_or_none()
        return found if status is None else {self.key: status.st_size}

    def stat_or_none(self) -> RemoteStatus | None:
        """What is known of the object; `None` where there is none."""
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
        """Put an object, whole at once for whoever looks."""
        self.store.put(self.key, data)

    def unlink(self, missing_ok: bool = False) -> None:
        self.store.delete(self.key)

    def remove(self) -> None:
        """Take everything below this folder away, the last first: what says that something is whole was put last."""
        for key in sorted(self.store.list(self.key), reverse=True):
            self.store.delete(key)

    def resolve(self) -> RemotePath:
        return self


#: A folder of this machine, or a place in a store.
AnyPath = Path | RemotePath


def lies_in(inner: AnyPath, outer: AnyPath) -> bool:
    """Whether one place is another one, or below it."""
    if isinstance(inner, Path) and isinstance(outer, Path):
        return inner.resolve() == outer.resolve() or outer.resolve() in inner.resolve().parents
    return type(inner) is type(outer) and f"{inner}/".startswith(f"{outer}/")
