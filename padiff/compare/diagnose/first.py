"""The first diff with its layers, extent and cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from padiff.align import Alignment
from padiff.compare.diagnose.between import where_in_code
from padiff.compare.diagnose.call_words import place_of
from padiff.compare.diagnose.causes import guess, recorded_cause
from padiff.compare.diagnose.choices import CHOICE, OTHER_FUNCTION, choice_cause, chose_labels, scores_cause
from padiff.compare.diagnose.differing_rank import put_together, rank_of
from padiff.compare.diagnose.environments import autocast_cause, environment_cause
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.extent import NEVER, extent_of, site_of
from padiff.compare.diagnose.hypotheses import missing_gradient
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.engine import Finding, explain
from padiff.compare.diagnose.known_causes import known_cause, says_where
from padiff.compare.diagnose.losses import loss_cause
from padiff.compare.diagnose.padding import padding_cause
from padiff.compare.diagnose.place import Place, place_of_diff
from padiff.compare.diagnose.ranks import placed, rank_cause
from padiff.compare.diagnose.recompute.which_side import which_side
from padiff.compare.diagnose.routing import routing_cause
from padiff.compare.diagnose.settings import as_computed, fixes_all
from padiff.compare.diagnose.shifted import repeated_cause, shift_cause
from padiff.compare.diagnose.skipped_calls import evaluation_cause
from padiff.compare.diagnose.surplus_parameters import surplus_cause
from padiff.compare.diagnose.trainers import trainer_cause
from padiff.compare.first_failed import first_failed
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.pair.processes import OWN_SAMPLES
from padiff.records import LOOP, Both, Cause, Diff, FirstDiff, Pair, Record, Run, Step, TracedCall, is_functional
from padiff.records.cause import UNKNOWN_LINES
from padiff.system.frames import Frame

# The most lines of a stack in a report.
_LINES = 4
#: Stands for stacks that were not recorded.
NO_STACKS: Both[tuple[str, ...]] = Both((), ())

# Kinds of recorded causes, by the kind of the hypothesis that computes the same cause.
_DECLARED = {"norm_statistics": "mode", "accumulation": "trainer"}


def first_diff(diffs: Sequence[Diff], evidence: Evidence, compute: bool = True) -> FirstDiff | None:
    """Return the first diff that did not pass; `None` if all passed.

    Args:
        diffs: the judged diffs, of one or more steps.
        evidence: the input of the search for the cause.
        compute: True to compute hypotheses on the cause, which takes about a second.
    """
    diff = first_failed(diffs)
    if diff is None:
        return None
    return described(diff, [d for d in diffs if d.pair.step == diff.pair.step], evidence, compute)[0]


def described(diff: Diff, step: Sequence[Diff], evidence: Evidence, compute: bool = True) -> tuple[FirstDiff, Place]:
    """Return a diff with its extent and cause, and the place in the code that the diff comes from.

    Args:
        diff: the first diff that did not pass.
        step: the diffs of its step.
        evidence: the input of the search for the cause.
        compute: True to compute hypotheses on the cause, which takes about a second.
    """
    pair = diff.pair
    reference, candidate = _paths(pair, evidence.alignment)
    place = _place(diff, step, evidence)
    scene = scene_of(diff, step, evidence.alignment, evidence.runs)
    scene = replace(scene, declared=evidence.declared(pair.step), place=place)
    first = FirstDiff(
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
        code=UNKNOWN_LINES if place.calls is None or place.calls.same is None else place.calls.same.map(_line),
    )
    return first, place


def with_proof(first: FirstDiff, step: Sequence[Diff], evidence: Evidence) -> FirstDiff:
    """Return a first diff with a proven cause if the cause is an optimizer setting and the step's updates prove it.

    Args:
        first: the first diff; returned unchanged if nothing proves its cause.
        step: the diffs of the step whose updates are computed.
        evidence: the input of the search for the cause.
    """
    cause = first.cause
    differences = [
        difference
        for difference in evidence.declared(first.step)
        if difference.kind == "optimizer_setting" and difference.changes
    ]
    update = next((d for d in step if d.pair.stage == "update" and d.compared and d.pair.anchor.layer != LOOP), None)
    if cause is None or cause.kind != "optimizer_setting" or update is None or cause.proven:
        return first
    scene = replace(scene_of(update, step, evidence.alignment, evidence.runs), declared=differences)
    return replace(first, cause=as_computed(cause, differences, explain(scene).cause, update.pair.step))


# Kinds of causes that say how a loss differs, and not why.
_OF_LOSS = frozenset({"labels", "loss_scale"})


def _cause(scene: DiffContext, step: Sequence[Diff], place: Place, evidence: Evidence, compute: bool) -> Cause | None:
    """Return the cause that the records show, else the cause that a hypothesis proves, else the code to read."""
    runs, alignment, diff = evidence.runs, evidence.alignment, scene.diff
    declared = scene.declared
    cause = (
        rank_cause(scene, step)
        or evaluation_cause(diff, step, runs)
        or repeated_cause(diff, runs)
        or shift_cause(diff, runs)
        or environment_cause(diff, runs.map(lambda run: run.info))
        or padding_cause(scene)
        or trainer_cause(scene)
        or loss_cause(scene)
        or next(missing_gradient.causes(scene), None)
    )
    if cause is not None:
        computed_loss = explain(scene).cause if compute and diff.pair.stage == "loss" and not cause.proven else None
        if computed_loss is not None and computed_loss.proven:
            return computed_loss
        if diff.pair.stage == "loss" and cause.kind in _OF_LOSS:
            chosen = choice_cause(diff, step, evidence)
            if chosen is not None:  # the loop takes other samples, or other labels
                return chosen
        surplus = surplus_cause(scene) if diff.pair.stage == "loss" and not cause.proven else None
        return surplus or cause
    if place.between:
        scene = replace(scene, diff=place.diff)
    computed = explain(scene) if compute and diff.pair.complete else Finding()
    recorded = recorded_cause(diff, step, alignment, declared, place)
    proven = computed.cause is not None and computed.cause.proven
    if diff.pair.stage == "weight" and (surplus := surplus_cause(scene)) is not None:
        return surplus  # what is drawn after a surplus parameter differs, too
    if (recorded is None or recorded.kind == "surplus_layers") and not proven:
        recorded = surplus_cause(scene) or recorded
    # A known difference of the frameworks goes before a cause that only names a place, and after computed causes.
    # An operation that agreed in an earlier step does not differ by framework.
    agreed = diff.pair.stage in ("forward", "loss") and evidence.agreed.get(site_of(diff), NEVER)[1] > 0
    framework_cause = None if computed.cause is not None or agreed else known_cause(scene, place)
    cast = autocast_cause(diff, runs.map(lambda run: run.info))
    if cast is not None and not _explained(computed.cause, recorded, place):
        return replace(cast, excluded=computed.excluded)
    chosen = choice_cause(diff, step, evidence)
    if chosen is not None and proven and chosen.kind != OTHER_FUNCTION and not chose_labels(diff, chosen):
        chosen = None  # a computed cause says more, unless it is about what another choice makes
    if chosen is not None and proven:
        return chosen
    if not proven and (chosen is None or chosen.kind == CHOICE):
        routed = routing_cause(diff, step, evidence)
        if routed is not None:
            return replace(routed, excluded=computed.excluded)
    if chosen is not None:
        if chosen.kind == CHOICE:
            chosen = scores_cause(diff, step, evidence) or chosen
        chosen = replace(chosen, excluded=computed.excluded)
        if chosen.kind != CHOICE:
            return chosen
    if recorded is not None:
        if computed.cause is None or not computed.cause.proven:
            return framework_cause if framework_cause is not None and says_where(recorded, place) else recorded
        if recorded.kind == _DECLARED.get(computed.cause.kind):
            notes = [text for text in (computed.cause.evidence, recorded.evidence) if text]
            return replace(recorded, proven=True, evidence="; ".join(notes), remaining=computed.cause.remaining)
        # A declared difference also gives the fix of the computed cause. For a loss the fix rewrites the code instead,
        # whatever the loss functions are set to.
        # Of an optimizer, a fix of some of its settings does not give the reference's updates.
        is_part = "+" in computed.cause.kind and not fixes_all(declared, computed.cause.kind)
        fix = "" if diff.pair.stage == "loss" or (diff.pair.stage == "update" and is_part) else recorded.fix
        return replace(computed.cause, fix=computed.cause.fix or fix)
    if framework_cause is not None:
        framework_cause = replace(framework_cause, excluded=computed.excluded)
    chosen = chosen or _other_model(place)
    cause = computed.cause or framework_cause or chosen or where_in_code(place, computed.excluded)
    return cause or guess(diff, step, alignment, computed.excluded)


def _other_model(place: Place) -> Cause | None:
    """Return the cause of an input that a model computes which the runs do not hold; `None` for other diffs."""
    if not place.diff.pair.derived or place.graphs is None or place.ends is None:
        return None
    made = (graph.producers.get(end) for graph, end in zip(place.graphs, place.ends))
    if any(call is not None for call in made):
        return None
    text = (
        "the loop computes this input with another model, which these runs do not hold: the difference follows from "
        'that model, or from the code after it; record both as one run (padiff.record({"a": a, "b": b}, ...))'
    )
    return Cause("other_model", text)


def _explained(computed: Cause | None, recorded: Cause | None, place: Place) -> bool:
    """Return True if a cause is proven or recorded; False if the cause only names the code to read."""
    proven = computed is not None and computed.proven
    return proven or (recorded is not None and not says_where(recorded, place))


def _place(diff: Diff, step: Sequence[Diff], evidence: Evidence) -> Place:
    try:
        infos = evidence.runs.map(lambda run: run.info)
        return place_of_diff(diff, step, evidence.steps, infos, evidence.policy)
    except (RunFolderError, SketchOnlyError):
        return Place(diff)  # the values can no longer be read; the figures stay valid


def _call(place: Place) -> str:
    single_call = place.calls.one if place.calls is not None else None
    if single_call is None or place.graphs is None:
        return ""
    call, is_reference = single_call
    graphs = place.graphs
    text = place_of(call, graphs.reference.trace if is_reference else graphs.candidate.trace)
    return text if is_reference else f"{text} of the candidate"


def _stacks(place: Place, evidence: Evidence) -> Both[tuple[str, ...]]:
    """Return the stack of the call that a diff comes from, of either side's code; empty where no stack was recorded."""
    pair = place.diff.pair
    if place.calls is not None and place.calls.same is not None:
        return place.calls.same.map(_lines)
    if evidence.steps is None:
        return NO_STACKS
    try:
        return evidence.steps.zip(pair.sides).map(lambda side: _stack(*side))
    except RunFolderError:
        return NO_STACKS  # the trace is damaged; the figures stay valid


