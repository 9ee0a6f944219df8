"""Atomic folders of several ranks: each rank writes its part, and the last one renames the folder into place."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from padiff.dump.format import STEPS
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.remote_steps import absent_in, incomplete_in, put_rank


def write_atomic(
    final: AnyPath, rank: int, ranks: int, write: Callable[[Any], None], last: Callable[[Path], None] | None = None
) -> None:
    """Write a rank's part of a folder under a temporary name; the last rank renames the folder.

    Args:
        final: final path of the folder.
        rank, ranks: the rank that writes, and the number of ranks.
        write: writes the part into the existing folder that it is given, which lies beside the parts of other ranks.
        last: called on the last rank with the complete folder, before it gets its final name.
    """
    if isinstance(final, RemotePath):
        put_rank(final, rank, write)
        return
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


def drop_atomic(folder: AnyPath) -> None:
    """Delete a folder atomically: rename it first."""
    if isinstance(folder, RemotePath):
        folder.remove()
        return
    dropped = folder.with_name(f".{folder.name}.dropped")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, dropped)
    shutil.rmtree(dropped, ignore_errors=True)


def absent_ranks(run: AnyPath, ranks: int) -> list[int]:
    """Return the ranks that do not record into a run folder now, and have written no part of a step."""
    if isinstance(run, RemotePath):
        return absent_in(run, ranks)
    active = {name.strip(".").split(".")[0] for name in names_in(run) if name.endswith(".lock")}
    for step in names_in(run / STEPS):
        active.update(name.lstrip(".") for name in names_in(run / STEPS / step))
    return [rank for rank in range(ranks) if f"rank_{rank}" not in active]


def names_in(folder: AnyPath) -> list[str]:
    """Return the names in a folder; an empty list if it does not exist, as other ranks may rename it meanwhile."""
    try:
        return folder.names() if isinstance(folder, RemotePath) else sorted(os.listdir(folder))
    except OSError:
        return []


def incomplete_steps(run: AnyPath) -> dict[int, list[int]]:
    """Return the incomplete steps of a run folder, each with the ranks that have written their part."""
    if isinstance(run, RemotePath):
        return incomplete_in(run)
    incomplete: dict[int, list[int]] = {}
    for partial in names_in(run / STEPS):
        digits, _, ending = partial[1:].partition(".")
        if partial.startswith(".") and ending == "partial" and digits.isdecimal():
            names = [name.removeprefix("rank_") for name in names_in(run / STEPS / partial)]
            if not (run / STEPS / digits).exists():
                incomplete[int(digits)] = sorted(int(name) for name in names if name.isdecimal())
    return incomplete
