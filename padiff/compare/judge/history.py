"""What a run was seen to record in the steps that were compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from padiff.records import LOOP, PARAMETER_STAGES, Both, Record, Step
from padiff.records.sites import Key
from padiff.records.structured import Structured, fact_of


@dataclass(frozen=True)
class History:
    """What one run was seen to record.

    Attributes:
        called: layers whose forward ran, by path.
        stages: stages that layers have records of.
        never: stages that a step lacked, and that other steps lack, too.
        parameters: those that have a record.
        notes: what the first step that notes anything says was not recorded.
        names: what the records of the latest step are called, of each rank; empty where that is not known.
    """

    called: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    parameters: frozenset[Key] = frozenset()
    notes: tuple[str, ...] = ()
    names: tuple[object, ...] = field(default=(), compare=False, repr=False)

    def after(self, steps: Sequence[Step]) -> History:
        """The history after one more step, as each rank saw it."""
        names = tuple(step.records.names for step in steps if isinstance(step.records, Structured))
        if names and names == self.names and len(names) == len(steps):
            notes = self.notes or next((step.notes for step in steps if step.notes), ())
            return self if notes == self.notes else replace(self, notes=notes)
        called, stages, parameters, notes = set(self.called), set(self.stages), set(self.parameters), self.notes
        for step in steps:
            notes = notes or step.notes
            seen = fact_of(step.records, _Seen)
            stages |= seen.stages
            called |= seen.called
            parameters |= seen.parameters
        known = names if len(names) == len(steps) else ()
        return History(frozenset(called), frozenset(stages), self.never, frozenset(parameters), notes, known)


class _Seen:
    """What the records of a step show."""

    def __init__(self, records: Sequence[Record]) -> None:
        seen = {(record.stage, record.layer, record.slot) for record in records if record.layer != LOOP}
        self.stages = {stage for stage, _, _ in seen}
        self.called = {layer for stage, layer, _ in seen if stage == "forward"}
        self.parameters: set[Key] = {(layer, slot) for stage, layer, slot in seen if stage in PARAMETER_STAGES}


NOTHING_YET = Both(History(), History())
