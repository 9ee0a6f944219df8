"""The first diff with its layers, extent and cause, also between the processes of a training."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from padiff.align import Alignment
from padiff.compare.coverage import first_failed, ranks_of
from padiff.compare.diagnose.causes import BETWEEN_CALLS, exchanged_inputs, guess, recorded_cause, where_in_code
from padiff.compare.diagnose.hypotheses import missing_gradient
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, whole_of
from padiff.compare.diagnose.hypotheses.engine import Finding, explain
from padiff.compare.diagnose.hypotheses.loss_code import code_cause
from padiff.compare.diagnose.known_differences import known_cause, says_where
from padiff.compare.diagnose.losses import loss_cause
from padiff.compare.diagnose.place import NEVER, Evidence, Place, extent_of, graphs_of, place_of_diff
from padiff.compare.diagnose.recompute.which_side import which_side
from padiff.compare.diagnose.routing import (
    CHOICE,
    OF_RANKS,
    OTHER_FUNCTION,
    choice_cause,
    chose_labels,
    matched_otherwise,
    routing_cause,
    scores_cause,
)
from padiff.compare.diagnose.settings import as_computed, fixes_all, trainer_cause
from padiff.compare.diagnose.shifted import evaluation_cause, repeated_cause, shift_cause, state_cause
from padiff.compare.diagnose.traced import Graph, place_of
from padiff.compare.judge.drift import site_of
from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.compare.replicas import RankFault, RankFinding, check_replicas
from padiff.errors import PadiffError, RunFolderError, SketchOnlyError
from padiff.frameworks.catalog import LAYERS, checked_fix
from padiff.pair.merge_ranks import Piece, Pieces
from padiff.pair.plans import OWN_SAMPLES
from padiff.records import (
    LOOP,
    PARAMETER_STAGES,
    ROOT,
    SIDES,
    Both,
    Cause,
    Diff,
    FirstDiff,
    Layer,
    Pair,
    Record,
    Run,
    RunInfo,
    Step,
    TensorSource,
    TracedCall,
    is_functional,
)
from padiff.records.compared import UNKNOWN_LINES
from padiff.records.diagnostic import is_same
from padiff.system.frames import Frame
from padiff.system.guard import failure_of
from padiff.system.terminal import first_few

# The largest error of rows that count as equal, relative to the largest element.
_NEAR = 1e-4


def padding_cause(scene: DiffContext) -> Cause | None:
    """Return a cause if an embedding's parameter differs only in the row that one run declares as padding; else `None`.

    The padding row is zero at the start and gets no gradient.
    """
    pair = scene.diff.pair
    declared = [
        difference
        for difference in scene.declared
        if difference.kind == "layer_setting" and difference.name == "padding_idx"
    ]
    difference = next((difference for difference in declared if pair.anchor.layer in difference.layers.reference), None)
    if difference is None or pair.stage not in PARAMETER_STAGES or not pair.complete:
        return None
    sides = whole_of(pair)
    if sides is None or sides.reference.shape != sides.candidate.shape or sides.reference.ndim != 2:
        return None
    differs = np.abs(sides.reference - sides.candidate).max(axis=1) > _NEAR * np.abs(sides.reference).max()
    rows = set(np.flatnonzero(differs).tolist())
    if not rows or not rows <= {index for index in difference.values if isinstance(index, int)}:
        return None
    text = " and ".join(f"row {row}" for row in sorted(rows))
    return replace(
        difference.cause(), proven=True, evidence=f"only {text} of {len(differs)} differs, and that is the padding"
    )


_ELEMENTWISE = frozenset({"LayerNorm", "RMSNorm"})
_STAGES = frozenset({"weight", "forward", "loss", "backward", "grad", "update"})


def surplus_cause(scene: DiffContext) -> Cause | None:
    """Return the cause if only one side has trained parameters in a layer that both have; else `None`."""
    # In the first step, weights differ before anything is trained: its own updates show what is.
    earlier = [number for number in scene.numbers if number < scene.number + (scene.stage == "weight")]
    if not earlier or scene.stage not in _STAGES:
        return None
    alignment = scene.alignment
    lone = {"reference": alignment.reference_parameters, "candidate": alignment.candidate_parameters}
    for side, other in (SIDES.swapped(), SIDES):
        steps = scene.sides(earlier[-1])
        records = [] if steps is None else getattr(steps, side).records
        updated = {f"{record.layer}/{record.slot}" for record in records if record.stage == "update"}
        layers = {layer.path: layer for layer in getattr(scene.runs, side).info.layers}
        sites = [site for site in lone[side] if site in updated]
        unowned = _unregistered(scene, side, other, sites)
        if unowned is not None:
            return unowned
        owners = [layers[path] for path in dict.fromkeys(site.rpartition("/")[0] for site in sites) if path in layers]
        if not owners or not all(_is_known(layer, scene, other) for layer in owners):
            continue
        shapes = {f"{layer.path}/{each.slot}": each.shape for layer in owners for each in layer.parameters}
        count = sum(math.prod(shapes[site]) for site in sites if site in shapes)
        kinds = first_few([*dict.fromkeys(layer.type for layer in owners)], 2)
        text = f"the {side} trains {count:,} numbers that the {other} has not: {first_few(sites, 4)} ({kinds})"
        fixes = (
            {_fix(scene.frameworks.candidate, layer, sites) for layer in owners} if side == SIDES.candidate else set()
        )
        owner = owners[0].path
        pairs = (Both(pair.reference.path, pair.candidate.path) for pair in alignment.pairs)
        paths = next((both for both in pairs if getattr(both, side) == owner), Both(owner, owner))
        lines = scene.runs.zip(paths).map(lambda sides: sides[0].info.lines.get(sides[1]))
        return Cause("surplus_parameters", text, fix=fixes.pop() if len(fixes) == 1 else "", lines=lines)
    return None


def _unregistered(scene: DiffContext, side: str, other: str, sites: Sequence[str]) -> Cause | None:
    """Return the cause that the other side's code computes with the values of a side's parameters, without a layer that
    holds them: no optimizer trains the layers of a plain list. `None` if it does not.
    """
    steps = scene.sides(next(iter(scene.numbers), scene.number))
    # Parameters that an optimizer trains, and no recorded model holds.
    settings = getattr(scene.runs, other).info.settings
    if steps is None or not sites or any(value for name, value in settings.items() if name.endswith(".others")):
        return None
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    graph: Graph = getattr(graphs, other)
    weights = {f"{r.layer}/{r.slot}": r for r in getattr(steps, side).records if r.stage == "weight"}
    uses = [
        (call, operand.tensor)
        for call in graph.trace.calls
        for operand in call.inputs
        if call.function and call.layer != LOOP and operand.tensor not in graph.producers
    ]
    calls = []
    for site in sites:
        record = weights.get(site)
        values = None if record is None or record.source.sketched else record.value
        held = [call for call, tensor in uses if values is not None and _is_equal(values, graph.values(tensor))]
        if not held:
            return None
        calls.append(held[0])
    where = f"{calls[0].function}() in `{calls[0].layer}`"
    names = first_few([f"`{site}`" for site in sites], 2)
    text = (
        f"the {other} computes with {names} ({where}), which none of its layers holds: layers in a plain list or dict "
        "are not registered, so its optimizer does not train them"
    )
    name = {"torch": "torch.nn.ModuleList", "paddle": "paddle.nn.LayerList"}.get(scene.frameworks.candidate, "")
    fix = f"{name}([...])" if name and other == SIDES.candidate else ""
    lines = Both(None, calls[0].line).swapped(other == SIDES.reference)
    return Cause("unregistered", text, True, "the code's tensors have these values in the first step", fix, lines=lines)


def _is_equal(values: np.ndarray, others: np.ndarray | None) -> bool:
    """Return True if two weights are equal, or one is the other transposed, and no constants."""
    if others is None or values.size != others.size or np.ptp(values) == 0:
        return False
    return any(form.shape == others.shape and np.allclose(form, others, 1e-6) for form in (values, values.T))


def _is_known(layer: Layer, scene: DiffContext, other: str) -> bool:
    """Return True if the other side has this layer too, or one of its kind without these parameters."""
    alignment = scene.alignment
    if any(layer.path in (pair.reference.path, pair.candidate.path) for pair in alignment.pairs):
        return True
    lone = alignment.reference_only if other == SIDES.reference else alignment.candidate_only
    return any(each.kind == layer.kind and not each.parameters for each in lone)


def _fix(framework: str, layer: Layer, sites: list[str]) -> str:
    """Return the call that creates a layer of a framework without these of its parameters; empty if unknown."""
    if layer.type not in LAYERS.get(framework, ()):
        return ""
    is_weight = any(f"{layer.path}/{slot}" in sites for slot in ("weight", "scale"))
    is_bias = f"{layer.path}/bias" in sites
    if framework == "paddle":
        arguments = [*(["weight_attr=False"] if is_weight else []), *(["bias_attr=False"] if is_bias else [])]
        return checked_fix(framework, f"paddle.nn.{layer.type}(..., {', '.join(arguments)})") if arguments else ""
    if not is_weight:
        return checked_fix(framework, f"torch.nn.{layer.type}(..., bias=False)") if is_bias else ""
    argument = "elementwise_affine" if layer.type in _ELEMENTWISE else "affine"
    return checked_fix(framework, f"torch.nn.{layer.type}(..., {argument}=False)") if "norm" in layer.kind else ""


# TF32 keeps 10 bits of the mantissa: a matrix product or convolution is off by 2**-11 or so, a chain by little more.
_TF32_AT_MOST = 2e-2
# The largest relative error that autocast explains, as a multiple of the rounding of one number: a relative error of
# 0.25 in bfloat16. Chosen: two and a half times the limit of the default policy for gradients in bfloat16.
_AUTOCAST_AT_MOST = 64
_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "multiheadattention", "bilinear"})


def environment_cause(diff: Diff, infos: Both[RunInfo]) -> Cause | None:
    """Return a cause if the environments differ and the diff is as large as that difference makes it; else `None`.

    Args:
        diff: the first diff that did not pass.
        infos: the information on the reference and on the candidate run.
    """
    if not _computed(diff):
        return None
    assert diff.pair.reference is not None
    path = diff.pair.reference.layer
    kind = next((layer.kind for layer in infos.reference.layers if layer.path == path), "")
    return _tf32(diff, kind, infos)


def _computed(diff: Diff) -> bool:
    return diff.figures is not None and diff.compared and diff.pair.stage in ("forward", "loss", "backward")


def autocast_cause(diff: Diff, infos: Both[RunInfo]) -> Cause | None:
    """Return a cause if autocast uses other dtypes in the two runs and the two tensors have these dtypes; else `None`.

    The rounding of autocast is tolerated by the policy, so this cause is for diffs that nothing else explains.
    """
    if not _computed(diff):
        return None
    cast = infos.map(lambda info: str(info.environment.get("autocast.dtype", "")))
    if not all(cast) or cast.reference == cast.candidate:
        return None
    assert diff.pair.reference is not None and diff.pair.candidate is not None
    reference, candidate = diff.pair.reference.dtype, diff.pair.candidate.dtype
    coarser = max(ROUNDING.get(coarse(dtype), 0.0) for dtype in (reference, candidate))
    assert diff.figures is not None
    if diff.figures.rel_l2 > _AUTOCAST_AT_MOST * coarser:
        return None
    if reference == candidate or {*cast}.isdisjoint((reference, candidate)):
        return None
    return Cause(
        "autocast",
        f"autocast: {cast.reference} in the reference run, {cast.candidate} in the candidate (this is {reference} "
        f"against {candidate})",
    )


def _tf32(diff: Diff, kind: str, infos: Both[RunInfo]) -> Cause | None:
    """Return a cause if TF32 is on in one run only and a matrix product on GPUs is off by its rounding; else `None`."""
    name = "tf32.cudnn" if kind.startswith("conv") else "tf32.matmul"
    environments = infos.map(lambda info: info.environment)
    used = environments.map(lambda found: bool(found.get(name)) and "gpu" in str(found.get("device.kind")))
    assert diff.figures is not None
    if used.reference == used.candidate or kind not in _PRODUCTS or diff.pair.stage != "forward":
        return None
    if not 0 < diff.figures.rel_l2 <= _TF32_AT_MOST:
        return None
    side = "reference" if used.reference else "candidate"
    text = f"TF32 is on in the {side} run only ({name}), and the products differ by as much as it leaves out"
    return Cause("tf32", text)


# The largest relative error of a mean over processes that counts as equal: only the order of the sum may differ.
_IS_MEAN = 1e-5


@dataclass(frozen=True)
class RankDiff:
    """A diff, with all diffs of its process.

    Attributes:
        diff: the diff.
        own: the diffs of its step and process, in causal order.
        rank: the number of the process; 0 if there is only one.
    """

    diff: Diff
    own: Sequence[Diff]
    rank: int


def placed(diff: Diff, step: Sequence[Diff]) -> RankDiff:
    """Return a diff with all diffs of its process."""
    ranks = ranks_of(step)
    number = next((k for k, rank_diffs in enumerate(ranks) if any(d is diff for d in rank_diffs)), 0)
    return RankDiff(diff, ranks[number], number)


def rank_cause(scene: DiffContext, step: Sequence[Diff]) -> Cause | None:
    """Return a fault between the processes of one run that the other run does not have; else `None`.

    Args:
        scene: the diff and its step.
        step: the diffs of the step, of all processes.
    """
    if all(run.info.world_size == 1 for run in scene.runs):
        return None
    findings = scene.runs.map(lambda run: _findings(run, scene))
    kinds = findings.map(lambda side: {finding.kind for finding in side})
    for side, side_findings, others in zip(SIDES, findings, kinds.swapped()):
        for finding in side_findings:
            if finding.kind not in others and _explains(finding, scene.stage):
                proven = finding.kind is RankFault.NOT_REDUCED and _is_mean(side, step)
                evidence = "their mean over the ranks is the other side's gradient" if proven else ""
                clause = f"{finding.sentence[0].lower()}{finding.sentence[1:].rstrip('.')}"
                sentence = f"the {side}'s ranks differ from each other: {clause}"
                return Cause("ranks", sentence, proven=proven, evidence=evidence)
    return None


def _findings(run: Run, scene: DiffContext) -> list[RankFinding]:
    """Return the findings on a run's processes in the scene's step and in the step compared before it."""
    if run.info.world_size == 1:
        return []
    before = scene.earlier
    try:
        return check_replicas(run.info, [run.steps(number) for number in (*before[-1:], scene.number)])
    except PadiffError:
        return []  # the values can no longer be read


def _explains(finding: RankFinding, stage: str) -> bool:
    """Return True if a finding can be the reason of a diff at a stage."""
    if finding.kind is RankFault.SAME_BATCH:
        return stage == "input"
    return finding.kind.fault and stage in ("weight", "grad", "update")


def _is_mean(side: str, step: Sequence[Diff]) -> bool:
    """Return True if the mean of one side's gradients over the processes is the gradient of the other side."""
    sites: dict[str, list[Both[np.ndarray]]] = {}
    for diff in step:
        if diff.pair.stage == "grad" and not diff.passed and diff.pair.complete:
            tensors = whole_of(diff.pair)
            if tensors is None:
                return False
            sites.setdefault(diff.pair.anchor.site, []).append(tensors)
    ranks = max(map(len, sites.values()), default=0)
    if ranks < 2:
        return False
    for arrays in sites.values():
        # A process whose gradient passes is missing here, so that the mean can't be computed.
        oriented = [both if side == SIDES.reference else both.swapped() for both in arrays]
        mean, expected = np.mean([both.reference for both in oriented], axis=0), oriented[0].candidate
        if len(arrays) == ranks and np.linalg.norm(mean - expected) > _IS_MEAN * np.linalg.norm(expected):
            return False
    return True


