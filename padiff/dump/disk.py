"""Runs in folders of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from padiff.dump.files import aside, write_all, write_npy
from padiff.dump.format import STEPS
from padiff.dump.untrusted import inside_folder, read_limited


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
