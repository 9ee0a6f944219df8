"""Reading of untrusted files: only regular files, inside of the folder, of limited size and content."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from padiff.errors import RunFolderError

#: Larger JSON files are refused; the trees of models with 100,000 layers are smaller.
LARGEST_JSON = 128 << 20
#: JSON files with more values are refused: a short text (``[[],[],...``) can take 30 times its length in memory.
MOST_VALUES = 8_000_000

#: Flags to open a file for reading: no symbolic link, and without waiting for the writer of a pipe.
NO_LINK = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_LARGEST = 2**63 - 1
_MOST_AXES = 64
_DEEPEST = 16


def inside_folder(path: Path, root: Path) -> Path:
    """Check that a path, with all links followed, lies in ``root``.

    Returns:
        The path to open, without links. Opened with `NO_LINK`, it is not followed if it becomes a link later.

    Raises:
        RunFolderError: the path leads out of ``root``, or is no valid path.
    """
    try:  # as text, which is faster than Path objects
        outer = os.path.realpath(root, strict=True)
        if os.name == "posix" and (plain := _without_links(str(path), str(root), outer)):  # Windows has other links
            return Path(plain)
        inner = os.path.realpath(path, strict=True)
        if inner == outer or inner.startswith(outer + os.sep):
            return Path(inner)
    except (OSError, RuntimeError, ValueError):
        pass  # not there (yet), or no path
    try:
        resolved, top = path.resolve(), root.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a null byte
        raise RunFolderError(f"{path} cannot be a path ({error}): do not use this run folder") from error
    if resolved != top and top not in resolved.parents:
        raise RunFolderError(
            f"{path} leaves {root} by a link, and is not read. Open the folder that it leads to, or copy the run whole"
        )
    return resolved


def _without_links(path: str, root: str, real_root: str) -> str:
    """Return a path below ``root`` with the root's real path; empty where a link or ``..`` follows the root."""
    if not path.startswith(root + os.sep):
        return ""
    for part in path[len(root) + 1 :].split(os.sep):
        real_root = f"{real_root}{os.sep}{part}"
        if part in ("", os.pardir) or stat.S_ISLNK(os.lstat(real_root).st_mode):
            return ""
    return real_root


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading, but no link: a file may become a link after its path was checked.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the path is no regular file: reading a pipe or device may never end.
    """
    descriptor = os.open(path, NO_LINK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no plain file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(path: Path, largest: int) -> bytes:
    """Return the content of a regular file of limited size, such as JSON.

    Args:
        largest: largest size in bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the path is no regular file, or the file is too large.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise ValueError(f"it has {size:,} bytes, at most {largest:,} are read")
        return file.read(largest)


def parse_json(text: bytes, of_object: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse JSON of limited size.

    Args:
        of_object: converts each object, inner objects first. Default: objects stay dictionaries.

    Raises:
        ValueError: the text is no JSON, holds too many values, or is nested too deeply.
    """
    values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if values > MOST_VALUES:
        raise ValueError(f"it holds some {values:,} values, at most {MOST_VALUES:,} are read")
    try:
        return json.loads(text.decode("utf-8"), object_hook=of_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None


def as_int(value: Any) -> int:
    """Return a value as an integer that fits into 64 bits.

    Raises:
        ValueError, TypeError, OverflowError: the value is no number, or too large.
    """
    number = int(value)
    if not -_LARGEST <= number <= _LARGEST:
        raise ValueError(f"a number of {number.bit_length()} bits")
    return number


def shape_of(value: Iterable[Any]) -> tuple[int, ...]:
    """Return a list of extents as a tensor's shape.

    Raises:
        ValueError, TypeError, OverflowError: the value is no valid shape.
    """
    return _shape_of(tuple(value))


@lru_cache(maxsize=4096)
def _shape_of(value: tuple[Any, ...]) -> tuple[int, ...]:
    shape = tuple(as_int(extent) for extent in value)
    size = 1
    if len(shape) > _MOST_AXES or min(shape, default=0) < 0:
        raise ValueError(f"{str(shape)[:80]} is no shape")
    for extent in shape:
        size *= max(extent, 1)
        as_int(size)
    return shape


def plain(value: Any, depth: int = 0) -> Any:
    """Return a JSON value for use among settings, with all keys as text.

    Raises:
        ValueError: the value is nested too deeply, or holds an integer of more than 64 bits.
    """
    if depth > _DEEPEST:
        raise ValueError(f"values nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, int):
        return value if isinstance(value, bool) else as_int(value)
    return value


_lock = threading.Lock()


def read_into(descriptor: int, start: int, *parts: np.ndarray) -> None:
    """Fill contiguous byte arrays, one after the other, with a file's content from offset ``start`` on.

    Raises:
        ValueError: the file is too short.
        OSError: it cannot be read.
    """
    if hasattr(os, "preadv"):
        done = os.preadv(descriptor, [part.data for part in parts], start)
        if done == sum(part.size for part in parts):  # the usual case
            return
    for part in parts:
        done = 0
        while done < part.size:
            read = _read(descriptor, start + done, part[done:])
            if not read:
                raise ValueError("the file was cut off")
            done += read
        start += part.size


def read(descriptor: int, start: int, size: int) -> bytes:
    """Return ``size`` bytes of a file from offset ``start`` on.

    Raises:
        ValueError: the file is too short.
        OSError: it cannot be read.
    """
    if hasattr(os, "pread"):
        data = os.pread(descriptor, size, start)
        if len(data) == size:  # the usual case
            return data
    memory = np.empty(size, np.uint8)
    read_into(descriptor, start, memory)
    return memory.tobytes()


def _read(descriptor: int, start: int, memory: np.ndarray) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory.data], start)
    with _lock:  # Windows has no `preadv`: seek and read need a lock, as threads share the descriptor's position
        os.lseek(descriptor, start, os.SEEK_SET)
        data = os.read(descriptor, min(memory.size, 1 << 30))
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)