# A process is named if its part has at least this share of the squared error. Chosen: if one part is wrong, the others
# only have rounding errors; if all parts are wrong, the error is spread by their sizes.
_SHARE = 0.99


def put_together(pair: Pair) -> bool:
    """Return True if a side of a pair was assembled from the parts of several processes."""
    records = [record for record in pair.sides if record is not None]
    return any(isinstance(record.source, Pieces) for record in records)


def rank_of(pair: Pair) -> int | None:
    """Return the process that holds the differing part of a tensor; `None` if no single process does, or it is unknown.

    Args:
        pair: the pair of the diff.
    """
    if pair.reference is None or pair.candidate is None or not put_together(pair):
        return None
    sources = pair.candidate.source, pair.reference.source
    if any(source.sketched for source in sources):
        return _sketched_apart(*sources)
    try:
        reference, candidate = (record.value.astype(np.float64) for record in (pair.reference, pair.candidate))
        for source, counterpart in (
            (sources[0], pair.layout.undo(reference, candidate.shape)),
            (sources[1], pair.layout.apply(candidate, reference.shape)),
        ):
            # A tensor that one process of the reference holds as a whole says nothing: the candidate may be wrong.
            if isinstance(source, Pieces) and (source is sources[0] or len({p.rank for p in source.pieces}) > 1):
                rank = _apart(source, counterpart)
                if rank is not None:
                    return rank
    except (PadiffError, ValueError, TypeError):
        return None  # the memory order differs from the parameter's, or the values can't be read
    return None


