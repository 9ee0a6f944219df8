"""History of a run's records over the compared steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from padiff.records import LOOP, PARAMETER_STAGES, Both, Record, Step
from padiff.records.pair_schema import Key
from padiff.records.stored_records import StoredRecords, fact_of


@dataclass(frozen=True)
class History:
    """Records seen in one run so far.

    Attributes:
        called: layers whose forward ran, by path.
        stages: stages with records of layers.
        never: stages that were searched for in other steps and not found.
        parameters: parameters with a record.
        notes: notes on unrecorded tensors, from the first step that has notes.
        names: names of the latest step's records, of each rank; empty if unknown.
    """

    called: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    parameters: frozenset[Key] = frozenset()
    notes: tuple[str, ...] = ()
    names: tuple[object, ...] = field(default=(), compare=False, repr=False)

    def after(self, steps: Sequence[Step]) -> History:
        """Return the history after one more step, given by all ranks."""
        names = tuple(step.records.names for step in steps if isinstance(step.records, StoredRecords))
        if names and names == self.names and len(names) == len(steps):
            notes = self.notes or next((step.notes for step in steps if step.notes), ())
            return self if notes == self.notes else replace(self, notes=notes)
        called, stages, parameters, notes = set(self.called), set(self.stages), set(self.parameters), self.notes
        for step in steps:
            notes = notes or step.notes
            summary = fact_of(step.records, _Seen)
            stages |= summary.stages
            called |= summary.called
            parameters |= summary.parameters
        step_names = names if len(names) == len(steps) else ()
        return History(frozenset(called), frozenset(stages), self.never, frozenset(parameters), notes, step_names)


class _Seen:
    """Layers, stages and parameters in a step's records."""

    def __init__(self, records: Sequence[Record]) -> None:
        sites = {(record.stage, record.layer, record.slot) for record in records if record.layer != LOOP}
        self.stages = {stage for stage, _, _ in sites}
        self.called = {layer for stage, layer, _ in sites if stage == "forward"}
        self.parameters: set[Key] = {(layer, slot) for stage, layer, slot in sites if stage in PARAMETER_STAGES}


NOTHING_YET = Both(History(), History())
