"""The first diff: where it is, and why."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.align import Alignment
from padiff.compare.diagnose.call_words import place_of
from padiff.compare.diagnose.causes import cause
from padiff.compare.diagnose.environments import environment_cause
from padiff.compare.diagnose.place import Place, place_of_diff
from padiff.compare.diagnose.shifted import shift_cause
from padiff.compare.judge.policy import Policy
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import Both, Diff, FirstDiff, Pair, Run, RunInfo, Step


def first_diff(
    diffs: Sequence[Diff], alignment: Alignment, runs: Both[Run], steps: Both[Step] | None, policy: Policy
) -> FirstDiff | None:
    """The first diff that did not pass, in one sentence; `None` if all passed.

    Args:
        runs: the reference and the candidate, where other steps may be looked at.
        steps: the step that it is in, of the rank that it is of; `None` where they are not at hand.
        policy: what judged it.
    """
    diff = next((diff for diff in diffs if not diff.passed), None)
    if diff is None:
        return None
    pair = diff.pair
    reference, candidate = _paths(pair, alignment)
    infos = runs.map(lambda run: run.info)
    step = [d for d in diffs if d.pair.step == pair.step]
    place = _place(diff, step, steps, infos, policy)
    reason = shift_cause(diff, runs) or environment_cause(diff, infos) or cause(diff, step, alignment, place)
    return FirstDiff(
        pair.step,
        pair.stage,
        reference,
        candidate,
        place.diff.pair.anchor.slot,
        place.diff,
        reason,
        last_agreeing=place.last_agreeing,
        inside=place.inside,
        call=_call(place),
    )


def _place(diff: Diff, step: Sequence[Diff], steps: Both[Step] | None, infos: Both[RunInfo], policy: Policy) -> Place:
    try:
        return place_of_diff(diff, step, steps, infos, policy)
    except (RunFolderError, SketchOnlyError):
        return Place(diff)  # what would tell it is no longer there to look at; the figures stand


def _call(place: Place) -> str:
    one = place.calls.one if place.calls is not None else None
    if one is None or place.graphs is None:
        return ""
    call, is_reference = one
    graphs = place.graphs
    where = place_of(call, graphs.reference.trace if is_reference else graphs.candidate.trace)
    return where if is_reference else f"{where} of the candidate"


def _paths(pair: Pair, alignment: Alignment) -> Both[str | None]:
    """Paths of both layers; where one side's record is missing, the layer that would have had it."""
    reference, candidate = pair.sides.map(lambda record: record.layer if record is not None else None)
    for layers in alignment.pairs:
        if reference is None and layers.candidate.path == candidate:
            reference = layers.reference.path
        elif candidate is None and layers.reference.path == reference:
            candidate = layers.candidate.path
    return Both(reference, candidate)
