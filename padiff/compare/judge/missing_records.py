"""Records that a run lacks: in a step, of a stage, or of a trained parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from padiff.align import Alignment
from padiff.compare.judge.site_facts import is_nothing
from padiff.errors import UsageError
from padiff.recorder.options import NOTHING, Detail
from padiff.records import LOOP, PARAMETER_STAGES, SIDES, Both, Coverage, Diff, Record, Run, RunInfo, Step
from padiff.records.pair_table import Key
from padiff.records.step_diffs import StepDiffs
from padiff.records.step_schema import StoredRecords, fact_of, without_values


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


# Stages whose absence is a diff. A loss may be logged in some steps only; inputs and weights are recorded whenever the
# model is called.
_STAGES = ("forward", "backward", "grad", "update")
# Number of other steps of a run that are searched for records of a stage.
_OTHERS = 8


def absent_stages(
    diffs: StepDiffs, steps: Both[Step], history: Both[History], runs: Both[Run]
) -> tuple[StepDiffs, Both[History]]:
    """Fail diffs with a missing side if a whole stage of that side is absent from the step.

    A stage that a side never records is a gap, not a diff. The history of compared steps shows recorded stages; if the
    history does not settle a stage, a few of the nearest other steps are read.

    Args:
        diffs: diffs of one rank of a step, judged as if a missing stage were a gap.
        steps: the rank's records.
        history: records seen in each run so far.

    Returns:
        The diffs, with those of an absent stage failed; and the history, extended by the other steps.
    """
    recorded = steps.map(_stages_of)
    lacking = Both(recorded.candidate - recorded.reference, recorded.reference - recorded.candidate)
    histories = []
    for stages, record, run, step in zip(lacking, history, runs, steps):
        for stage in stages.intersection(_STAGES) - record.stages - record.never:
            record = _looked_elsewhere(record, stage, run, step.number)
        histories.append(record)
    history = Both(*histories)
    absent = Both(
        *(
            frozenset(
                stage
                for stage in stages.intersection(_STAGES)
                if stage in record.stages or (stage == "grad" and _never_stepped(run.info, seen))
            )
            for stages, record, run, seen in zip(lacking, history, runs, recorded)
        )
    )
    if any(absent):
        alone = np.flatnonzero(~diffs.sites.complete).tolist()
        failed = [place for place in alone if _is_of(diffs[place], absent) and not is_nothing(diffs[place])]
        diffs = diffs.passing(failed, False)
    return diffs, history


def _stages_of(step: Step) -> frozenset[str]:
    return fact_of(step.records, _stages)


def _stages(records: Sequence[Record]) -> frozenset[str]:
    return frozenset({record.stage for record in records if record.layer != LOOP})


def _never_stepped(info: RunInfo, stages: frozenset[str]) -> bool:
    """Return True if a backward came to a model that an optimizer trains, in a step without gradients: these are
    recorded when the optimizer steps.
    """
    trains = any(name.startswith("optimizer.") and name.endswith(".parameters") for name in info.settings)
    level = _detail(info).level_of
    return trains and "backward" in stages and any(level(layer.path, "grad") != NOTHING for layer in info.layers)


def _looked_elsewhere(history: History, stage: str, run: Run, number: int) -> History:
    """Search the nearest other steps for a stage that no step so far had, and return the extended history."""
    others = sorted((n for n in run.numbers() if n != number), key=lambda n: abs(n - number))
    for neighbour in others[:_OTHERS]:
        stages = history.stages.union(*map(_stages_of, run.steps(neighbour)))
        history = replace(history, stages=stages)
        if stage in stages:
            return history
    return replace(history, never=history.never | {stage})


def whole_stage_missing(diff: Diff, step: Sequence[Diff]) -> bool:
    """Return True if a diff's missing side has no record at this stage of the step."""
    candidate = diff.pair.candidate is None
    return not any(
        (neighbour.pair.candidate if candidate else neighbour.pair.reference) is not None
        for neighbour in step
        if neighbour.pair.stage == diff.pair.stage and neighbour.pair.anchor.layer != LOOP
    )


