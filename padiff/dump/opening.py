"""Opening of a path that holds a run, one step of a run, or dumps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from padiff.dump.format import PARAMS_FILE, REPORT_FILE, RUN_FILE, STEPS
from padiff.dump.local import absolute, run_folder
from padiff.dump.names import names_of, neighbours_of, ranks_of
from padiff.dump.pack import PACK_FILE
from padiff.dump.read import DumpSeries, FolderRun, SingleDump
from padiff.dump.remote_path import AnyPath, as_remote, is_location, local_only
from padiff.dump.remote_run import StoreRun
from padiff.errors import RunFolderError
from padiff.records import Run


def open_run(
    path: str | AnyPath, files: Sequence[str] = (REPORT_FILE, PARAMS_FILE)
) -> FolderRun | SingleDump | DumpSeries:
    """Open a run folder, one step's folder of it, a dump folder (one that holds the JSON files itself), or a folder of
    dump folders ``step_N``.

    Args:
        path: the folder, or the url of a run in a store.
        files: the JSON files of a dump folder to read, as far as they exist.

    Raises:
        RunFolderError: the path is none of these, or has another schema version.
        UsageError: the value is no path, or has an unsupported url scheme (``ftp://``).
    """
    place = run_folder(path, "run")
    remote = as_remote(place)
    return _open_folder(local_only(place), files) if remote is None else StoreRun(remote)


def opened(run: str | AnyPath | Run) -> Run:
    """Return a run, opened if its path is given."""
    return open_run(run) if is_location(run) else cast(Run, run)


def _open_folder(path: Path, files: Sequence[str]) -> FolderRun | SingleDump | DumpSeries:
    if not path.exists():
        raise RunFolderError(f"there is no run folder {path}{neighbours_of(path)}")
    if not path.is_dir():
        raise RunFolderError(f"{path} is a file; expected a run folder (one that holds {RUN_FILE})")
    path = absolute(path)
    names_of(path)  # raises a clear error if this user has no permission to read the folder
    if (path / RUN_FILE).exists():
        return FolderRun(path)
    if any((path / name).exists() for name in (*files, REPORT_FILE, PARAMS_FILE, PACK_FILE)):
        return SingleDump(path, [path], files)
    if ranks_of(path):
        return SingleDump(path, ranks_of(path), files)
    if any(entry.name[5:].isdecimal() for entry in path.glob("step_*")):
        return DumpSeries(path, files)
    hint = ""
    if (path / STEPS).is_dir():
        hint = f" It has a folder '{STEPS}', so it was a run folder: its {RUN_FILE} is lost."
    below = sorted(str(entry.parent.name) for entry in path.glob(f"*/{RUN_FILE}"))
    if below:
        hint = f" Below it there are run folders: {', '.join(below[:5])}."
    raise RunFolderError(f"{path} is no run folder: it holds neither {RUN_FILE} nor {REPORT_FILE}.{hint}")
