"""Which rank did not write which steps, in words: a step that lacks a rank is no step, and nobody else would say so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from padiff.dump.lock import is_recording
from padiff.dump.read import FolderRun
from padiff.dump.remote_path import RemotePath
from padiff.dump.whole import incomplete_steps
from padiff.errors import PadiffError
from padiff.records import Run

# Steps and ranks that a sentence names.
_NAMED = 8


def lost_in(run: Run) -> dict[int, list[int]]:
    """The steps that a rank did not write and will not write any more, by rank.

    A rank that is only slower than others is not meant: it has written a later step, or its process has ended. (What
    processes leave in a store is no sign of life: there, the run has to have ended.)
    """
    if run.info.world_size < 2 or not isinstance(run, FolderRun):
        return {}
    try:
        return _lost_in(run)
    except (OSError, PadiffError):  # gone, or out of reach: whoever reads steps says so
        return {}


def _lost_in(run: FolderRun) -> dict[int, list[int]]:
    ranks = run.info.world_size
    there = {number: set(own) for number, own in incomplete_steps(run.path).items()}
    if not there:
        return {}
    whole = max(run.numbers(), default=-1)
    latest: dict[int, int] = defaultdict(lambda: whole)
    for number, own in there.items():
        for rank in own:
            latest[rank] = max(latest[rank], number)
    found: dict[int, list[int]] = {}
    ended: dict[int, bool] = {}
    for number in sorted(there):
        # What a run says of its ranks may be any number: not all of them are looked at.
        for rank in islice((rank for rank in range(ranks) if rank not in there[number]), _NAMED + 1):
            if rank not in ended:
                ended[rank] = _has_ended(run, rank, latest[rank] >= 0)
            if latest[rank] > number or ended[rank]:
                found.setdefault(rank, []).append(number)
    # A rank may have written between the look at the folders and the look at its process.
    now = incomplete_steps(run.path) if found else {}
    still = {rank: [n for n in numbers if n in now and rank not in now[n]] for rank, numbers in found.items()}
    return {rank: numbers for rank, numbers in still.items() if numbers}


def _has_ended(run: FolderRun, rank: int, begun: bool) -> bool:
    """Whether a rank's process will write no more; one that has written nothing may begin yet, while others record."""
    if isinstance(run.path, RemotePath):
        return run.finished()
    return not is_recording(run.path, rank) and (begun or run.finished())


def lost_lines(run: Run, whose: str) -> list[str]:
    """A sentence for the ranks that lack the same steps; none where all is there.

    Args:
        whose: what the run is called.
    """
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, numbers in lost_in(run).items():
        alike[tuple(numbers)].append(rank)
    return [
        f"{_listed('rank', of)} of {whose} did not write {_listed('step', numbers)}, so nothing of "
        f"{'it' if len(numbers) == 1 else 'them'} is compared"
        for numbers, of in alike.items()
    ]


def _listed(what: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    named, rest = [str(number) for number in numbers[:_NAMED]], len(numbers) - _NAMED
    return (
        f"{what}s {', '.join(named)} and {rest} more"
        if rest > 0
        else f"{what}s {', '.join(named[:-1])} and {named[-1]}"
    )
