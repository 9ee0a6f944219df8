"""Reading untrusted files: only plain ones, inside of the folder, of limited size and content."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.errors import RunFolderError

AnyT = TypeVar("AnyT", bound=AnyPath)

#: Larger JSON files are refused; the trees of models with 100,000 layers are smaller.
LARGEST_JSON = 128 << 20
#: So are files with more values: a short text (``[[],[],...``) can take 30 times its length in memory.
MOST_VALUES = 8_000_000

#: Opens for reading: no link, and without waiting for whoever would write into a pipe.
NO_LINK = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_LARGEST = 2**63 - 1
_MOST_AXES = 64
_DEEPEST = 16


def check_inside(path: AnyT, root: AnyPath) -> AnyT:
    """Check that a path, with all links followed, lies in ``root``.

    Returns:
        The path to open, with no link in it: what becomes a link from now on is not followed (`NO_LINK`).

    Raises:
        RunFolderError: it does not, or is no path.
    """
    if isinstance(path, RemotePath) or isinstance(root, RemotePath):  # a store has no links, and a key has no `..`
        inside = isinstance(path, RemotePath) and f"{path}/".startswith(f"{root}/") and ".." not in path.key.split("/")
        if not inside:
            raise RunFolderError(f"{path} leaves {root}, and is not read: do not use this run")
        return path
    if _without_links(os.fspath(path), os.fspath(root)):
        return path
    try:  # without the objects that paths are made of
        inner, outer = os.path.realpath(path, strict=True), os.path.realpath(root, strict=True)
        if inner == outer or inner.startswith(outer + os.sep):
            return type(path)(inner)
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
    return type(path)(resolved)


def _without_links(path: str, root: str) -> bool:
    """Whether a path begins with ``root``, and nothing of the rest of it leads elsewhere: the plain case.

    What ``root`` itself leads to is the same for both, and need not be looked at.
    """
    if os.name == "nt" or not path.startswith(root + os.sep):  # Windows has further links, which lstat does not tell
        return False
    at = root
    try:
        for part in path[len(root) + 1 :].split(os.sep):
            at = f"{at}{os.sep}{part}"
            if part in ("", ".", "..") or stat.S_ISLNK(os.lstat(at).st_mode):
                return False
    except (OSError, ValueError):  # not there (yet), or no path
        return False
    return True


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading, and no link: a file may become one after its path was checked.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is something else: a pipe and a device would never end.
    """
    descriptor = os.open(path, NO_LINK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no plain file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: AnyPath, largest: int = LARGEST_JSON) -> bytes:
    """The content of a plain file that may hold JSON.

    Args:
        largest: how many bytes are read at most.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, or too large.
    """
    if isinstance(path, RemotePath):
        text = path.store.get_range(path.key, 0, largest + 1)
        if len(text) > largest:
            raise ValueError(f"it has more than the {largest:,} bytes that are read at most")
        return text
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise ValueError(f"it has {size:,} bytes, at most {largest:,} are read")
        return file.read(largest)


def parse_json(text: bytes, of_object: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse JSON that fits into memory.

    Args:
        of_object: what becomes of each object, the inner ones first. Default: a dictionary.

    Raises:
        ValueError: it is no JSON, or holds too much.
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


def whole(value: Any) -> int:
    """A whole number that 64 bits hold.

    Raises:
        ValueError, TypeError, OverflowError: it is none.
    """
    number = int(value)
    if not -_LARGEST <= number <= _LARGEST:
        raise ValueError(f"a number of {number.bit_length()} bits")
    return number


def shape_of(value: Iterable[Any]) -> tuple[int, ...]:
    """A tensor's shape.

    Raises:
        ValueError, TypeError, OverflowError: it is none.
    """
    return _shape_of(tuple(value))


@lru_cache(maxsize=4096)
def _shape_of(value: tuple[Any, ...]) -> tuple[int, ...]:
    shape = tuple(whole(extent) for extent in value)
    size = 1
    if len(shape) > _MOST_AXES or min(shape, default=0) < 0:
        raise ValueError(f"{str(shape)[:80]} is no shape")
    for extent in shape:
        size *= max(extent, 1)
        whole(size)
    return shape


def plain(value: Any, depth: int = 0) -> Any:
    """A value as it may stand among settings.

    Raises:
        ValueError: it is nested too deeply, or holds a number that 64 bits do not.
    """
    if depth > _DEEPEST:
        raise ValueError(f"values nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, int):
        return value if isinstance(value, bool) else whole(value)
    return value
