"""Trainable parameters without a record, which leave the result of a comparison open."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from padiff.align import Alignment
from padiff.compare.judge.history import History
from padiff.errors import UsageError
from padiff.recorder.detail import NOTHING, Detail
from padiff.records import PARAMETER_STAGES, SIDES, Both, Coverage, RunInfo, Step
from padiff.records.pair_schema import Key
from padiff.records.step_diffs import StepDiffs
from padiff.records.stored_records import without_values

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
