"""Steps of a run in a store: each rank writes one object, and a step is complete once all objects exist."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from padiff.dump.format import FINISHED_FILE, RUN_FILE, STEPS
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.untrusted import as_int, parse_json, read_text

#: Name of the object that a rank writes for a step.
STEP_FILE = "step.safetensors"

_KEY = re.compile(rf"(\d{{8,}})/rank_(\d+)/{re.escape(STEP_FILE)}")


def steps_in(run: RemotePath) -> dict[int, dict[int, int]]:
    """Return the steps of a run, complete or not, each as rank -> bytes of its object."""
    steps: dict[int, dict[int, int]] = {}
    start = len((run / STEPS).key) + 1
    for key, size in run.store.list((run / STEPS).key).items():
        match = _KEY.fullmatch(key[start:])
        if match:
            steps.setdefault(int(match[1]), {})[int(match[2])] = size
    return steps


def put_rank(final: RemotePath, rank: int, write: Callable[[RemotePath], None]) -> None:
    """Write a rank's part of a step, a pack or floors.

    Args:
        final: the folder of the step, pack or floors.
        write: writes the part into the rank's folder.
    """
    part = final / f"rank_{rank}"
    if final.parent.name != STEPS:
        # These have several objects, of which the last marks the others as complete: delete an older mark first.
        part.remove()
    write(part)


def incomplete_in(run: RemotePath) -> dict[int, list[int]]:
    """Return the incomplete steps, each with the ranks that have written their object."""
    try:
        ranks = as_int(parse_json(read_text(run / RUN_FILE)).get("world_size", 1))
    except (OSError, ValueError, AttributeError, TypeError, json.JSONDecodeError):
        return {}
    return {number: sorted(parts) for number, parts in steps_in(run).items() if not is_whole(parts, ranks)}


def is_whole(there: dict[int, int], ranks: int) -> bool:
    """Return True if all ranks have written their part.

    Args:
        there: rank -> bytes of its part.
        ranks: number of ranks.
    """
    return len(there) >= ranks and all(rank in there for rank in range(ranks))


def absent_in(run: RemotePath, ranks: int) -> list[int]:
    """Return the ranks that do not record now, and have written no object."""
    active = {rank for step in steps_in(run).values() for rank in step}
    active |= {int(name[6:-5]) for name in run.names() if re.fullmatch(r"\.rank_\d+\.lock", name)}
    return [rank for rank in range(ranks) if rank not in active]


def lost_steps(run: AnyPath) -> tuple[int, str]:
    """Return the number of steps that a finished run could not write to its store, and the reason."""
    try:
        lost = parse_json(read_text(run / FINISHED_FILE)).get("lost", {})
        return as_int(lost.get("count", 0)), str(lost.get("why", ""))
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return 0, ""