def _apart(source: Pieces, partner: np.ndarray) -> int | None:
    """Return the process whose part is the only one that differs from the other side's tensor; `None` if there is
    none.
    """
    if any(piece.part.kind == "partial" for piece in source.pieces):
        return None
    errors: dict[int, float] = defaultdict(float)
    for piece in source.pieces:
        errors[piece.rank] += _error(piece, partner)
    return _largest(errors)


def _largest(errors: dict[int, float]) -> int | None:
    """Return the process with nearly all of the squared error; `None` if there is none."""
    rank, most = max(errors.items(), key=lambda one: one[1])
    total = sum(errors.values())
    return rank if total > 0 and (most >= _SHARE * total or most == np.inf) else None


def _sketched_apart(source: TensorSource, other: TensorSource) -> int | None:
    """Return the same as `_apart` for sketches, if both sides are split into the same parts; else `None`."""
    if not isinstance(source, Pieces) or not isinstance(other, Pieces):
        return None
    partners = {piece.place: piece.record.source.sketch for piece in other.pieces}
    errors: dict[int, float] = defaultdict(float)
    for piece in source.pieces:
        sketch, partner = piece.record.source.sketch, partners.get(piece.place)
        if sketch is None or partner is None or sketch.transposed != partner.transposed:
            return None
        errors[piece.rank] += float(np.sum(np.square(sketch.projection - partner.projection)))
    return _largest(errors)