def _is_of(diff: Diff, absent: Both[frozenset[str]]) -> bool:
    pair = diff.pair
    if pair.complete or pair.optional or pair.anchor.layer == LOOP:
        return False
    return pair.stage in (absent.reference if pair.reference is None else absent.candidate)


#: A run's description, and the history of its records.
Side = tuple[RunInfo, History]


def with_unrecorded(coverage: Coverage, sides: Both[Side], layers: Both[Collection[str]] | None) -> Coverage:
    """Return the coverage, extended by the parameters without a record in one or both runs.

    Parameters that lists or the level of detail exclude are not counted. A dump does not store these options: there,
    parameters count if other weights are recorded and a step notes missing records.

    Args:
        layers: paths of each run's layers to report; `None` for all layers.
    """
    notes = [f"{name}: {note}" for name, (_, history) in zip(SIDES, sides) for note in history.notes]
    reference, candidate = (
        tuple(f"{layer}/{slot}" for layer, slot in _unrecorded(*side) if chosen is None or layer in chosen)
        for side, chosen in zip(sides, layers or (None, None))
    )
    return replace(coverage, reference_unrecorded=reference, candidate_unrecorded=candidate, left_out=tuple(notes))


def excused(diffs: StepDiffs, sides: Both[Side], steps: Both[Step], alignment: Alignment) -> StepDiffs:
    """Return a step's judged diffs, with diffs passed whose missing side could not be recorded."""
    failed = np.flatnonzero(~diffs.rows["passed"] & ~diffs.sites.complete).tolist()
    if not failed:
        return diffs
    missing = Both(*(_missing(*side, step) for side, step in zip(sides, steps)))
    if not any(missing):
        return diffs
    partners: Both[dict[Key, set[Key]]] = Both(defaultdict(set), defaultdict(set))
    for pair in alignment.parameters:
        for reference in pair.reference:
            for candidate in pair.candidate:
                partners.reference[reference.layer, reference.slot].add((candidate.layer, candidate.slot))
                partners.candidate[candidate.layer, candidate.slot].add((reference.layer, reference.slot))

    def is_gap(place: int) -> bool:
        key = diffs.sites.keys[place]
        if diffs.sites.stages[place] not in PARAMETER_STAGES:
            return False
        if diffs.pairs[place].candidate is None:
            return bool(partners.reference[key] & missing.candidate)
        return bool(partners.candidate[key] & missing.reference)

    return diffs.passing([place for place in failed if is_gap(place)], True)


def _knows(info: RunInfo, history: History) -> bool:
    """Return True if the recording's options are known."""
    return bool(info.recording) or ("weight" in history.stages and bool(history.notes))


def _unrecorded(info: RunInfo, history: History) -> list[Key]:
    """Return the trainable parameters without a record in any step."""
    return [key for key in _expected(info) if key not in history.parameters] if _knows(info, history) else []


def _missing(info: RunInfo, history: History, step: Step) -> frozenset[Key]:
    """Return the parameters without a record in a step."""
    if not _knows(info, history):
        return frozenset()
    recorded = {(r.layer, r.slot) for r in without_values(step.records) if r.stage in PARAMETER_STAGES}
    return frozenset(_expected(info)) - recorded


def _expected(info: RunInfo) -> Iterable[Key]:
    level = _detail(info).level_of
    return (
        (layer.path, parameter.slot)
        for layer in info.layers
        if layer.recorded and level(layer.path, "weight") != NOTHING
        for parameter in layer.parameters
        if parameter.role == "parameter" and parameter.trainable and not parameter.tied_to
    )


def _detail(info: RunInfo) -> Detail:
    """Return the level of detail of the run's tensors."""
    detail = info.recording.get("detail", {})
    try:
        return Detail.from_arguments(
            detail if isinstance(detail, dict) else {}
        )  # missing in runs that record everything
    except UsageError:  # an edited file, or another version: assume that everything was recorded
        return Detail()
