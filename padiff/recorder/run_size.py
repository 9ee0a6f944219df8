"""Estimate how large a run becomes, from its first recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from padiff.recorder.detail import FULL, NOTHING
from padiff.records import LOOP, Step, bytes_text
from padiff.records.alike import sources_of
from padiff.sketches.sketch import ROW

#: Bytes of a record beside its values: its entry in the JSON files and the header of its file. Measured: 360 to 375 in
#: nets of 26 and of 308 records.
RECORD_BYTES = 370
#: Bytes of a sketch.
SKETCH_BYTES = 8 * ROW
#: For so many steps the size is said where nobody knows how many there will be.
STEPS = 1000

_COUNTED = ("int", "uint", "bool")


def bytes_in_full(step: Step, values: int) -> int:
    """Return how many bytes a step takes on disk, given those of its values."""
    return values + RECORD_BYTES * len(step.records)


def bytes_sketched(step: Step, levels: Mapping[tuple[str, str], str]) -> int:
    """Return how many bytes a later step like this one takes.

    Args:
        levels: of the later step, by layer and stage.
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
    """The size of a run whose first steps are kept in full, and the others as sketches.

    Attributes:
        full, sketched: bytes of a step of either kind.
        room: how many steps are kept in full.
        steps: how many steps will be recorded; `None` where that is not known.
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

    def text(self, budget: float) -> str:
        """Return what a recorder says at its first recorded step.

        Args:
            budget: bytes of full tensors.
        """
        steps = STEPS if self.steps is None else self.steps
        count = f"{steps:,} recorded step{'s' if steps != 1 else ''}"
        said = (
            f"a step takes {bytes_text(self.full)}, expect {bytes_text(self.total())} for "
            f"{'' if self.steps is None else 'all '}{count}"
        )
        if self.steps is not None and self.room >= steps:
            return f"{said}: full tensors"
        if self.room >= steps:
            kept = f"up to {bytes_text(budget)}"
        elif self.room > 1:
            kept = f"of the first {self.room:,} recorded steps"
        else:
            kept = "of the first recorded step, as far as it fits"
        return f'{said}: full tensors {kept}, then sketches (detail="full" keeps all tensors)'
