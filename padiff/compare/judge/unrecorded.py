"""Parameters that train and have no record: a comparison can't say that they match."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from padiff.align import Alignment
from padiff.compare.judge.drift import Key
from padiff.errors import UsageError
from padiff.recorder.detail import NOTHING, Detail
from padiff.records import PARAMETER_STAGES, Coverage, Diff, RunInfo, Step


class Unrecorded:
    """Which of a run's trainable parameters have no record in any of the steps that were looked at.

    What lists, or the level of detail, leave out was left out on purpose and is not counted. A dump does not say what
    was asked for: there, parameters count where other weights are recorded and a step notes that something is missing.

    Args:
        side: ``reference`` or ``candidate``.
        info: what holds for all steps of the run.

    Attributes:
        notes: what the first step that notes anything says was not recorded, with the side in front.
    """

    def __init__(self, side: str, info: RunInfo) -> None:
        self._side = side
        self._all = frozenset(_expected(info))
        self._expected = dict.fromkeys(_expected(info))
        self._recorder = bool(info.recording)
        self._weights_seen = False
        self.notes: tuple[str, ...] = ()

    def look(self, steps: Iterable[Step]) -> None:
        """Look at a step, of all ranks."""
        for step in steps:
            if not self.notes:
                self.notes = tuple(f"{self._side}: {note}" for note in step.notes)
            if not self._expected and self._weights_seen:
                continue
            for record in step.records:
                if record.stage in PARAMETER_STAGES:
                    self._weights_seen = self._weights_seen or record.stage == "weight"
                    self._expected.pop((record.layer, record.slot), None)

    @property
    def _known(self) -> bool:
        """Whether it is known what was asked for."""
        return self._recorder or (self._weights_seen and bool(self.notes))

    def missing(self, step: Step) -> frozenset[Key]:
        """The parameters that a step has no record of."""
        if not self._known:
            return frozenset()
        return self._all - {(r.layer, r.slot) for r in step.records if r.stage in PARAMETER_STAGES}

    def parameters(self, layers: Collection[str] | None) -> tuple[str, ...]:
        """The parameters, by ``layer/slot``; with ``layers``, those of these alone."""
        if not self._known:
            return ()
        return tuple(f"{layer}/{slot}" for layer, slot in self._expected if layers is None or layer in layers)


def with_unrecorded(
    coverage: Coverage, sides: tuple[Unrecorded, Unrecorded], layers: tuple[Collection[str], Collection[str]] | None
) -> Coverage:
    """The coverage with the parameters that neither or one of the runs has a record of.

    Args:
        layers: paths of each run's layers that are reported on; `None` for all of them.
    """
    return replace(
        coverage,
        reference_unrecorded=sides[0].parameters(layers and layers[0]),
        candidate_unrecorded=sides[1].parameters(layers and layers[1]),
        left_out=(*sides[0].notes, *sides[1].notes),
    )


def excused(
    diffs: list[Diff], sides: tuple[Unrecorded, Unrecorded], steps: tuple[Step, Step], alignment: Alignment
) -> list[Diff]:
    """The judged diffs of a step: what one side could not record of a parameter is a gap, not a diff."""
    if all(diff.passed or diff.pair.complete for diff in diffs):
        return diffs
    missing = [side.missing(step) for side, step in zip(sides, steps)]
    if not any(missing):
        return diffs
    partners: tuple[dict[Key, set[Key]], dict[Key, set[Key]]] = (defaultdict(set), defaultdict(set))
    for pair in alignment.parameters:
        for ours in pair.reference:
            for theirs in pair.candidate:
                partners[0][ours.layer, ours.slot].add((theirs.layer, theirs.slot))
                partners[1][theirs.layer, theirs.slot].add((ours.layer, ours.slot))

    def is_gap(diff: Diff) -> bool:
        pair = diff.pair
        if diff.passed or pair.complete or pair.stage not in PARAMETER_STAGES:
            return False
        side = 0 if pair.candidate is None else 1
        return bool(partners[side][pair.anchor.layer, pair.anchor.slot] & missing[1 - side])

    return [replace(diff, passed=True) if is_gap(diff) else diff for diff in diffs]


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
    """How much the run kept of each tensor."""
    told = info.recording.get("detail", {})
    try:
        return Detail.of(told if isinstance(told, dict) else {})
    except UsageError:  # edited, or of another version: then everything should be there
        return Detail()