def _error(piece: Piece, partner: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        difference = piece.record.value.astype(np.float64) - piece.within(partner)
        square = float(np.sum(difference * difference))
    return square if np.isfinite(square) else np.inf


# The most lines of a stack in a report.
_LINES = 4

# Kinds of recorded causes, by the kind of the hypothesis that computes the same cause.
_DECLARED = {"norm_statistics": "mode", "accumulation": "trainer"}
# Kinds of computed causes that another mode explains: running statistics that are still 0 and 1 normalise nothing.
_OF_MODE = frozenset({"norm_missing", "norm_added"})


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
    try:
        cause = _cause(scene, step, place, evidence, compute)
    except Exception as error:
        # The differences are measured and judged: they are shown, whatever the search for their cause makes of them.
        cause = Cause("unknown", f"unknown; the search for it failed, please report this: {failure_of(error).text}")
    if cause is not None and is_same(*cause.lines):
        cause = replace(cause, lines=_edited_lines(evidence) or cause.lines)
    if pair.stage == "input" and not pair.derived and (cause is None or not any(cause.lines)):
        place = Place(diff)  # other batches: the code that prepares them is not at fault
    calls = _calls(place, evidence, cause is None or not any(cause.lines))
    first = FirstDiff(
        pair.step,
        pair.stage,
        reference,
        candidate,
        place.diff.pair.anchor.slot,
        place.diff,
        cause,
        extent=extent_of(diff, scene.step, evidence.agreed),
        last_agreeing=place.last_agreeing,
        inside=place.inside,
        call=_call(place),
        recomputed=which_side(scene, place, evidence) if compute else None,
        rank=_rank(place.diff.pair, scene, step),
        stacks=calls.map(_lines),
        code=calls.map(lambda call: None if call is None else call.line),
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
    scene = replace(scene_of(update, step, evidence.alignment, evidence.runs), declared=differences, unlimited=True)
    return replace(first, cause=as_computed(cause, differences, explain(scene).cause, update.pair.step))


# Kinds of causes that say how a loss differs, and not why.
_OF_LOSS = frozenset({"labels", "label_value", "loss_scale"})
# Kinds of causes that say how much a tensor differs, and not why; and of those that name calls without their purpose.
_OF_SIZE = frozenset({"gradient_scale", "scale"})
_MANY = 4  # most calls that are named one after the other
# Part of the sentence of a computed cause whose places the code may have read from a tensor, which something chose.
_OF_PLACES = "[["
_OF_CALLS = frozenset({"missing_call", "surplus_call", "call_input", "call_shape"})
# Kinds of computed causes that say no more than that an input of the loss differs.
_OF_LOSS_INPUT = frozenset({"labels", "loss_input", "call_input"})


def _cause(scene: DiffContext, step: Sequence[Diff], place: Place, evidence: Evidence, compute: bool) -> Cause | None:
    """Return the cause that the records show, else the cause that a hypothesis proves, else the code to read."""
    runs, alignment, diff = evidence.runs, evidence.alignment, scene.diff
    declared = scene.declared
    cause = (
        rank_cause(scene, step)
        or missing_gradient.interval_cause(scene)
        or evaluation_cause(diff, step, runs)
        or repeated_cause(diff, runs)
        or state_cause(scene)
        or shift_cause(diff, runs)
        or environment_cause(diff, runs.map(lambda run: run.info))
        or padding_cause(scene)
        or trainer_cause(scene)
        or loss_cause(scene)
        or next(missing_gradient.missing_causes(scene), None)
    )
    if cause is not None and cause.kind == "labels" and diff.pair.stage == "loss":
        cause = matched_otherwise(diff, cause, evidence) or cause
    if cause is not None:
        # A call by which the loop computes its labels says more than that they differ.
        if compute and diff.pair.stage == "loss" and (not cause.proven or cause.kind == "labels"):
            computed_loss = explain(scene).cause
            if computed_loss is not None and computed_loss.kind not in _OF_LOSS_INPUT:
                names_many = computed_loss.kind == "code" and computed_loss.sentence.count("()") > _MANY
                if computed_loss.proven and not (names_many and cause.kind == "matching"):
                    return computed_loss
                if cause.kind == "labels" and computed_loss.kind in _OF_SIZE:
                    return computed_loss  # of other labels no gradients are a multiple: these are another form
                if cause.kind == "labels" and computed_loss.remaining is not None:
                    text = f"{cause.sentence}: {computed_loss.sentence}"
                    return replace(computed_loss, sentence=text, kind=cause.kind)
        if diff.pair.stage == "loss" and cause.kind in _OF_LOSS:
            chosen = choice_cause(diff, step, evidence)
            if chosen is not None:  # the loop takes other samples, or other labels
                return chosen
        surplus = surplus_cause(scene) if diff.pair.stage == "loss" and not cause.proven else None
        if compute and surplus is None and cause.kind == "loss_scale" and not cause.proven:
            return _with_code(cause, scene)
        return surplus or cause
    if (exchanged := exchanged_inputs(place)) is not None:
        return exchanged
    if place.between:
        scene = replace(scene, diff=_given(place.diff) if place.is_given else place.diff)
    computed = explain(scene) if compute and diff.pair.complete else Finding()
    recorded = recorded_cause(diff, step, alignment, declared, place, scene.frameworks.candidate)
    proven = computed.cause is not None and computed.cause.proven
    if diff.pair.stage == "weight" and (surplus := surplus_cause(scene)) is not None:
        return surplus  # what is drawn after a surplus parameter differs, too
    if (recorded is None or recorded.kind == "surplus_layers") and not proven:
        recorded = surplus_cause(scene) or recorded
    if computed.cause is not None and computed.cause.kind == "code" and computed.cause.sentence.count("()") > _MANY:
        code = code_cause(scene)  # says in fewer words what many calls do, unless it leaves some out
        if code is not None and "..." not in code.sentence:
            lines = code.lines if any(code.lines) else computed.cause.lines
            computed = replace(computed, cause=replace(computed.cause, sentence=code.sentence, lines=lines))
    # A known difference of the frameworks goes before a cause that only names a place, and after computed causes.
    # An operation that agreed in an earlier step does not differ by framework.
    agreed = diff.pair.stage in ("forward", "loss") and evidence.agreed.get(site_of(diff), NEVER)[1] > 0
    framework_cause = None if computed.cause is not None or agreed else known_cause(scene, place)
    cast = autocast_cause(diff, runs.map(lambda run: run.info))
    if cast is not None and not _explained(computed.cause, recorded, place):
        return replace(cast, excluded=computed.excluded)
    chosen = choice_cause(diff, step, evidence)
    is_of_mask = computed.cause is not None and computed.cause.kind.startswith("mask_")  # that choices make
    is_of_key = proven and computed.cause is not None and _OF_PLACES in computed.cause.sentence
    says_more = chosen is not None and (
        chosen.kind == OTHER_FUNCTION
        or (is_of_mask and chosen.kind in OF_RANKS)
        or (is_of_key and chosen.kind != CHOICE)
    )
    if chosen is not None and proven and not says_more and not chose_labels(diff, chosen):
        chosen = None  # a computed cause says more, unless it is about what another choice makes
    if chosen is not None and proven:
        return chosen
    if not proven and (chosen is None or chosen.kind == CHOICE):
        routed = routing_cause(diff, step, evidence)
        if routed is not None:
            return replace(routed, excluded=computed.excluded)
    if chosen is not None:
        if chosen.kind == CHOICE:
            chosen = scores_cause(diff, step, evidence, partial(code_cause, scene)) or chosen
        chosen = replace(chosen, excluded=computed.excluded)
        if chosen.kind != CHOICE:
            return chosen
    if recorded is not None:
        if recorded.kind == "mode" and computed.cause is not None and computed.cause.kind in _OF_MODE:
            return recorded
        if computed.cause is None or not computed.cause.proven:
            if framework_cause is not None and says_where(recorded, place):
                return framework_cause
            return _with_code(recorded, scene) or recorded if compute and recorded.kind in _OF_CALLS else recorded
        is_argument = recorded.kind == "argument" and _numbers(recorded.sentence) == _numbers(computed.cause.sentence)
        if is_argument or recorded.kind == _DECLARED.get(computed.cause.kind):
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
    cause = computed.cause or framework_cause or chosen
    if compute and diff.pair.complete and (cause is None or (cause.kind in _OF_SIZE and not cause.proven)):
        cause = _with_code(cause, scene, computed.excluded)
    cause = cause or where_in_code(place, computed.excluded) or guess(diff, step, alignment, computed.excluded)
    if cause is not None and cause.kind == BETWEEN_CALLS:
        return replace(cause, lines=_model_called(place))
    return cause


def _model_called(place: Place) -> Both[Frame | None]:
    """Return the lines of the loop that make the call of the models in which a diff is; `None` if not traced."""
    if place.graphs is None:
        return UNKNOWN_LINES
    calls = place.graphs.map(lambda graph: graph.layers.get((ROOT, place.diff.pair.anchor.call)))
    return calls.map(lambda call: None if call is None else call.line)


def _numbers(sentence: str) -> set[float]:
    """Return the numbers that a sentence names."""
    return {float(number) for number in re.findall(r"(?<![\w.`])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w`])", sentence)}


def _given(diff: Diff) -> Diff:
    """Return the diff of an input of a layer inside, which is the model's, as one of the model's input."""
    sides = diff.pair.sides.map(lambda record: record and replace(record, stage="input"))
    return replace(diff, pair=replace(diff.pair, reference=sides.reference, candidate=sides.candidate))


def _with_code(cause: Cause | None, scene: DiffContext, excluded: tuple[str, ...] = ()) -> Cause | None:
    """Return a cause that is not proven with the code of both sides, as far as the traces show it."""
    code = code_cause(scene)
    if code is None or cause is None:
        return cause if code is None else replace(code, excluded=excluded)
    lines = cause.lines if any(cause.lines) else code.lines
    return replace(cause, sentence=f"{cause.sentence}; {code.sentence}", lines=lines)


def _other_model(place: Place) -> Cause | None:
    """Return the cause of an input that a model computes which the runs do not hold; `None` for other diffs."""
    if not place.diff.pair.derived or place.graphs is None or place.ends is None:
        return None
    if any(graph.producers.get(end) is not None for graph, end in zip(place.graphs, place.ends)):
        return None
    if not all(graph.trace.functions for graph in place.graphs):
        return None  # the code of the loop may make it
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


def _calls(place: Place, evidence: Evidence, narrow: bool) -> Both[TracedCall | None]:
    """Return the call that a diff comes from, of either side's code; `None` where none was recorded.

    Args:
        narrow: True for the only call in a layer that one side makes alone; else the layer's call.
    """
    if place.calls is not None and place.calls.same is not None:
        return place.calls.same
    only: Both[tuple[TracedCall, ...]] = place.calls.only if place.calls is not None and narrow else Both((), ())
    alone = only.map(lambda calls: calls[0] if len(calls) == 1 else None)
    if evidence.steps is None:
        return alone
    try:
        called = evidence.steps.zip(place.diff.pair.sides).map(lambda side: _call_of(*side))
    except RunFolderError:
        return alone  # the trace is damaged; the figures stay valid
    return alone.zip(called).map(lambda side: side[0] or side[1])


def _call_of(step: Step, record: Record | None) -> TracedCall | None:
    """Return the call that a record belongs to: of a layer, or of a function; `None` if it is not known."""
    if record is None:
        return None
    if is_functional(record.slot):
        name = record.slot.partition("()")[0]
        same = [call for call in step.trace.calls if (call.layer, call.function) == (record.layer, name)]
        return next(iter(same if len(same) < 2 else same[record.call : record.call + 1]), None)
    site = record.layer, record.call
    return next((call for call in step.trace.calls if not call.function and (call.layer, call.call) == site), None)


def _edited_lines(evidence: Evidence) -> Both[Frame | None] | None:
    """Return the only traced line of either side that the other side does not have; `None` if there are several."""
    if evidence.steps is None or len({run.info.framework for run in evidence.runs}) > 1:
        return None
    frames = evidence.steps.map(_inner_frames)
    alone = frames.zip(Both(frames.candidate, frames.reference)).map(
        lambda side: [frame for code, frame in side[0].items() if code not in side[1]]
    )
    return alone.map(lambda found: found[0]) if [len(each) for each in alone] == [1, 1] else None


def _inner_frames(step: Step) -> dict[str, Frame]:
    """Return the traced lines of code, but for those that lead to every call: two trainings may be called anywhere."""
    stacks = [{frame.code: frame for frame in call.stack if frame.code} for call in step.trace.calls if call.stack]
    frames: dict[str, Frame] = {}
    for stack in stacks:
        frames.update(stack)
    return {code: frame for code, frame in frames.items() if not all(code in stack for stack in stacks)}


def _lines(call: TracedCall | None) -> tuple[str, ...]:
    stack = () if call is None else call.stack[: -_LINES - 1 : -1]
    return tuple(f"{frame.file}:{frame.line} {frame.function}" for frame in stack)


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
