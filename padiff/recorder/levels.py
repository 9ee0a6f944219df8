"""Levels of detail of each due step, including the budget of ``detail="auto"``, from an estimate of a run's size."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from padiff.dump.prepare import Requests, requests_of
from padiff.dump.store import AnyPath
from padiff.model.selection import Node
from padiff.recorder.options import AUTO, FULL, NOTHING, SKETCH, SMALL, WITHIN, Detail, Schedule
from padiff.recorder.output import bytes_of
from padiff.records import LOOP, PARAMETER_STAGES, STAGES, Step, bytes_text
from padiff.records.step_schema import sources_of
from padiff.sketches.sketch import ROW

#: Bytes of a record beside its values: its entry in the JSON files and the header of its file. Measured: 360 to 375 in
#: nets of 26 and of 308 records.
RECORD_BYTES = 370
#: Bytes of a sketch.
SKETCH_BYTES = 8 * ROW
#: Number of steps whose size is estimated if the length of the training is unknown.
STEPS = 1000

_COUNTED = ("int", "uint", "bool")


def bytes_in_full(step: Step, values: int) -> int:
    """Return the size of a step on disk in bytes. ``values`` is the size of its tensors."""
    return values + RECORD_BYTES * len(step.records)


def bytes_of_full_step(step: Step, values: int, levels: Mapping[tuple[str, str], str]) -> int:
    """Return the size in bytes of the tensors of a later step with the same records.

    Args:
        step: a step that may hold sketches.
        values: the size of its tensors.
        levels: recording levels of the later step, by layer and stage.
    """
    sketched = {
        record.source.identity: math.prod(record.shape) * _itemsize(record.dtype)
        for record in step.records
        if record.source.sketched and levels[record.layer, record.stage] == FULL
    }
    return values + sum(sketched.values())


def _itemsize(dtype: str) -> int:
    """Return the bytes of an element, from the name of its dtype."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(int(bits[0]) // 8, 1)


def bytes_sketched(step: Step, levels: Mapping[tuple[str, str], str]) -> int:
    """Return the size in bytes of a later step with the same records.

    Args:
        levels: recording levels of the later step, by layer and stage.
    """
    sketched = {source.identity for source in sources_of(step)}
    sizes: dict[int, int] = {}
    for record in step.records:
        level = levels[record.layer, record.stage]
        exact = record.layer == LOOP and (not record.shape or record.dtype.startswith(_COUNTED))
        if level == FULL or (exact and level != NOTHING):
            sizes |= {id(array): array.nbytes for array in record.source.arrays}
            sketched.discard(record.source.identity)
    return sum(sizes.values()) + SKETCH_BYTES * len(sketched)


@dataclass(frozen=True)
class RunSize:
    """Estimated size of a run whose first steps are stored in full, and the others as sketches.

    Attributes:
        full: bytes of a step in full.
        sketched: bytes of a step of sketches.
        room: number of steps that the budget allows to store in full.
        steps: number of steps to be recorded; `None` if it is unknown.
    """

    full: int
    sketched: int
    room: int
    steps: int | None = None

    def total(self) -> int:
        """Return the bytes of the whole run, or of its first `STEPS` steps."""
        steps = STEPS if self.steps is None else self.steps
        full = min(max(self.room, 1), steps)
        return full * self.full + (steps - full) * self.sketched

    def message(self, budget: float) -> str:
        """Return the message about the expected size that a recorder prints at its first recorded step.

        Args:
            budget: maximum bytes of full tensors.
        """
        steps = STEPS if self.steps is None else self.steps
        count = f"{steps:,} recorded step{'s' if steps != 1 else ''}"
        estimate = (
            f"a step takes {bytes_text(self.full)}, expect {bytes_text(self.total())} for "
            f"{'' if self.steps is None else 'all '}{count}"
        )
        if self.steps is not None and self.room >= steps:
            return f"{estimate}: full tensors"
        if self.room >= steps:
            full_steps = f"up to {bytes_text(budget)}"
        elif self.room > 1:
            full_steps = f"of the first {self.room:,} recorded steps"
        else:
            full_steps = "of the first recorded step, as far as it fits"
        return f'{estimate}: full tensors {full_steps}, then sketches (detail="full" keeps all tensors)'


#: Bytes of full tensors that ``detail="auto"`` records per run, over all processes. Chosen: enough for four steps of a
#: small convolutional net (49 MB each, batch 64) or more than a hundred steps of most small nets, and little on a disk
#: even after ten experiments. Measured on 758 planted faults in small programs: 719 causes are named, as with 1 GB.
FULL_BYTES = 200_000_000

_SKETCHED: Mapping[str, str] = dict.fromkeys(STAGES, SKETCH)
_KEPT: Mapping[str, str] = dict.fromkeys(STAGES, FULL)


