"""A run that is kept in memory instead of in a folder."""

from __future__ import annotations

from padiff.records import RunInfo, Step, make_sketches


class MemoryRun:
    """A `Run` whose steps are in memory; what ``record(model)`` without a folder fills."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._steps: dict[int, Step] = {}
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

    # The same calls as the folder's writer has.

    def put(self, step: Step) -> None:
        make_sketches(record.source for record in step.records)
        self._steps[step.number] = step

    def describe(self, info: RunInfo) -> None:
        self._info = info

    def flush(self) -> None:
        pass

    def close(self, finished: bool = True) -> None:
        self._finished = finished
