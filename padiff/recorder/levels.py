"""How much is kept in the step under way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from padiff.dump.zoom import Requests
from padiff.model.selection import Node
from padiff.recorder.detail import FULL, SKETCH, SMALL, Detail
from padiff.recorder.schedule import Schedule
from padiff.records import LOOP, STAGES


class Levels(dict[tuple[str, str], str]):
    """The levels of one step by layer and stage, each looked up once.

    Args:
        full: whether full tensors are due instead of sketches; a collection of paths: for these layers.
        sketch: what else becomes of a sketch.
    """

    def __init__(self, detail: Detail, full: bool | frozenset[str] = False, sketch: str = SKETCH) -> None:
        super().__init__()
        self._detail, self._full, self._sketch = detail, full, sketch
        self._filled: Sequence[Node] | None = None

    def fill(self, nodes: Sequence[Node]) -> None:
        """Look all up for these layers: paddle's ``to_static`` reads what hooks do, and can't follow a look-up."""
        if self._filled is not nodes:
            self._filled = nodes
            for path in (*(node.path for node in nodes), LOOP):
                for stage in STAGES:
                    self[path, stage]

    def __missing__(self, key: tuple[str, str]) -> str:
        path, stage = key
        level = self._detail.level_of(path, stage)
        if level == SKETCH:
            full = path in self._full if isinstance(self._full, frozenset) else self._full
            level = FULL if full else self._sketch
        self[key] = level
        return level


class LevelsOfSteps:
    """The levels of each due step: sometimes full tensors are due instead of sketches, or asked for.

    Args:
        detail: what is kept.
        functions: whether more is to be looked at in some steps: functions in the first one that is recorded and those
            that are asked for, and in the first one small tensors in full.

    Attributes:
        functions: whether they are in the step that was last asked about.
    """

    def __init__(self, detail: Detail, functions: bool = False) -> None:
        self._detail = detail
        every = detail.full_every_n_steps
        self._full = None if every is None else Schedule.of(every)
        self._requests: Requests | None = None
        self._usual = Levels(detail)
        self._wanted = self._first = self.functions = functions

    def listen(self, run: Path | None) -> None:
        """From now on, look in the run folder for requests for full tensors."""
        if run is not None and (self._detail.sketches or self._wanted):
            self._requests = Requests(run)

    def of(self, step: int, full: bool = False) -> Levels:
        """The levels of a due step; ``full``: whatever is sketched in others is kept in full."""
        zoomed = self._requests.due(step) if self._requests is not None else None
        self.functions = self._first or (self._wanted and bool(zoomed))
        if full or (self._full is not None and self._full.due(step)):
            return Levels(self._detail, full=True)
        if self._first:
            return Levels(self._detail, zoomed or False, SMALL)
        return Levels(self._detail, full=zoomed) if zoomed else self._usual

    def recorded(self) -> None:
        """A step was recorded: the first one is over."""
        self._first = False
