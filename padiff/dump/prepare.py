"""Preparation of a run folder for recording: take its lock, check for an existing run, delete leftovers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from padiff.dump.deduplication import SHARED
from padiff.dump.format import FINISHED_FILE, FLOORS, PACKS, RUN_FILE, STEPS
from padiff.dump.lock import FolderLock, is_recording
from padiff.dump.medium import medium_of
from padiff.dump.read import read_info
from padiff.dump.remote_lock import StoreLock
from padiff.dump.remote_path import AnyPath, as_local
from padiff.dump.stored_schema import STRUCTURES
from padiff.errors import RunFolderError
from padiff.records import RunInfo


def prepare(path: AnyPath, info: RunInfo, rank: int, existing: str) -> FolderLock:
    """Create or take over a run folder for one rank, and return its lock. The caller writes ``run.json``.

    Raises:
        RunFolderError: the folder holds a run (with ``error``), another model's run (with ``resume``), or files
            that are no run; or another process records into it.
        OSError: the folder cannot be written to.
    """
    path.mkdir(parents=True, exist_ok=True)
    # First of all: a run that is being recorded must be neither resumed nor overwritten.
    folder = as_local(path)
    lock = (StoreLock if folder is None else FolderLock).acquire(path, rank)
    try:
        if rank == 0:
            _take_over(path, info, existing)
        (path / STEPS).mkdir(exist_ok=True)
        if folder is not None:
            _clear_own(folder, rank)
            if rank == 0:
                _clear_leftovers(folder, info.world_size)
    except BaseException:
        lock.release()
        raise
    return lock


def identity_for(path: AnyPath, existing: str) -> str:
    """Return the identity of the run to record: the existing one if a run is resumed, else a new one."""
    if existing == "resume" and (path / RUN_FILE).exists():
        return read_info(path / RUN_FILE).identity
    return os.urandom(8).hex()


def settings_for(path: AnyPath, existing: str) -> Mapping[str, Any] | None:
    """Return the settings in a resumed run's ``run.json``; `None` if no step refers to them."""
    if existing == "resume" and (path / RUN_FILE).exists() and not _is_hollow(path / STEPS):
        return read_info(path / RUN_FILE).settings
    return None


def _take_over(path: AnyPath, info: RunInfo, existing: str) -> None:
    run_file, steps = path / RUN_FILE, path / STEPS
    if not run_file.exists():
        # A logger's folder may hold other files, and a process killed at its start leaves an empty folder; only files
        # that we would overwrite count.
        if existing != "resume" and medium_of(steps).is_there(steps) and not _is_hollow(steps):
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
    if existing == "overwrite":
        medium_of(path).replace_steps(path, (STRUCTURES, SHARED, PACKS, FLOORS))


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
    """Delete unfinished parts that an earlier process of this rank left when it was killed."""
    for step_folder in (partial for place in (STEPS, PACKS) for partial in (path / place).glob(".*.partial")):
        for name in (f"rank_{rank}", f".rank_{rank}"):
            shutil.rmtree(step_folder / name, ignore_errors=True)


def _clear_leftovers(path: Path, ranks: int) -> None:
    """Delete unfinished files that a killed process left, and restore a step that it was replacing.

    Parts of ranks that record now stay: they may have ended a step before rank 0 prepares the folder.
    """
    at_work = [rank for rank in range(1, ranks) if is_recording(path, rank)]
    for leftover in (hidden for place in (STEPS, PACKS, FLOORS) for hidden in (path / place).glob(".*")):
        if at_work and leftover.name.endswith(".partial") and leftover.is_dir():
            active = {f"{dot}rank_{rank}" for rank in at_work for dot in ("", ".")}
            for part in leftover.iterdir():
                if part.name not in active:
                    shutil.rmtree(part, ignore_errors=True)
            continue
        final = leftover.with_name(leftover.name[1:].removesuffix(".old"))
        if leftover.name.endswith(".old") and not final.exists():
            os.rename(leftover, final)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    for folder in (path, path / STRUCTURES, path / SHARED):
        for leftover in folder.glob(".*.partial"):
            leftover.unlink(missing_ok=True)
    for leftover in path.glob(f".{STEPS}.*.overwritten"):
        shutil.rmtree(leftover, ignore_errors=True)
