"""The first diff: where it is, how far it reaches, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from padiff.align import Alignment
from padiff.compare.diagnose.between import where_in_code
from padiff.compare.diagnose.call_words import place_of
from padiff.compare.diagnose.causes import guess, recorded_cause
from padiff.compare.diagnose.environments import autocast_cause, environment_cause
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.extent import extent_of
from padiff.compare.diagnose.hypotheses import held
from padiff.compare.diagnose.hypotheses.engine import Finding, explain
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.known_causes import known_cause, says_where
from padiff.compare.diagnose.losses import loss_cause
from padiff.compare.diagnose.padding import padding_cause
from padiff.compare.diagnose.parts import put_together, rank_of
from padiff.compare.diagnose.place import Place, place_of_diff
from padiff.compare.diagnose.ranks import placed, rank_cause
from padiff.compare.diagnose.recompute.which_side import which_side
from padiff.compare.diagnose.settings import as_computed
from padiff.compare.diagnose.shifted import shift_cause
from padiff.compare.diagnose.trainers import trainer_cause
from padiff.compare.first_failed import first_failed
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.pair.processes import OWN_SAMPLES
from padiff.records import LOOP, Both, Cause, Diff, FirstDiff, Pair, Record, Run, Step, TracedCall, is_functional

# Lines of a stack that are shown.
_LINES = 4
#: Where nothing was recorded of them.
NO_STACKS: Both[tuple[str, ...]] = Both((), ())

# What is declared, by the kind of what is computed of it.
_DECLARED = {"norm_statistics": "mode", "accumulation": "trainer"}


def first_diff(diffs: Sequence[Diff], evidence: Evidence, compute: bool = True) -> FirstDiff | None:
    """The first diff that did not pass; `None` if all passed.

    Args:
        compute: whether hypotheses on its cause are computed, which takes a second or so.
    """
    diff = first_failed(diffs)
    if diff is None:
        return None
    return described(diff, [d for d in diffs if d.pair.step == diff.pair.step], evidence, compute)[0]


def described(diff: Diff, step: Sequence[Diff], evidence: Evidence, compute: bool = True) -> tuple[FirstDiff, Place]:
    """A diff, with all that can be said of it; and where in the code it is.

    Args:
        step: the diffs of its step.
        compute: as `first_diff` has it.
    """
    pair = diff.pair
    reference, candidate = _paths(pair, evidence.alignment)
    place = _place(diff, step, evidence)
    scene = scene_of(diff, step, evidence.alignment, evidence.runs)
    scene = replace(scene, declared=evidence.declared(pair.step), place=place)
    found = FirstDiff(
        pair.step,
        pair.stage,
        reference,
        candidate,
        place.diff.pair.anchor.slot,
        place.diff,
        _cause(scene, step, place, evidence, compute),
        extent=extent_of(diff, scene.step, evidence.agreed),
        last_agreeing=place.last_agreeing,
        inside=place.inside,
        call=_call(place),
        recomputed=which_side(scene, place, evidence) if compute else None,
        rank=_rank(place.diff.pair, scene, step),
        stacks=_stacks(place, evidence),
    )
    return found, place


def with_proof(first: FirstDiff, step: Sequence[Diff], evidence: Evidence) -> FirstDiff:
    """A first diff that is what optimizers are set to, as proven where the updates of a step show it."""
    cause = first.cause
    differences = [one for one in evidence.declared(first.step) if one.kind == "optimizer_setting" and one.changes]
    update = next((d for d in step if d.pair.stage == "update" and d.compared and d.pair.anchor.layer != LOOP), None)
    if cause is None or cause.kind != "optimizer_setting" or update is None or cause.proven:
        return first
    scene = replace(scene_of(update, step, evidence.alignment, evidence.runs), declared=differences)
    return replace(first, cause=as_computed(cause, differences, explain(scene).cause, update.pair.step))


def _cause(scene: Scene, step: Sequence[Diff], place: Place, evidence: Evidence, compute: bool) -> Cause | None:
    """What the records say, else what explains them when it is computed, else where to look."""
    runs, alignment, diff = evidence.runs, evidence.alignment, scene.diff
    declared = scene.declared
    found = (
        rank_cause(scene, step)
        or shift_cause(diff, runs)
        or environment_cause(diff, runs.map(lambda run: run.info))
        or padding_cause(scene)
        or trainer_cause(scene)
        or loss_cause(scene)
        or next(held.causes(scene), None)
    )
    if found is not None:
        written = explain(scene).cause if compute and diff.pair.stage == "loss" and not found.proven else None
        return written if written is not None and written.proven else found
    if place.between:
        scene = replace(scene, diff=place.diff)
    computed = explain(scene) if compute and diff.pair.complete else Finding()
    recorded = recorded_cause(diff, step, alignment, declared, place)
    # That the frameworks differ is said before what says no more than where, and after whatever is computed.
    known = None if computed.cause is not None else known_cause(scene, place)
    cast = autocast_cause(diff, runs.map(lambda run: run.info))
    if cast is not None and not _explained(computed.cause, recorded, place):
        return replace(cast, excluded=computed.excluded)
    if recorded is not None:
        if computed.cause is None or not computed.cause.proven:
            return known if known is not None and says_where(recorded, place) else recorded
        if recorded.kind == _DECLARED.get(computed.cause.kind):
            notes = [text for text in (computed.cause.evidence, recorded.evidence) if text]
            return replace(recorded, proven=True, evidence="; ".join(notes))
        # What is declared differently says how to mend what was computed.
        # A loss's code is written anew, whatever its functions are set to.
        fix = "" if diff.pair.stage == "loss" else recorded.fix
        return replace(computed.cause, fix=computed.cause.fix or fix)
    if known is not None:
        known = replace(known, excluded=computed.excluded)
    found = computed.cause or known or where_in_code(place, computed.excluded)
    return found or guess(diff, step, alignment, computed.excluded)


def _explained(computed: Cause | None, recorded: Cause | None, place: Place) -> bool:
    """Whether a cause is proven, or declared, rather than where to look."""
    proven = computed is not None and computed.proven
    return proven or (recorded is not None and not says_where(recorded, place))


def _place(diff: Diff, step: Sequence[Diff], evidence: Evidence) -> Place:
    try:
        infos = evidence.runs.map(lambda run: run.info)
        return place_of_diff(diff, step, evidence.steps, infos, evidence.policy)
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


def _stacks(place: Place, evidence: Evidence) -> Both[tuple[str, ...]]:
    """Where either side's code makes the call that a diff comes from, as far as that was recorded."""
    pair = place.diff.pair
    if place.calls is not None and place.calls.same is not None:
        return place.calls.same.map(_lines)
    if evidence.steps is None or is_functional(pair.anchor.slot):
        return NO_STACKS
    try:
        return evidence.steps.zip(pair.sides).map(lambda side: _stack(*side))
    except RunFolderError:
        return NO_STACKS  # the trace is damaged; the figures stand


