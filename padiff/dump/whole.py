"""Folders that several ranks write a part of each, and that come into being by one rename: whole or absent."""

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


def write_whole(
    final: AnyPath, rank: int, ranks: int, write: Callable[[Any], None], last: Callable[[Path], None] | None = None
) -> None:
    """Write a rank's part of a folder aside; whoever comes last gives the folder its name.

    Args:
        final: what the folder will be called.
        rank, ranks: whose part it is, and of how many.
        write: writes the part into a folder that is there, beside those of the ranks that have written.
        last: called by whoever comes last, with the folder that all have written, before others see it.
    """
    if isinstance(final, RemotePath):
        put_rank(final, rank, write)
        return
    partial = final.with_name(f".{final.name}.partial")
    aside = partial / f".rank_{rank}"
    try:
        partial.mkdir(exist_ok=True)  # not its parents: a folder that went away is not made anew
        try:
            aside.mkdir()
        except FileExistsError:  # of a process that was killed
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
        there = sum(entry.startswith("rank_") for entry in os.listdir(partial))
    except FileNotFoundError:  # another rank, which came last, takes the folder
        return
    if there < ranks:
        return
    # All ranks are there. Two that come last together both get here: one takes the folder, the other finds it taken.
    taken = final.with_name(f".{final.name}.rank_{rank}.taken")
    try:
        os.rename(partial, taken)
    except FileNotFoundError:
        return
    if last is not None:
        last(taken)
    if final.exists():
        # A folder can't be renamed onto a full one; the old one goes first, aside.
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
        os.rename(taken, final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(taken, final)


def drop_whole(folder: AnyPath) -> None:
    """Take a folder away, whole at once for whoever looks."""
    if isinstance(folder, RemotePath):
        folder.remove()
        return
    gone = folder.with_name(f".{folder.name}.dropped")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def absent_ranks(run: AnyPath, ranks: int) -> list[int]:
    """The ranks that do not record into a run folder now, and have written nothing of its steps."""
    if isinstance(run, RemotePath):
        return absent_in(run, ranks)
    there = {name.strip(".").split(".")[0] for name in names_in(run) if name.endswith(".lock")}
    for step in names_in(run / STEPS):
        there.update(name.lstrip(".") for name in names_in(run / STEPS / step))
    return [rank for rank in range(ranks) if f"rank_{rank}" not in there]


def names_in(folder: AnyPath) -> list[str]:
    """What is in a folder; nothing if it is gone: while it is looked at, other ranks go on and rename theirs."""
    try:
        return folder.names() if isinstance(folder, RemotePath) else sorted(os.listdir(folder))
    except OSError:
        return []


def incomplete_steps(run: AnyPath) -> dict[int, list[int]]:
    """The steps of a run folder that not all ranks have written, each with the ranks that have."""
    if isinstance(run, RemotePath):
        return incomplete_in(run)
    found: dict[int, list[int]] = {}
    for partial in names_in(run / STEPS):
        digits, _, ending = partial[1:].partition(".")
        if partial.startswith(".") and ending == "partial" and digits.isdecimal():
            names = [name.removeprefix("rank_") for name in names_in(run / STEPS / partial)]
            if not (run / STEPS / digits).exists():
                found[int(digits)] = sorted(int(name) for name in names if name.isdecimal())
    return found
