"""What lies in the folders of a run on this machine."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from padiff.dump.format import RUN_FILE
from padiff.errors import RunFolderError

# Run folders that are named where another one was looked for.
_NAMED = 5


def neighbours_of(path: Path) -> str:
    """The run folders where one was looked for that is not there, the nearest names first."""
    try:
        there = [entry.name for entry in path.parent.iterdir() if (entry / RUN_FILE).is_file()]
    except OSError:
        return ""
    if not there:
        return ""
    close = difflib.get_close_matches(path.name, there, n=_NAMED, cutoff=0.0)
    more = ", ..." if len(there) > len(close) else ""
    return f". In {path.parent} there are the run folders {', '.join(close)}{more}"


def names_of(folder: Path) -> list[str]:
    """Names of what a folder holds; none if it is not there.

    Raises:
        RunFolderError: it must not be read, or is a file.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise RunFolderError(f"{folder} is a file; expected a folder: the run is damaged. Copy it again") from None
    except PermissionError as error:
        raise RunFolderError(
            f"{folder} must not be read by this user ({error.strerror}). Allow it (chmod -R +rX), or copy the run"
        ) from error


def ranks_of(folder: Path) -> list[Path]:
    """The folders of the ranks in a step's, in their order.

    Raises:
        RunFolderError: as `names_of`.
    """
    return [folder / name for name in rank_names(names_of(folder))]


def rank_names(names: Iterable[str]) -> list[str]:
    """Those that are names of ranks' folders, in the order of the ranks."""
    return sorted((n for n in names if n.startswith("rank_") and n[5:].isdecimal()), key=lambda name: int(name[5:]))