def _stack(step: Step, record: Record | None) -> tuple[str, ...]:
    """Where the layer's call is made that a record is of."""
    if record is None:
        return ()
    at = record.layer, record.call
    calls = (call for call in step.trace.calls if not call.function and (call.layer, call.call) == at)
    return next(map(_lines, calls), ())


def _lines(call: TracedCall) -> tuple[str, ...]:
    return tuple(f"{frame.file}:{frame.line} {frame.function}" for frame in call.stack[: -_LINES - 1 : -1])


def _rank(pair: Pair, scene: Scene, step: Sequence[Diff]) -> int | None:
    """Which process a first diff is of."""
    if put_together(pair):
        return rank_of(pair)
    common = any(diff.problem is OWN_SAMPLES for diff in step)
    return None if common or min(run.info.world_size for run in scene.runs) == 1 else scene.rank


def scene_of(diff: Diff, step: Sequence[Diff], alignment: Alignment, runs: Both[Run]) -> Scene:
    """What hypotheses look at: of a step's diffs those of the first one's rank, which come one after the other."""
    found = placed(diff, step)
    return Scene(diff, found.own, alignment, runs, found.rank)


def _paths(pair: Pair, alignment: Alignment) -> Both[str | None]:
    """Paths of both layers; where one side's record is missing, the layer that would have had it."""
    reference, candidate = pair.sides.map(lambda record: record.layer if record is not None else None)
    for layers in alignment.pairs:
        if reference is None and layers.candidate.path == candidate:
            reference = layers.reference.path
        elif candidate is None and layers.reference.path == reference:
            candidate = layers.candidate.path
    return Both(reference, candidate)
