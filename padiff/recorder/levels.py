"""How much is kept in the step under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from padiff.dump.remote_path import AnyPath
from padiff.dump.zoom import Requests, requests_of
from padiff.model.selection import Node
from padiff.recorder.detail import AUTO, FULL, SKETCH, SMALL, WITHIN, Detail
from padiff.recorder.memory import bytes_of
from padiff.recorder.run_size import RunSize, bytes_in_full, bytes_sketched
from padiff.recorder.schedule import Schedule
from padiff.records import LOOP, PARAMETER_STAGES, STAGES, Step, bytes_text

#: Bytes of full tensors that ``detail="auto"`` keeps of a run, of all its processes. Chosen: four steps of a small
#: convolutional net (49 MB each, batch 64), more than a hundred of most small nets, and nothing that a disk notices
#: after ten experiments. Measured, of 758 planted faults in small programs: 719 causes are named, as with 1 GB.
FULL_BYTES = 200_000_000

_SKETCHED: Mapping[str, str] = dict.fromkeys(STAGES, SKETCH)
_KEPT: Mapping[str, str] = dict.fromkeys(STAGES, FULL)


class Levels(dict[tuple[str, str], str]):
    """The levels of one step by layer and stage, each looked up once.

    Args:
        full: whether full tensors are due instead of sketches; a collection of paths: for these layers.
        sketch: what else becomes of a sketch.
        auto: what ``auto`` is, by stage.
    """

    def __init__(
        self,
        detail: Detail,
        full: bool | frozenset[str] = False,
        sketch: str = SKETCH,
        auto: Mapping[str, str] = _SKETCHED,
    ) -> None:
        super().__init__()
        self._detail, self._full, self._sketch, self._auto = detail, full, sketch, auto
        self._filled: Sequence[Node] | None = None

    def fill(self, nodes: Sequence[Node]) -> None:
        """Look all up for these layers: paddle's ``to_static`` reads what hooks do, and can't follow a look-up."""
        if self._filled is not nodes:
            self._filled = nodes
            paths = [*(node.path for node in nodes), LOOP]
            alike = not self._detail.rules and not isinstance(self._full, frozenset)
            for stage in STAGES:
                if alike:  # whichever layer it is
                    self.update(dict.fromkeys([(path, stage) for path in paths], self[LOOP, stage]))
                    continue
                for path in paths:
                    self[path, stage]

    def __missing__(self, key: tuple[str, str]) -> str:
        path, stage = key
        level = self._detail.level_of(path, stage)
        if level == AUTO:
            level = self._auto[stage]
        if level in (SKETCH, WITHIN):
            full = path in self._full if isinstance(self._full, frozenset) else self._full
            level = FULL if full else self._sketch if level == SKETCH else level
        self[key] = level
        return level


class LevelsOfSteps:
    """The levels of each due step: sometimes full tensors are due instead of sketches, or asked for.

    Args:
        detail: what is kept.
        functions: whether more is to be looked at in some steps: functions in the first one that is recorded and those
            that are asked for, and in the first one small tensors in full.
        budget: bytes that ``auto`` keeps in full.

    Attributes:
        functions: whether they are in the step that was last asked about.
        spent: bytes that ``auto`` has kept.
    """

    def __init__(self, detail: Detail, functions: bool = False, budget: float = FULL_BYTES) -> None:
        self._detail, self.budget = detail, budget
        self.spent, self._largest, self._owned = 0.0, 0.0, 0.0
        self._keeping, self._begun = detail.automatic, False
        every = detail.full_every_n_steps
        self._full = None if every is None else Schedule.of(every)
        #: Of the steps after the budget, how many are due in full.
        self._full_share = 0.0 if self._full is None or self._full.steps is not None else 1 / self._full.every
        self._requests: Requests | None = None
        self._usual, self._kept = Levels(detail), Levels(detail, auto=_KEPT)
        self._wanted = self._first = self.functions = functions

    def listen(self, run: AnyPath | None) -> None:
        """From now on, look in the run folder for requests for full tensors."""
        if run is not None and (self._detail.sketches or self._wanted):
            self._requests = requests_of(run)

    def begin(self, owned: Callable[[], float], spent: float) -> None:
        """The run that is gone on with has so many bytes; ``owned`` says how many the model's parameters and buffers
        have, where that matters.
        """
        self._owned, self.spent = owned() if self._keeping else 0.0, spent

    @property
    def room(self) -> float:
        """Bytes that the first step may keep of activations: weights, gradients and updates are as large each."""
        return self.budget - self.spent - 3 * self._owned

    @property
    def keeping(self) -> bool:
        """Whether ``auto`` keeps the next recorded step in full."""
        return self._keeping and self.spent + self._largest <= self.budget

    def of(self, step: int, full: bool = False) -> Levels:
        """The levels of a due step; ``full``: whatever is sketched in others is kept in full."""
        zoomed = self._requests.due(step) if self._requests is not None else None
        self.functions = self._first or (self._wanted and bool(zoomed))
        if full or (self._full is not None and self._full.due(step)):
            return Levels(self._detail, full=True)
        if self._keeping and not self._largest and self.spent < self.budget:
            return Levels(self._detail, zoomed or False, SMALL if self._first else SKETCH, self._of_first())
        if self._first:
            return Levels(self._detail, zoomed or False, SMALL)
        if self.keeping:
            return self._kept
        return Levels(self._detail, full=zoomed) if zoomed else self._usual

    def _of_first(self) -> Mapping[str, str]:
        """What ``auto`` is in the first recorded step, of which it is not known what it takes. Its weights are what
        another model starts from, however large.
        """
        others = FULL if self.room > 0 else SKETCH
        return {stage: others if stage in PARAMETER_STAGES else WITHIN for stage in STAGES} | {"weight": FULL}

    def recorded(self, step: Step, steps: int | None = None) -> str:
        """Spend what a recorded step takes; return what to say of the run's size, after the first step, else nothing.

        Args:
            steps: how many steps will be recorded, where that is known.
        """
        begun, self._begun, self._first = self._begun, True, False
        if begun and not self.keeping:
            return ""
        values = bytes_of(step)
        took = bytes_in_full(step, values)
        if not self.keeping:
            of_all = "" if steps is None else f", expect {bytes_text(steps * took)} for all {steps:,}"
            return "" if self._detail.sketches else f"each recorded step takes {bytes_text(took)}{of_all}"
        self.spent += values
        self._largest = max(self._largest, values)
        if begun:
            return ""
        later = int(took * self._full_share + bytes_sketched(step, self._usual) * (1 - self._full_share))
        more = int(max(self.budget - self.spent, 0) // max(values, 1))
        return RunSize(took, later, 1 + more, steps).text(self.budget)
