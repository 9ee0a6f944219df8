"""Names of the files and folders of a run on this machine."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from padiff.dump.format import RUN_FILE
from padiff.errors import RunFolderError

# Run folders that a message names when the requested folder is missing.
_NAMED = 5


def neighbours_of(path: Path) -> str:
    """Return a sentence that names the run folders beside a missing path, the most similar first; may be empty."""
    try:
        runs = [entry.name for entry in path.parent.iterdir() if (entry / RUN_FILE).is_file()]
    except OSError:
        return ""
    if not runs:
        return ""
    close = difflib.get_close_matches(path.name, runs, n=_NAMED, cutoff=0.0)
    more = ", ..." if len(runs) > len(close) else ""
    return f". In {path.parent} there are the run folders {', '.join(close)}{more}"


def names_of(folder: Path) -> list[str]:
    """Return the names of a folder's entries; an empty list if the folder does not exist.

    Raises:
        RunFolderError: this user has no permission to read the folder, or the path is a file.
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
    """Return the folders of the ranks in a step's folder, by rank.

    Raises:
        RunFolderError: see `names_of`.
    """
    return [folder / name for name in rank_names(names_of(folder))]


def rank_names(names: Iterable[str]) -> list[str]:
    """Return those names that are folders of ranks (``rank_N``), sorted by rank."""
    return sorted((n for n in names if n.startswith("rank_") and n[5:].isdecimal()), key=lambda name: int(name[5:]))
