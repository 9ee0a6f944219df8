"""Making a run folder ready to be recorded into: nobody else's, nothing overwritten unasked, leftovers put away."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from padiff.dump.deduplication import SHARED
from padiff.dump.format import FINISHED_FILE, FLOORS, PACKS, RUN_FILE, STEPS
from padiff.dump.lock import FolderLock, is_recording
from padiff.dump.read import read_info
from padiff.dump.remote_lock import StoreLock
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.structures import STRUCTURES
from padiff.errors import RunFolderError
from padiff.records import RunInfo


def prepare(path: AnyPath, info: RunInfo, rank: int, existing: str) -> FolderLock:
    """Make or take over the folder for one rank; returns its lock. ``run.json`` is the caller's to write.

    Raises:
        RunFolderError: the folder holds a run (with ``error``), another model's run (with ``resume``), or files
            that are no run; or another process records into it.
        OSError: the folder cannot be written to.
    """
    path.mkdir(parents=True, exist_ok=True)
    # Before anything is changed: what is being recorded is neither resumed nor overwritten.
    lock = (StoreLock if isinstance(path, RemotePath) else FolderLock).take(path, rank)
    try:
        if rank == 0:
            _take_over(path, info, existing)
        (path / STEPS).mkdir(exist_ok=True)
        if isinstance(path, Path):
            _clear_own(path, rank)
            if rank == 0:
                _clear_leftovers(path, info.world_size)
    except BaseException:
        lock.release()
        raise
    return lock


def identity_for(path: AnyPath, existing: str) -> str:
    """Which recording a prepared folder is to hold: the one that it holds already where that is gone on with."""
    if existing == "resume" and (path / RUN_FILE).exists():
        return read_info(path / RUN_FILE).identity
    return os.urandom(8).hex()


def settings_for(path: AnyPath, existing: str) -> Mapping[str, Any] | None:
    """What a folder that is gone on with says of the settings; `None` where no step refers to it."""
    if existing == "resume" and (path / RUN_FILE).exists() and not _is_hollow(path / STEPS):
        return read_info(path / RUN_FILE).settings
    return None


def _take_over(path: AnyPath, info: RunInfo, existing: str) -> None:
    run_file, steps = path / RUN_FILE, path / STEPS
    if not run_file.exists():
        # A logger's own folder may hold other files of runs, and a process that was killed as it began leaves an
        # empty folder; only what we would write over counts.
        if existing != "resume" and _is_there(steps) and not _is_hollow(steps):
            raise RunFolderError(
                f"{path} has a folder '{STEPS}' but no {RUN_FILE}: it is no run folder. Give an empty one"
            )
        return
    if existing == "error":
        raise RunFolderError(
            f"{path} holds a run already, and nothing of it is overwritten unasked. Give another folder, "
            "or existing='resume' to go on with it, or existing='overwrite' to replace it"
        )
    if existing == "resume":
        _check_same_model(path, info)
    (path / FINISHED_FILE).unlink(missing_ok=True)
    if isinstance(path, RemotePath):
        if existing == "overwrite":
            for beside in (STEPS, STRUCTURES, SHARED, PACKS, FLOORS):
                (path / beside).remove()
        return
    assert isinstance(steps, Path)
    if existing == "overwrite" and os.path.lexists(steps):
        # Renamed first: whoever looks in between, or after a kill, sees no half-removed steps.
        aside = path / f".{STEPS}.{os.getpid()}.overwritten"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(steps, aside)
        shutil.rmtree(aside, ignore_errors=True)
        for beside in (STRUCTURES, SHARED, PACKS, FLOORS):
            shutil.rmtree(path / beside, ignore_errors=True)


def _is_there(folder: AnyPath) -> bool:
    return folder.is_dir() if isinstance(folder, RemotePath) else os.path.lexists(folder)


def _is_hollow(steps: AnyPath) -> bool:
    return steps.is_dir() and all(entry.name.startswith(".") for entry in steps.iterdir())


def _check_same_model(path: AnyPath, info: RunInfo) -> None:
    before = read_info(path / RUN_FILE)
    if [layer.path for layer in before.layers] != [layer.path for layer in info.layers]:
        raise RunFolderError(
            f"{path} holds the run of another model ({before.layers[0].type}, {len(before.layers)} layers; "
            f"now {info.layers[0].type}, {len(info.layers)} layers), so it can't be resumed. "
            "Give another folder, or existing='overwrite'"
        )


def _clear_own(path: Path, rank: int) -> None:
    """Put away what a process of this rank left that died while it wrote."""
    for left in (partial for place in (STEPS, PACKS) for partial in (path / place).glob(".*.partial")):
        for name in (f"rank_{rank}", f".rank_{rank}"):
            shutil.rmtree(left / name, ignore_errors=True)


def _clear_leftovers(path: Path, ranks: int) -> None:
    """Put away what a process left that died while it wrote; a step that it was replacing comes back.

    What ranks wrote that record now stays: they may have ended a step before the first one looked at the folder.
    """
    at_work = [rank for rank in range(1, ranks) if is_recording(path, rank)]
    for left in (hidden for place in (STEPS, PACKS, FLOORS) for hidden in (path / place).glob(".*")):
        if at_work and left.name.endswith(".partial") and left.is_dir():
            kept = {f"{dot}rank_{rank}" for rank in at_work for dot in ("", ".")}
            for own in left.iterdir():
                if own.name not in kept:
                    shutil.rmtree(own, ignore_errors=True)
            continue
        final = left.with_name(left.name[1:].removesuffix(".old"))
        if left.name.endswith(".old") and not final.exists():
            os.rename(left, final)
        else:
            shutil.rmtree(left, ignore_errors=True)
    for folder in (path, path / STRUCTURES, path / SHARED):
        for left in folder.glob(".*.partial"):
            left.unlink(missing_ok=True)
    for left in path.glob(f".{STEPS}.*.overwritten"):
        shutil.rmtree(left, ignore_errors=True)
