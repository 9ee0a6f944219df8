"""Estimate the size of a run from its first recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from padiff.recorder.detail import FULL, NOTHING
from padiff.records import LOOP, Step, bytes_text
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