class Levels(dict[tuple[str, str], str]):
    """The levels of one step by layer path and stage, computed on first access.

    Args:
        detail: the levels requested by the user.
        full: True to replace sketches by full tensors; or the paths of the layers for which to do so.
        sketch: the level that replaces ``sketch`` elsewhere.
        auto: the level that replaces ``auto``, by stage.
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
        """Compute all levels of these layers.

        Paddle's ``to_static`` compiles the hooks' code, and can't compile `__missing__`.
        """
        if self._filled is not nodes:
            self._filled = nodes
            paths = [*(node.path for node in nodes), LOOP]
            alike = not self._detail.rules and not isinstance(self._full, frozenset)
            for stage in STAGES:
                if alike:  # no level depends on the layer
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


# Number of recorded steps in which functions are traced.
_TRACED = 2


class LevelsOfSteps:
    """The levels of each due step; in some steps full tensors are due or requested in place of sketches.

    Args:
        detail: the levels requested by the user.
        functions: True to trace functions in the first recorded step, in the second one if it is recorded in full, and
            in requested steps, and to record small tensors of the first one in full. What depends on the number of a
            step, such as a temperature, shows first in the second one.
        budget: bytes that ``auto`` may record in full.

    Attributes:
        functions: True if functions are traced in the step of the last call of `of`.
        spent: bytes that ``auto`` has recorded in full.
    """

    def __init__(self, detail: Detail, functions: bool = False, budget: float = FULL_BYTES) -> None:
        self._detail, self.budget = detail, budget
        self.spent, self._largest, self._owned = 0.0, 0.0, 0.0
        #: True for ``auto``; the number of steps recorded so far.
        self._keeping, self._recorded = detail.automatic, 0
        every = detail.full_every_n_steps
        self._full = None if every is None else Schedule.from_argument(every)
        #: Share of the steps after the budget that are due in full.
        self._full_share = 0.0 if self._full is None or self._full.steps is not None else 1 / self._full.every
        self._requests: Requests | None = None
        self._usual, self._kept = Levels(detail), Levels(detail, auto=_KEPT)
        self._wanted = self.functions = functions

    def release(self) -> None:
        """Drop the layers, after the last step."""
        self._usual, self._kept = Levels(self._detail), Levels(self._detail, auto=_KEPT)

    def listen(self, run: AnyPath | None) -> None:
        """Start to read requests for full tensors from the run folder."""
        if run is not None and (self._detail.sketches or self._wanted):
            self._requests = requests_of(run)

    def begin(self, owned: Callable[[], float], spent: float) -> None:
        """Set the sizes that count against the budget.

        Args:
            owned: function that returns the bytes of the model's parameters and buffers; called only for ``auto``.
            spent: bytes of the steps already on disk when a run is resumed.
        """
        self._owned, self.spent = owned() if self._keeping else 0.0, spent

    @property
    def room(self) -> float:
        """Return the bytes left for activations of the first step.

        Weights, gradients and updates have the same size each, which is subtracted three times.
        """
        return self.budget - self.spent - 3 * self._owned

    @property
    def keeping(self) -> bool:
        """Return True if ``auto`` records the next step in full."""
        return self._keeping and self.spent + self._largest <= self.budget

    def levels_of(self, step: int, full: bool = False) -> Levels:
        """Return the levels of a due step.

        Args:
            full: True to record tensors in full that are sketched in other steps.
        """
        zoomed = self._requests.due(step) if self._requests is not None else None
        is_whole = not self._recorded or self.keeping or not self._detail.sketches
        self.functions = self._wanted and (bool(zoomed) or (self._recorded < _TRACED and is_whole))
        if full or (self._full is not None and self._full.due(step)):
            return Levels(self._detail, full=True)
        if self._keeping and not self._largest and self.spent < self.budget:
            return Levels(self._detail, zoomed or False, SMALL if self._wanted else SKETCH, self._of_first())
        if self._wanted and not self._recorded:
            return Levels(self._detail, zoomed or False, SMALL)
        if self.keeping:
            return self._kept
        return Levels(self._detail, full=zoomed) if zoomed else self._usual

    def _of_first(self) -> Mapping[str, str]:
        """Return the level of ``auto`` by stage in the first recorded step, whose size is not known in advance.

        Weights of any size are recorded in full: another model may start from these weights.
        """
        others = FULL if self.room > 0 else SKETCH
        return {stage: others if stage in PARAMETER_STAGES else WITHIN for stage in STAGES} | {"weight": FULL}

    def recorded(self, step: Step, steps: int | None = None) -> str:
        """Subtract a recorded step from the budget; return a sentence on the run's size after the first step, else "".

        Args:
            step: the recorded step.
            steps: number of steps that will be recorded, if known.
        """
        has_begun = self._recorded > 0
        self._recorded += 1
        if has_begun and not self.keeping:
            return ""
        values = bytes_of(step)
        full_bytes = bytes_in_full(step, values)
        if not self.keeping:
            of_all = "" if steps is None else f", expect {bytes_text(steps * full_bytes)} for all {steps:,}"
            return "" if self._detail.sketches else f"each recorded step takes {bytes_text(full_bytes)}{of_all}"
        self.spent += values
        # The first step holds sketches if it would not have room otherwise.
        self._largest = max(self._largest, bytes_of_full_step(step, values, self._kept))
        if has_begun:
            return ""
        later_bytes = int(full_bytes * self._full_share + bytes_sketched(step, self._usual) * (1 - self._full_share))
        full_steps = int(max(self.budget - self.spent, 0) // max(self._largest, 1))
        return RunSize(full_bytes, later_bytes, 1 + full_steps, steps).message(self.budget)
