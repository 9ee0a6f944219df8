"""Rank of this process, and a check that the other ranks record into the same folder."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.dump.medium import medium_of
from padiff.dump.remote_path import AnyPath
from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.recorder.options import Identity

# Number of steps after which every rank must have begun to record; ranks may reach their first step at different times.
_HANDED_ON = 2
_NAMED = 5

_WHOLE = (
    "A step is whole when all ranks have written it, so no step of this run can be read. Call record() on every rank, "
    "with one folder for all; or, to keep this process alone, give rank=0, world_size=1"
)


def own_place(framework: Framework, identity: Identity) -> tuple[int, int]:
    """Return rank and number of processes: from the options, else from the framework or its launcher.

    Raises:
        UsageError: the number of processes is below 1, or the rank is not below that number.
    """
    rank, world_size = framework.environment.distributed()
    world_size = world_size if identity.world_size is None else identity.world_size
    rank = rank if identity.rank is None else identity.rank
    if world_size < 1:
        raise UsageError(f"world_size is the number of processes, at least 1; got {world_size}")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank is the number of this process, from 0 to {world_size - 1}, for there "
            f"{'is 1 process' if world_size == 1 else f'are {world_size} processes'}; got {rank}. Give world_size, too"
        )
    return rank, world_size


class OtherRanks:
    """Check that the other processes of a training record, too.

    Args:
        framework: framework of the model. Its process group is read again later, as it may be created after the
            recorder.
        folder: folder of the run; `None` for a run in memory.
        rank, world_size: rank and number of processes of the recorder.
        given: True if the caller set the number of processes, which is then trusted.
    """

    def __init__(self, framework: Framework, folder: AnyPath | None, rank: int, world_size: int, given: bool) -> None:
        self._framework, self._folder, self._given = framework, folder, given
        self._rank, self._world_size = rank, world_size
        self._handed_on = 0

    def look_into(self, folder: AnyPath | None) -> None:
        """Set another folder of the run."""
        self._folder = folder

    def handed_on(self) -> str:
        """Count a step that was handed on; return a warning, or an empty text if there is none."""
        self._handed_on += 1
        if self._handed_on == 1:
            return self._grouped_later()
        return self._absent() if self._handed_on == _HANDED_ON else ""

    def ended(self) -> str:
        """Return a warning about missing ranks at the end of a run that was too short for `handed_on` to check; else an
        empty text.
        """
        return self._absent() if 0 < self._handed_on < _HANDED_ON else ""

    def _grouped_later(self) -> str:
        rank, world_size = self._framework.environment.distributed()
        if self._given or self._folder is None or self._world_size > 1 or world_size == 1:
            return ""
        return (
            f"record() was called before the process group was made, and took this process for the only one; it is "
            f"rank {rank} of {world_size}. Call record() after it, or give rank= and world_size="
        )

    def _absent(self) -> str:
        """Return a warning about ranks that record nothing; only the lowest recording rank returns one."""
        if self._folder is None or self._world_size == 1:
            return ""
        absent = medium_of(self._folder).absent_ranks(self._folder, self._world_size)
        if not absent or self._rank != min(set(range(self._world_size)) - set(absent), default=-1):
            return ""
        return (
            f"this is rank {self._rank} of {self._world_size}, and {_listed(absent)} "
            f"{'records' if len(absent) == 1 else 'record'} nothing into {self._folder}. {_WHOLE}"
        )


def _listed(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
