"""The places where a run can lie, folders of this machine and stores: what differs between them is decided here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from padiff.dump.disk import Disk
from padiff.dump.in_store import InStore
from padiff.dump.remote_path import AnyPath, as_local
from padiff.dump.untrusted import LARGEST_JSON

AnyT = TypeVar("AnyT", bound=AnyPath)


class Medium(Protocol):
    """What padiff asks of the place where a run lies. Paths are of the medium's own type.

    Attributes:
        is_slow: an answer can take seconds, so that a training must not wait for it.
    """

    is_slow: bool

    def is_there(self, path: Any) -> bool:
        """Return True if a file or folder exists; also for a link that leads nowhere."""

    def entries(self, folder: Any) -> list[str]:
        """Return the sorted names in a folder.

        Raises:
            OSError: the folder does not exist, or can't be read.
        """

    def nbytes(self, path: Any) -> int:
        """Return the size in bytes of a file, or of all files below a folder."""

    def stamp(self, path: Any) -> object:
        """Return a value that changes whenever a file is written.

        Raises:
            OSError: the file does not exist, or can't be read.
        """

    def read_text(self, path: Any, largest: int) -> bytes:
        """Return the content of a regular file; see `read_text` of this module."""

    def check_inside(self, path: Any, root: Any) -> Any:
        """Check that a path lies in ``root``; see `check_inside` of this module."""

    def write_bytes(self, path: Any, data: bytes) -> None:
        """Write a file atomically."""

    def write_pieces(self, path: Any, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file piece by piece, in a folder that gets its name when it is complete."""

    def write_tensor(self, path: Any, array: np.ndarray) -> None:
        """Write a ``.npy`` file atomically, if it does not exist."""

    def write_part(
        self, final: Any, rank: int, ranks: int, write: Callable[[Any], None], last: Callable[[Path], None] | None
    ) -> None:
        """Write a rank's part of a folder; see `write_part` of this module."""

    def drop(self, folder: Any) -> None:
        """Delete a folder so that no reader sees a part of it."""

    def replace_steps(self, run: Any, others: Iterable[str]) -> None:
        """Delete the steps of a run that is overwritten, and then the other folders of these names."""

    def absent_ranks(self, run: Any, ranks: int) -> list[int]:
        """Return the ranks that do not record into a run now, and have written no part of a step."""

    def incomplete_steps(self, run: Any) -> dict[int, list[int]]:
        """Return the incomplete steps of a run, each with the ranks that have written their part."""


_DISK: Medium = Disk()
_STORE: Medium = InStore()


def medium_of(path: AnyPath) -> Medium:
    """Return the medium that a path lies on."""
    return _STORE if as_local(path) is None else _DISK


def check_inside(path: AnyT, root: AnyPath) -> AnyT:
    """Check that a path, with all links followed, lies in ``root``.

    Returns:
        The path to open, without links.

    Raises:
        RunFolderError: the path leads out of ``root``, or is no valid path.
    """
    checked: AnyT = medium_of(path).check_inside(path, root)
    return checked


def read_text(path: AnyPath, largest: int = LARGEST_JSON) -> bytes:
    """Return the content of a regular file of limited size, such as JSON.

    Args:
        largest: largest size in bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the path is no regular file, or the file is too large.
    """
    return medium_of(path).read_text(path, largest)


def write_text(path: AnyPath, text: str) -> None:
    """Write a text file atomically."""
    medium_of(path).write_bytes(path, text.encode())


def write_json(path: AnyPath, content: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content))


def size_of(path: AnyPath) -> int:
    """Return the size in bytes of a file, or of all files below a folder."""
    return medium_of(path).nbytes(path)


def names_in(folder: AnyPath) -> list[str]:
    """Return the names in a folder; an empty list if it does not exist, as other ranks may rename it meanwhile."""
    try:
        return medium_of(folder).entries(folder)
    except OSError:
        return []


def incomplete_steps(run: AnyPath) -> dict[int, list[int]]:
    """Return the incomplete steps of a run, each with the ranks that have written their part."""
    return medium_of(run).incomplete_steps(run)


def write_part(
    final: AnyPath, rank: int, ranks: int, write: Callable[[Any], None], last: Callable[[Path], None] | None = None
) -> None:
    """Write a rank's part of a folder, which appears when all ranks have written theirs.

    Args:
        final: final path of the folder.
        rank, ranks: the rank that writes, and the number of ranks.
        write: writes the part into the folder that it is given, which lies beside the parts of other ranks.
        last: called on the last rank with the complete folder, before it gets its final name; not in a store.
    """
    medium_of(final).write_part(final, rank, ranks, write, last)
