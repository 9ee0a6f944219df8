"""Messages about missing steps: a step that a rank did not write is incomplete, and is not compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from padiff.dump.format import FINISHED_FILE
from padiff.dump.lock import is_recording
from padiff.dump.medium import incomplete_steps, read_text
from padiff.dump.read import FolderRun
from padiff.dump.remote_path import AnyPath, as_local
from padiff.dump.untrusted import as_int, parse_json
from padiff.errors import PadiffError
from padiff.records import Run

# Largest number of steps or ranks that a sentence names.
_NAMED = 8


def missing_steps(run: Run) -> dict[int, list[int]]:
    """Return the steps that a rank did not write and will not write any more, by rank.

    Slow ranks do not count: either the rank has written a later step, or its process has ended. (In a store, locks do
    not show if a process has ended; there, the run must be finished.)
    """
    if run.info.world_size < 2 or not isinstance(run, FolderRun):
        return {}
    try:
        return _lost_in(run)
    except (OSError, PadiffError):  # the folder is gone or unreachable: reading the steps reports that
        return {}


def _lost_in(run: FolderRun) -> dict[int, list[int]]:
    ranks = run.info.world_size
    incomplete = {number: set(ranks_of_step) for number, ranks_of_step in incomplete_steps(run.path).items()}
    if not incomplete:
        return {}
    last_complete = max(run.numbers(), default=-1)
    latest: dict[int, int] = defaultdict(lambda: last_complete)
    for number, ranks_of_step in incomplete.items():
        for rank in ranks_of_step:
            latest[rank] = max(latest[rank], number)
    missing: dict[int, list[int]] = {}
    ended: dict[int, bool] = {}
    for number in sorted(incomplete):
        # The recorded number of ranks may be huge in a damaged run, so only some ranks are checked.
        for rank in islice((rank for rank in range(ranks) if rank not in incomplete[number]), _NAMED + 1):
            if rank not in ended:
                ended[rank] = _has_ended(run, rank, latest[rank] >= 0)
            if latest[rank] > number or ended[rank]:
                missing.setdefault(rank, []).append(number)
    # A rank may have written its part between the two checks.
    current = incomplete_steps(run.path) if missing else {}
    confirmed = {
        rank: [n for n in numbers if n in current and rank not in current[n]] for rank, numbers in missing.items()
    }
    return {rank: numbers for rank, numbers in confirmed.items() if numbers}


def _has_ended(run: FolderRun, rank: int, begun: bool) -> bool:
    """Return True if a rank will write no more. A rank without any step may still begin until the run is finished."""
    folder = as_local(run.path)
    if folder is None:
        return run.finished()
    return not is_recording(folder, rank) and (begun or run.finished())


def lost_steps(run: AnyPath) -> tuple[int, str]:
    """Return the number of steps that a finished run could not write to its store, and the reason."""
    try:
        lost = parse_json(read_text(run / FINISHED_FILE)).get("lost", {})
        return as_int(lost.get("count", 0)), str(lost.get("why", ""))
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return 0, ""


def missing_steps_lines(run: Run, whose: str) -> list[str]:
    """Return a sentence for each group of ranks that lack the same steps.

    Args:
        whose: name of the run in the sentence.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, numbers in missing_steps(run).items():
        groups[tuple(numbers)].append(rank)
    return [
        f"{_listed('rank', of)} of {whose} did not write {_listed('step', numbers)}, so nothing of "
        f"{'it' if len(numbers) == 1 else 'them'} is compared"
        for numbers, of in groups.items()
    ]


def _listed(what: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    named, remaining = [str(number) for number in numbers[:_NAMED]], len(numbers) - _NAMED
    return (
        f"{what}s {', '.join(named)} and {remaining} more"
        if remaining > 0
        else f"{what}s {', '.join(named[:-1])} and {named[-1]}"
    )
