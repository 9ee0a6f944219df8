"""Runs in a store: each rank writes one object for a step, and a step is complete once all objects exist."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable

import numpy as np

from padiff.dump.format import RUN_FILE, STEPS, to_storable
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.untrusted import LARGEST_JSON, as_int, parse_json
from padiff.errors import RunFolderError

#: Name of the object that a rank writes for a step.
STEP_FILE = "step.safetensors"

_KEY = re.compile(rf"(\d{{8,}})/rank_(\d+)/{re.escape(STEP_FILE)}")


class InStore:
    """The medium of runs in a store, where each object is written atomically and a folder is no thing of its own."""

    is_slow = True

    def is_there(self, path: RemotePath) -> bool:
        return path.exists()

    def entries(self, folder: RemotePath) -> list[str]:
        return folder.names()

    def nbytes(self, path: RemotePath) -> int:
        return sum(path.sizes().values())

    def stamp(self, path: RemotePath) -> object:
        return path.store.version(path.key)

    def read_text(self, path: RemotePath, largest: int) -> bytes:
        text = path.store.get_range(path.key, 0, largest + 1)
        if len(text) > largest:
            raise ValueError(f"it has more than the {largest:,} bytes that are read at most")
        return text

    def check_inside(self, path: RemotePath, root: AnyPath) -> RemotePath:
        """Check that a key lies below ``root``: a store has no links, and a key has no ``..``."""
        if not f"{path}/".startswith(f"{root}/") or ".." in path.key.split("/"):
            raise RunFolderError(f"{path} leaves {root}, and is not read: do not use this run")
        return path

    def write_bytes(self, path: RemotePath, data: bytes) -> None:
        path.write_bytes(data)

    def write_pieces(self, path: RemotePath, pieces: Iterable[bytes | memoryview]) -> None:
        # Each piece is copied to bytes, as its memory is reused for the next one.
        path.write_bytes(b"".join(bytes(piece) for piece in pieces))

    def write_tensor(self, path: RemotePath, array: np.ndarray) -> None:
        content = io.BytesIO()
        np.save(content, to_storable(array), allow_pickle=False)
        path.write_bytes(content.getvalue())

    def write_part(
        self, final: RemotePath, rank: int, ranks: int, write: Callable[[RemotePath], None], last: object
    ) -> None:
        part = final / f"rank_{rank}"
        if final.parent.name != STEPS:
            # Packs and floors have several objects, of which the last marks the others as complete: delete an older
            # mark first.
            part.remove()
        write(part)

    def drop(self, folder: RemotePath) -> None:
        folder.remove()

    def replace_steps(self, run: RemotePath, others: Iterable[str]) -> None:
        for name in (STEPS, *others):
            (run / name).remove()

    def absent_ranks(self, run: RemotePath, ranks: int) -> list[int]:
        active = {rank for step in steps_in(run).values() for rank in step}
        active |= {int(name[6:-5]) for name in run.names() if re.fullmatch(r"\.rank_\d+\.lock", name)}
        return [rank for rank in range(ranks) if rank not in active]

    def incomplete_steps(self, run: RemotePath) -> dict[int, list[int]]:
        try:
            ranks = as_int(parse_json(self.read_text(run / RUN_FILE, LARGEST_JSON)).get("world_size", 1))
        except (OSError, ValueError, AttributeError, TypeError, json.JSONDecodeError):
            return {}
        return {number: sorted(parts) for number, parts in steps_in(run).items() if not is_whole(parts, ranks)}


def steps_in(run: RemotePath) -> dict[int, dict[int, int]]:
    """Return the steps of a run, complete or not, each as rank -> bytes of its object."""
    steps: dict[int, dict[int, int]] = {}
    start = len((run / STEPS).key) + 1
    for key, size in run.store.list((run / STEPS).key).items():
        match = _KEY.fullmatch(key[start:])
        if match:
            steps.setdefault(int(match[1]), {})[int(match[2])] = size
    return steps


def is_whole(there: dict[int, int], ranks: int) -> bool:
    """Return True if all ranks have written their part.

    Args:
        there: rank -> bytes of its part.
        ranks: number of ranks.
    """
    return len(there) >= ranks and all(rank in there for rank in range(ranks))
