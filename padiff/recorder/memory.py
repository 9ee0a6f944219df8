"""A run that is kept in memory instead of in a folder."""

from __future__ import annotations

from padiff.records import RunInfo, Sketched, Step, make_sketches, run_card, run_line, run_text, sources_of
from padiff.records.pack import Pack

#: Bytes that a run in memory holds, unless ``max_bytes`` says otherwise.
MAX_BYTES = 1_000_000_000


class MemoryRun:
    """A `Run` whose steps are in memory; what ``record(model)`` without a folder fills.

    Args:
        info: what holds for all steps.
        max_bytes: how much it holds. What does not fit goes, the oldest steps first; the first step of all and the
            latest one stay. Default: `MAX_BYTES`.

    Attributes:
        max_bytes: likewise.
        dropped: numbers of the steps that went.
    """

    def __init__(self, info: RunInfo, max_bytes: float | None = None) -> None:
        self._info = info
        self.max_bytes = MAX_BYTES if max_bytes is None else max_bytes
        self.dropped: list[int] = []
        self._steps: dict[int, Step] = {}
        self._sizes: dict[int, int] = {}
        #: What steps need to be done again, by their numbers.
        self.packs: dict[int, Pack] = {}
        self._finished = False

    @property
    def name(self) -> str:
        return self._info.name or self._info.framework

    @property
    def info(self) -> RunInfo:
        return self._info

    def numbers(self) -> list[int]:
        return sorted(self._steps)

    def steps(self, number: int) -> list[Step]:
        return [self._steps[number]]

    def finished(self) -> bool:
        return self._finished

    def __str__(self) -> str:
        return run_text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return run_card(self)

    def __repr__(self) -> str:
        return f"<MemoryRun: {run_line(self)}>"

    # The same calls as the folder's writer has.

    def put(self, step: Step, pack: Pack | None = None) -> None:
        make_sketches(step)
        self._steps[step.number] = step
        self._sizes[step.number] = bytes_of(step)
        if pack is not None:
            self.packs[step.number] = pack
            self._sizes[step.number] += pack.nbytes
        for number in self.numbers()[1:-1]:
            if sum(self._sizes.values()) <= self.max_bytes:
                break
            del self._steps[number], self._sizes[number]
            self.packs.pop(number, None)
            self.dropped.append(number)

    def describe(self, info: RunInfo) -> None:
        self._info = info

    def flush(self) -> None:
        pass

    def close(self, finished: bool = True) -> None:
        self._finished = finished


def bytes_of(step: Step) -> int:
    """Bytes of a step's values; what several records share is there once."""
    arrays = [a for s in sources_of(step) for a in ([s.row] if isinstance(s, Sketched) else s.arrays)]
    return sum({id(array): array.nbytes for array in arrays}.values())
