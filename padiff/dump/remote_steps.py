"""The steps of a run in a store: each rank puts one object, and a step is whole once all ranks' are there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from padiff.dump.format import FINISHED_FILE, RUN_FILE, STEPS
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.untrusted import parse_json, read_text, whole

#: The object that a rank puts for a step.
STEP_FILE = "step.safetensors"

_KEY = re.compile(rf"(\d{{8,}})/rank_(\d+)/{re.escape(STEP_FILE)}")


def steps_in(run: RemotePath) -> dict[int, dict[int, int]]:
    """The steps that are there, whole or not: of each its ranks, and the bytes of what they put."""
    found: dict[int, dict[int, int]] = {}
    start = len((run / STEPS).key) + 1
    for key, size in run.store.list((run / STEPS).key).items():
        match = _KEY.fullmatch(key[start:])
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = size
    return found


def put_rank(final: RemotePath, rank: int, write: Callable[[RemotePath], None]) -> None:
    """Write a rank's part of a step, a pack or floors."""
    part = final / f"rank_{rank}"
    if final.parent.name != STEPS:
        # Several objects, of which the last says that all are there: the old one is not to say it of the new ones.
        part.remove()
    write(part)


def incomplete_in(run: RemotePath) -> dict[int, list[int]]:
    """The steps that not all ranks have put, each with the ranks that have."""
    try:
        ranks = whole(parse_json(read_text(run / RUN_FILE)).get("world_size", 1))
    except (OSError, ValueError, AttributeError, TypeError, json.JSONDecodeError):
        return {}
    return {number: sorted(there) for number, there in steps_in(run).items() if not is_whole(there, ranks)}


def is_whole(there: dict[int, int], ranks: int) -> bool:
    """Whether all of so many ranks have put their part."""
    return len(there) >= ranks and all(rank in there for rank in range(ranks))


def absent_in(run: RemotePath, ranks: int) -> list[int]:
    """The ranks that do not record now, and have put nothing."""
    there = {rank for step in steps_in(run).values() for rank in step}
    there |= {int(name[6:-5]) for name in run.names() if re.fullmatch(r"\.rank_\d+\.lock", name)}
    return [rank for rank in range(ranks) if rank not in there]


def lost_steps(run: AnyPath) -> tuple[int, str]:
    """How many steps a finished run says that its store did not take, and why."""
    try:
        lost = parse_json(read_text(run / FINISHED_FILE)).get("lost", {})
        return whole(lost.get("count", 0)), str(lost.get("why", ""))
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return 0, ""
