"""The places where a run can lie, folders of this machine and stores: what differs between them is decided here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from padiff.dump.format import RUN_FILE, STEPS, aside, to_storable, write_all, write_npy
from padiff.dump.store import AnyPath, RemotePath, as_local
from padiff.dump.untrusted import LARGEST_JSON, as_int, inside_folder, parse_json, read_limited
from padiff.errors import RunFolderError


class Disk:
    """The medium of run folders on this machine. A folder of several ranks is written aside and renamed into place."""

    is_slow = False

    def is_there(self, path: Path) -> bool:
        return os.path.lexists(path)

    def entries(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def nbytes(self, path: Path) -> int:
        return sum(_sizes(path))

    def stamp(self, path: Path) -> object:
        status = os.stat(path, follow_symlinks=False)
        return status.st_mtime_ns, status.st_ino

    def read_text(self, path: Path, largest: int) -> bytes:
        return read_limited(path, largest)

    def check_inside(self, path: Path, root: Path) -> Path:
        return inside_folder(path, root)

    def write_bytes(self, path: Path, data: bytes) -> None:
        with aside(path) as partial:
            partial.write_bytes(data)

    def write_pieces(self, path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        with open(path, "wb", buffering=0) as file:
            for piece in pieces:
                write_all(file, piece)

    def write_tensor(self, path: Path, array: np.ndarray) -> None:
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with aside(path) as partial:
                write_npy(partial, array)

    def write_part(
        self, final: Path, rank: int, ranks: int, write: Callable[[Path], None], last: Callable[[Path], None] | None
    ) -> None:
        """Write a rank's part under a temporary name; the last rank renames the folder."""
        partial = final.with_name(f".{final.name}.partial")
        aside = partial / f".rank_{rank}"
        try:
            partial.mkdir(exist_ok=True)  # without parents: a deleted run folder is not created again
            try:
                aside.mkdir()
            except FileExistsError:  # left by a killed process
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
            write(aside)
            os.rename(aside, partial / f"rank_{rank}")
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            with contextlib.suppress(OSError):
                partial.rmdir()
            raise
        try:
            finished = sum(entry.startswith("rank_") for entry in os.listdir(partial))
        except FileNotFoundError:  # another rank was last, and renames the folder
            return
        if finished < ranks:
            return
        # All ranks have written. Two ranks may get here at the same time: only one of the renames succeeds.
        complete = final.with_name(f".{final.name}.rank_{rank}.taken")
        try:
            os.rename(partial, complete)
        except FileNotFoundError:
            return
        if last is not None:
            last(complete)
        if final.exists():
            # A folder can't be renamed onto a non-empty one, so the old one is renamed first.
            old = final.with_name(f".{final.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
            os.rename(complete, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(complete, final)

    def drop(self, folder: Path) -> None:
        """Delete a folder: rename it first."""
        dropped = folder.with_name(f".{folder.name}.dropped")
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, dropped)
        shutil.rmtree(dropped, ignore_errors=True)

    def replace_steps(self, run: Path, others: Iterable[str]) -> None:
        if not os.path.lexists(run / STEPS):
            return
        # Renamed first, so that readers, also after a kill, see no half-deleted steps.
        discarded = run / f".{STEPS}.{os.getpid()}.overwritten"
        shutil.rmtree(discarded, ignore_errors=True)
        os.rename(run / STEPS, discarded)
        shutil.rmtree(discarded, ignore_errors=True)
        for name in others:
            shutil.rmtree(run / name, ignore_errors=True)

    def absent_ranks(self, run: Path, ranks: int) -> list[int]:
        active = {name.strip(".").split(".")[0] for name in _names(run) if name.endswith(".lock")}
        for step in _names(run / STEPS):
            active.update(name.lstrip(".") for name in _names(run / STEPS / step))
        return [rank for rank in range(ranks) if f"rank_{rank}" not in active]

    def incomplete_steps(self, run: Path) -> dict[int, list[int]]:
        incomplete: dict[int, list[int]] = {}
        for partial in _names(run / STEPS):
            digits, _, ending = partial[1:].partition(".")
            if partial.startswith(".") and ending == "partial" and digits.isdecimal():
                names = [name.removeprefix("rank_") for name in _names(run / STEPS / partial)]
                if not (run / STEPS / digits).exists():
                    incomplete[int(digits)] = sorted(int(name) for name in names if name.isdecimal())
        return incomplete


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _sizes(path: Path) -> Iterator[int]:
    try:
        if not path.is_dir():
            yield path.stat().st_size
            return
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:  # deleted by another rank, or by this process
        return


#: Name of the object that a rank writes for a step.
STEP_FILE = "step.safetensors"

_KEY = re.compile(rf"(\d{{8,}})/rank_(\d+)/{re.escape(STEP_FILE)}")


class InStore:
    """The medium of runs in a store, where each object is written atomically and a folder is no thing of its own."""

    is_slow = True

    def is_there(self, path: RemotePath) -> bool:
        return path.exists()

    def entries(self, folder: RemotePath) -> list[str]:
        return folder.names()

    def nbytes(self, path: RemotePath) -> int:
        return sum(path.sizes().values())

    def stamp(self, path: RemotePath) -> object:
        return path.store.version(path.key)

    def read_text(self, path: RemotePath, largest: int) -> bytes:
        text = path.store.get_range(path.key, 0, largest + 1)
        if len(text) > largest:
            raise ValueError(f"it has more than the {largest:,} bytes that are read at most")
        return text

    def check_inside(self, path: RemotePath, root: AnyPath) -> RemotePath:
        """Check that a key lies below ``root``: a store has no links, and a key has no ``..``."""
        if not f"{path}/".startswith(f"{root}/") or ".." in path.key.split("/"):
            raise RunFolderError(f"{path} leaves {root}, and is not read: do not use this run")
        return path

    def write_bytes(self, path: RemotePath, data: bytes) -> None:
        path.write_bytes(data)

    def write_pieces(self, path: RemotePath, pieces: Iterable[bytes | memoryview]) -> None:
        # Each piece is copied to bytes, as its memory is reused for the next one.
        path.write_bytes(b"".join(bytes(piece) for piece in pieces))

    def write_tensor(self, path: RemotePath, array: np.ndarray) -> None:
        content = io.BytesIO()
        np.save(content, to_storable(array), allow_pickle=False)
        path.write_bytes(content.getvalue())

    def write_part(
        self, final: RemotePath, rank: int, ranks: int, write: Callable[[RemotePath], None], last: object
    ) -> None:
        part = final / f"rank_{rank}"
        if final.parent.name != STEPS:
            # Packs and floors have several objects, of which the last marks the others as complete: delete an older
            # mark first.
            part.remove()
        write(part)

    def drop(self, folder: RemotePath) -> None:
        folder.remove()

    def replace_steps(self, run: RemotePath, others: Iterable[str]) -> None:
        for name in (STEPS, *others):
            (run / name).remove()

    def absent_ranks(self, run: RemotePath, ranks: int) -> list[int]:
        active = {rank for step in steps_in(run).values() for rank in step}
        active |= {int(name[6:-5]) for name in run.names() if re.fullmatch(r"\.rank_\d+\.lock", name)}
        return [rank for rank in range(ranks) if rank not in active]

    def incomplete_steps(self, run: RemotePath) -> dict[int, list[int]]:
        try:
            ranks = as_int(parse_json(self.read_text(run / RUN_FILE, LARGEST_JSON)).get("world_size", 1))
        except (OSError, ValueError, AttributeError, TypeError, json.JSONDecodeError):
            return {}
        return {number: sorted(parts) for number, parts in steps_in(run).items() if not is_whole(parts, ranks)}


def steps_in(run: RemotePath) -> dict[int, dict[int, int]]:
    """Return the steps of a run, complete or not, each as rank -> bytes of its object."""
    steps: dict[int, dict[int, int]] = {}
    start = len((run / STEPS).key) + 1
    for key, size in run.store.list((run / STEPS).key).items():
        match = _KEY.fullmatch(key[start:])
        if match:
            steps.setdefault(int(match[1]), {})[int(match[2])] = size
    return steps


def is_whole(there: dict[int, int], ranks: int) -> bool:
    """Return True if all ranks have written their part.

    Args:
        there: rank -> bytes of its part.
        ranks: number of ranks.
    """
    return len(there) >= ranks and all(rank in there for rank in range(ranks))


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


# Errors that decoding damaged JSON may raise.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError)


def read_json(path: AnyPath, root: AnyPath, version: int, missing: str) -> Any:
    """Return the content of a JSON file, which must be an object of this schema version.

    Args:
        root: the folder that the file has to lie in.
        version: the expected schema version.
        missing: end of the error message if the file is missing.

    Raises:
        RunFolderError: the file is missing, damaged, of another version, or outside of the folder.
    """
    inside = check_inside(path, root)
    try:
        content = parse_json(read_text(inside))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {missing}") from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error})") from error
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged, it is no JSON ({error}). Copy the run again") from error
    file_version = content.get("schema_version") if isinstance(content, dict) else None
    if file_version != version:
        raise RunFolderError(
            f"{path} has schema version {file_version!r}; this padiff reads {version}. "
            "Use the padiff that recorded it, or record the run again"
        )
    return content


class Explained:
    """Context manager that turns errors of decoding a damaged file into a `RunFolderError` that names the file."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, _DAMAGE):
            raise RunFolderError(
                f"{self._path} is damaged: {type(error).__name__}: {error}. It was edited, or only half copied"
            ) from error