def _stack(step: Step, record: Record | None) -> tuple[str, ...]:
    """Return the stack of the call that a record belongs to: of a layer, or the only one of a function."""
    if record is None:
        return ()
    if is_functional(record.slot):
        name = record.slot.partition("()")[0]
        of_function = [call for call in step.trace.calls if (call.layer, call.function) == (record.layer, name)]
        return _lines(of_function[0]) if len(of_function) == 1 else ()
    site = record.layer, record.call
    calls = (call for call in step.trace.calls if not call.function and (call.layer, call.call) == site)
    return next(map(_lines, calls), ())


def _line(call: TracedCall) -> Frame | None:
    return call.line


def _lines(call: TracedCall) -> tuple[str, ...]:
    return tuple(f"{frame.file}:{frame.line} {frame.function}" for frame in call.stack[: -_LINES - 1 : -1])


def _rank(pair: Pair, scene: DiffContext, step: Sequence[Diff]) -> int | None:
    """Return the process that a first diff belongs to; `None` with one process, or if the processes share the diff."""
    if put_together(pair):
        return rank_of(pair)
    common = any(diff.problem is OWN_SAMPLES for diff in step)
    return None if common or min(run.info.world_size for run in scene.runs) == 1 else scene.rank


def scene_of(diff: Diff, step: Sequence[Diff], alignment: Alignment, runs: Both[Run]) -> DiffContext:
    """Return the scene of a diff for hypotheses, with the diffs of the same process only."""
    rank_diff = placed(diff, step)
    return DiffContext(diff, rank_diff.own, alignment, runs, rank_diff.rank)


def _paths(pair: Pair, alignment: Alignment) -> Both[str | None]:
    """Return the paths of both layers; if a side has no record, the path of the aligned layer, or `None`."""
    reference, candidate = pair.sides.map(lambda record: record.layer if record is not None else None)
    for layers in alignment.pairs:
        if reference is None and layers.candidate.path == candidate:
            reference = layers.reference.path
        elif candidate is None and layers.reference.path == reference:
            candidate = layers.candidate.path
    return Both(reference, candidate)
