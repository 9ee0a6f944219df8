"""A run in memory instead of in a folder."""

from __future__ import annotations

from padiff.records import RunInfo, Sketched, Step, make_sketches, run_card, run_line, run_text, sources_of
from padiff.records.pack import Pack

#: Default maximum size of a run in memory, in bytes.
MAX_BYTES = 1_000_000_000


class MemoryRun:
    """A `Run` whose steps are in memory; ``record(model)`` without a folder makes one.

    Args:
        info: facts that hold for all steps.
        max_bytes: maximum size in bytes. Above it the oldest steps are dropped, except the first step of the run and
            the latest one. Default: `MAX_BYTES`.

    Attributes:
        max_bytes: maximum size in bytes.
        dropped: numbers of the dropped steps.
        packs: replay packs, by step number.
    """

    def __init__(self, info: RunInfo, max_bytes: float | None = None) -> None:
        self._info = info
        self.max_bytes = MAX_BYTES if max_bytes is None else max_bytes
        self.dropped: list[int] = []
        self._steps: dict[int, Step] = {}
        self._sizes: dict[int, int] = {}
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
        """Return the HTML that a notebook shows for the run."""
        return run_card(self)

    def __repr__(self) -> str:
        return f"<MemoryRun: {run_line(self)}>"

    # The methods of `padiff.recorder.output.Sink`, as in the writer of a folder.

    def add_step(self, step: Step, pack: Pack | None = None) -> None:
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

    def set_info(self, info: RunInfo) -> None:
        self._info = info

    def flush(self) -> None:
        pass

    def close(self, finished: bool = True) -> None:
        self._finished = finished


def bytes_of(step: Step) -> int:
    """Return the size of a step's values in bytes; arrays that several records share count once."""
    arrays = [a for s in sources_of(step) for a in ([s.row] if isinstance(s, Sketched) else s.arrays)]
    return sum({id(array): array.nbytes for array in arrays}.values())
