"""Faults of a layer, a loss, a gradient or an update, computed from the candidate's own inputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff.compare.declared.optimizers import Optimizers
from padiff.compare.diagnose.followups.fault import Fault, families, leaves
from padiff.compare.diagnose.hypotheses import optimizers
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, PairPlace, place_of, whole_of
from padiff.compare.diagnose.hypotheses.engine import explain
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, explains, weigh
from padiff.compare.diagnose.loss_calls import LossCall, are_exchangeable, calls_of
from padiff.compare.diagnose.losses import labels_in_order, loss_cause_of
from padiff.compare.diagnose.recompute.of_layers import Part, Recorded, as_float64, off_by
from padiff.compare.judge.limits import allowed
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import (
    LOOP,
    SIDES,
    Both,
    Cause,
    Diff,
    InMemory,
    Layer,
    Pair,
    Recomputed,
    Record,
    is_loss,
    is_of_loss,
    loss_role,
    settings_at,
)

# The most parameters that are checked, and the most elements of a layer's input or output.
_MOST, _ELEMENTS = 60, 2_000_000
# The largest remaining error of a gradient that is a multiple of the computed one; the largest relative spread of these
# multiples in one training; the smallest remaining error of a gradient that is computed in another way. Chosen.
_LEFT, _ALIKE, _ANOTHER = 1e-3, 2e-3, 0.1
# The fewest parameters that have to agree.
_FEWEST = 3


@dataclass(frozen=True)
class _Made:
    """Gradients of one side, compared with the gradients computed from recorded inputs and output gradients.

    Attributes:
        factors: the ratio of the recorded to the computed gradient, by layer and slot.
        left: the remaining error after scaling by that ratio, as a share of the gradient's norm, by layer and slot.
    """

    factors: dict[tuple[str, str], float]
    left: dict[tuple[str, str], float]

    def only(self, places: Collection[tuple[str, str]]) -> _Made:
        """Return the entries of some parameters."""
        return _Made(
            *({p: value for p, value in values.items() if p in places} for values in (self.factors, self.left))
        )

    def common(self) -> float | None:
        """Return the ratio that all gradients share; `None` if there is none."""
        if len(self.factors) < _FEWEST or max(self.left.values()) > _LEFT:
            return None
        middle = float(np.median(list(self.factors.values())))
        return middle if all(abs(factor - middle) <= _ALIKE * abs(middle) for factor in self.factors.values()) else None


def gradient_fault(scene: DiffContext, sides: Both[Recorded]) -> Fault | None:
    """Return a fault of the gradients that is independent of what the layers got; `None` if the gradients show none.

    Args:
        scene: a step whose gradients differ.
        sides: the recorded tensors of either side.
    """
    wrong = next((d for d in scene.diffs("grad") if not d.passed and d.pair.complete), None)
    if wrong is None or any(side.info.world_size > 1 for side in sides):
        return None
    try:
        with np.errstate(all="ignore"):
            fits = _made(scene, sides)
            norms = sides.map(_norm)
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None
    reference_factor = fits.reference.common()
    if reference_factor is None or not reference_factor > 0:
        return None
    candidate_factor = fits.candidate.common()
    cause = (
        _other_gradients(fits)
        if candidate_factor is None
        else _other_factor(Both(reference_factor, candidate_factor), norms)
    )
    return None if cause is None else Fault(wrong, cause, kind="gradients")


def _other_factor(factors: Both[float], norms: Both[float]) -> Cause | None:
    """Return a cause for gradients with another ratio: clipping if the gradient norms fit clipping, else a scale."""
    expected, actual = factors
    if abs(actual - expected) <= 3 * _ALIKE * abs(expected):
        return None
    proven = "gradients are what the layers' own inputs and output gradients make, times one number"
    before = Both(norms.reference / expected, norms.candidate / actual) if actual else norms
    if expected < 1 - _ALIKE and actual > 0:
        # The reference clips, to this norm.
        limit = norms.reference
        if abs(norms.candidate - limit) <= 3 * _ALIKE * limit or (
            abs(actual - 1) <= _ALIKE and before.candidate <= limit * (1 + 3 * _ALIKE)
        ):
            return None
        if abs(actual - 1) <= _ALIKE:
            text = (
                f"the candidate's gradients are not clipped: their norm is {norms.candidate:.4g}, the reference's are "
                f"clipped to {limit:.4g}"
            )
            return Cause("clip_missing", text, True, proven)
        text = (
            f"the candidate's gradients are clipped to a norm of {norms.candidate:.4g}, the reference's to {limit:.4g}"
        )
        return Cause("clip_limit", text, True, proven) if actual < 1 else _scaled(factors, proven)
    if abs(expected - 1) <= _ALIKE and actual < 1 and norms.candidate >= norms.reference * (1 - 3 * _ALIKE):
        return None  # both sides may clip to a norm that the reference's gradients do not reach
    return _scaled(factors, proven)


def _scaled(factors: Both[float], proven: str) -> Cause:
    expected, actual = factors
    text = (
        f"the candidate's gradients are {actual:.5g} times what its layers' own inputs and output gradients make, the "
        f"reference's {expected:.5g} times"
    )
    return Cause("gradient_scale", text, True, proven)


def _other_gradients(fits: Both[_Made]) -> Cause | None:
    errors = fits.candidate.left
    if len(errors) < _FEWEST or min(errors.values()) < _ANOTHER:
        return None
    text = (
        "the candidate's gradients are not what its layers' own inputs and output gradients make, the reference's are: "
        "something is added to them, left from a step before, or taken off"
    )
    return Cause("gradients_changed", text, True, f"{len(errors)} parameters' gradients were computed in float64")


def _norm(side: Recorded) -> float:
    """Return the norm of all gradients that the optimizer got."""
    squares = 0.0
    for record in side.step.records:
        if record.stage == "grad" and record.layer != LOOP:
            squares += float(np.sum(np.square(record.value.astype(np.float64))))
    return math.sqrt(squares)


def _made(scene: DiffContext, sides: Both[Recorded]) -> Both[_Made]:
    fits = Both(_Made({}, {}), _Made({}, {}))
    gradients = sides.map(
        lambda side: {(r.layer, r.slot): r for r in side.step.records if r.stage == "grad" and r.layer != LOOP}
    )
    for diff in _spread(scene):
        pair = diff.pair
        both = []
        for side, side_gradients, record in zip(sides, gradients, pair.sides):
            gradient = None if record is None else side_gradients.get((record.layer, record.slot))
            computed = None if gradient is None else _expected(side, gradient)
            both.append(None if computed is None or gradient is None else (computed, as_float64(gradient.value)))
        if any(arrays is None for arrays in both):
            continue
        place = pair.anchor.layer, pair.anchor.slot
        for side_made, arrays in zip(fits, both):
            assert arrays is not None
            computed, actual = arrays
            square = float(np.sum(np.square(computed)))
            norm = float(np.linalg.norm(actual))
            if not square or not norm or computed.shape != actual.shape:
                continue
            factor = float(np.sum(computed * actual)) / square
            side_made.factors[place] = factor
            side_made.left[place] = float(np.linalg.norm(actual - factor * computed)) / norm
    both_have = fits.reference.factors.keys() & fits.candidate.factors.keys()
    return fits.map(lambda side: side.only(both_have))


def _spread(scene: DiffContext) -> Iterator[Diff]:
    """Yield diffs of gradients that are larger than rounding noise, spread over the model."""
    diffs = [d for d in scene.diffs("grad") if d.pair.complete and d.figures is not None]
    sizes = [d.figures.reference_l2 / math.sqrt(max(d.figures.size, 1)) for d in diffs if d.figures is not None]
    largest = max(sizes, default=0.0)
    large = [d for d, size in zip(diffs, sizes) if size > 1e-3 * largest]
    yield from large[:: max(1, -(-len(large) // _MOST))]


def _expected(side: Recorded, gradient: Record) -> np.ndarray | None:
    """Return a parameter's gradient in float64, computed from the recorded input and output gradient of its layer.

    `None` if they were not recorded or if this kind of layer is not supported.
    """
    layer = side.layers.get(gradient.layer)
    if layer is None or layer.children or _is_shared(side, layer, gradient.slot) or gradient.dtype != "float32":
        return None
    kind, slot = equivalents.kind(layer), equivalents.slot(gradient.slot)
    simple = kind == "linear" or (slot == "bias" and ("norm" in kind or kind.startswith("conv"))) or kind == "embedding"
    calls = [call for call in side.graph.trace.calls if call.layer == layer.path and not call.function]
    back = {r.call: r for r in side.step.records if r.stage == "backward" and r.layer == layer.path}
    if not simple or not calls or {call.call for call in calls} != back.keys():
        return None
    total: np.ndarray | None = None
    for call in calls:
        if len(call.inputs) != 1 or len(call.outputs) != 1:
            return None
        tensor, came = side.graph.trace.tensors[call.inputs[0].tensor], back[call.call]
        if tensor.source is None or came.source.sketched or came.dtype != "float32":
            return None
        if math.prod(came.shape) > _ELEMENTS or math.prod(tensor.shape) > _ELEMENTS:
            return None
        out = as_float64(came.value) / side.step.loss_scale
        if slot == "bias":
            axes = tuple(k for k in range(out.ndim) if k != _channel_axis(kind, out.ndim))
            part = _summed_norm(out, gradient.shape) if kind in ("layernorm",) else out.sum(axis=axes)
        elif tensor.source.sketched or tensor.dtype not in ("float32", "int64", "int32"):
            return None
        elif kind == "linear":
            x = as_float64(tensor.source.read())
            part = out.reshape(-1, out.shape[-1]).T @ x.reshape(-1, x.shape[-1])
            if part.shape != gradient.shape or _in_out(side, layer, gradient.slot):
                part = part.T
        else:
            ids = tensor.source.read().ravel()
            part = np.zeros(gradient.shape)
            np.add.at(part, ids, out.reshape(-1, out.shape[-1]))
            index = layer.settings.get("padding_idx")
            if isinstance(index, int):
                part[index] = 0.0
        total = part if total is None else total + part
    return None if total is None or total.size != math.prod(gradient.shape) else total.reshape(gradient.shape)


def _summed_norm(out: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    return np.asarray(out.reshape(-1, size).sum(axis=0))


def _channel_axis(kind: str, ndim: int) -> int:
    return ndim - 1 if kind in ("linear", "layernorm", "rmsnorm") or ndim < 3 else 1


def _in_out(side: Recorded, layer: Layer, slot: str) -> bool:
    parameter = next(p for p in layer.parameters if p.slot == slot)
    return equivalents.layout(layer, parameter) == "in_out"


def _is_shared(side: Recorded, layer: Layer, slot: str) -> bool:
    """Return True if a parameter has other names, or is also used by calls outside of its layer."""
    name = f"{layer.path}/{slot}"
    if any(name in call.parameters for call in side.graph.trace.calls if call.layer != layer.path):
        return True
    return any(
        (p.tied_to == name) or (info_layer.path == layer.path and p.slot == slot and bool(p.tied_to))
        for info_layer in side.info.layers
        for p in info_layer.parameters
    )


# The most layers that are checked.
_MOST_VALUES = 200
# The smallest error of a faulty layer, as a multiple of the limit for rounding. Chosen.
_FAR = 10.0


def layer_faults(diffs: Sequence[Diff], sides: Both[Recorded], scene: DiffContext) -> Iterator[Fault]:
    """Yield the faults of layers that are wrong independently of their inputs.

    Args:
        diffs: the diffs to check.
        sides: the recorded tensors of either side.
        scene: the scene of the first diff.
    """
    weights = _weights(scene)
    infos = sides.map(lambda side: side.info)
    for diff in list(leaves(diffs, infos))[:_MOST_VALUES]:
        try:
            with np.errstate(all="ignore"):
                fault = _layer_fault(diff, sides, weights.get(diff.pair.anchor.layer, {}), scene)
        except (PadiffError, OSError, KeyError, ValueError, IndexError):
            continue  # the values can no longer be read
        if fault is not None:
            yield fault


def _layer_fault(diff: Diff, sides: Both[Recorded], weights: dict[str, Pair], scene: DiffContext) -> Fault | None:
    pair = diff.pair
    reference, candidate = pair.reference, pair.candidate
    if pair.layout or reference is None or candidate is None or reference.shape != candidate.shape:
        return None
    layer = sides.reference.layers[reference.layer]
    right = sides.reference.part(reference)
    if right is None:
        return None
    near = off_by(right, reference)
    limit = max(allowed(side.dtype(record), "forward") for side, record in sides.zip(Both(reference, candidate)))
    if near is None or near > limit:
        return None  # the reference's recorded output does not fit its own layer, so it can't serve as a rule
    candidate_input = sides.candidate.given(candidate)
    expected = sides.reference.tensor_given(reference)
    if candidate_input is None or expected is None or candidate_input.shape != expected.shape:
        return None
    candidate_weights = {}
    for parameter in layer.parameters:
        if parameter.slot in equivalents.ONE_SIDED:
            continue
        values = whole_of(weights[parameter.slot]) if parameter.slot in weights else None
        if values is None:
            return None
        candidate_weights[parameter.slot] = values.candidate
    part = sides.reference.part(reference, candidate_input, candidate_weights)
    far = None if part is None else off_by(part, candidate)
    if part is None or far is None or far <= _FAR * limit:
        return None
    candidate_layer = sides.candidate.layers[candidate.layer]
    rules = Both(
        layer.type, candidate_layer.type if equivalents.kind(candidate_layer) == equivalents.kind(layer) else ""
    )
    recomputed = Recomputed("layer", rules, Both(near, far), SIDES.candidate)
    cause = _cause(diff, part, candidate_input, scene, list(weights.values()))
    return Fault(diff, cause, recomputed, kind=equivalents.kind(layer))


def _weights(scene: DiffContext) -> dict[str, dict[str, Pair]]:
    """Return the pairs of the step's weights, by layer and slot of the reference."""
    weights: dict[str, dict[str, Pair]] = {}
    for (layer, slot, _), pair in scene.pairs(scene.number, "weight").items():
        weights.setdefault(layer, {})[slot] = pair
    return weights


def _cause(diff: Diff, part: Part, fed_values: np.ndarray, scene: DiffContext, weights: Sequence[Pair]) -> Cause | None:
    """Return the cause of a layer's fault; `None` if no hypothesis explains the fault.

    The layer's output is compared with the output of the reference's layer, computed from the same input.
    """
    pair = diff.pair
    reference, candidate = pair.reference, pair.candidate
    assert reference is not None and candidate is not None
    _, computed = part.values(candidate)
    if computed.size != math.prod(candidate.shape):
        return None  # only a part of the output was computed
    values = computed.reshape(candidate.shape).astype(np.float32)
    computed_pair = replace(pair, reference=_as(reference, values, candidate), candidate=candidate)
    measured = measure_pair(computed_pair)
    if measured.figures is None:
        return None
    alone = replace(measured, passed=False, judgement=diff.judgement)
    weighed = [replace(measure_pair(p), passed=True) for p in weights]
    fed = replace(candidate, stage="input", slot="input", order=pair.anchor.order - 1)
    fed = replace(
        fed, layer=reference.layer, source=InMemory(fed_values), shape=fed_values.shape, dtype=str(fed_values.dtype)
    )
    before = replace(measure_pair(Pair(pair.step, fed, fed)), passed=True)
    return explain(replace(scene, diff=alone, step=[before, *weighed, alone], _pairs={})).cause


def _as(record: Record, values: np.ndarray, like: Record) -> Record:
    return replace(record, source=InMemory(values), shape=like.shape, dtype="float32")


# The largest error of the reference's loss and the smallest error of a faulty candidate's, relative. Chosen.
_NEAR, _FAR_LOSS = 1e-5, 1e-3


def loss_fault(scene: DiffContext) -> Fault | None:
    """Return a fault of the loss that is independent of the loss's inputs; `None` if the records show none.

    Args:
        scene: the scene of the first diff, which comes before the loss.
    """
    try:
        with np.errstate(all="ignore"):
            return _loss_fault(scene)
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None


def _loss_fault(scene: DiffContext) -> Fault | None:
    wrong = [d for d in scene.step if d.pair.stage == "loss" and not d.passed and d.pair.complete]
    # If the inputs differ, so do the labels.
    labels = _labels(scene, wrong) if scene.stage != "input" else None
    if labels is not None:
        return labels
    output_diff = next((d for d in wrong if is_of_loss(d.pair.anchor) and loss_role(d.pair.anchor.slot) == "0"), None)
    logged = next((d for d in wrong if is_loss(d.pair.anchor)), None)
    shown = output_diff or logged
    calls = None if shown is None else calls_of(replace(scene, diff=shown))
    if shown is None or calls is None:
        return None
    reference, candidate = calls
    if reference.loss.function != candidate.loss.function and are_exchangeable(calls):
        return None  # the inputs are of another form
    if reference.settings.get("reduction") != candidate.settings.get("reduction") and _is_scaled(scene, calls):
        return None  # the loop divides the sum by a number of its own
    computed = candidate.computed(
        settings=_settings(calls),
        framework=reference.framework,
        loss=replace(candidate.loss, function=reference.loss.function),
    )
    near = _off(reference.output, reference.computed())
    far = _off(candidate.output, computed)
    if near is None or far is None or near > _NEAR:
        return None
    if far <= _FAR_LOSS:
        return _afterwards(logged, calls)
    recomputed = Recomputed("loss", calls.map(lambda call: call.loss.function), Both(near, far), SIDES.candidate)
    alike = Both(replace(reference, inputs=candidate.inputs, output=computed), candidate)
    cause = loss_cause_of(replace(scene, diff=shown), alike)
    return Fault(shown, cause, recomputed, kind="loss")


def _is_scaled(scene: DiffContext, calls: Both[LossCall]) -> bool:
    """Return True if the loop of a side scales what its loss function gives."""
    steps = scene.sides(scene.number)
    for step, loss in zip(steps or (), calls.map(lambda call: call.loss.function)):
        losses = {o.tensor for call in step.trace.calls if call.function == loss for o in call.outputs}
        scaling = (call for call in step.trace.calls if call.function in ("mul", "div"))
        if any(not losses.isdisjoint(o.tensor for o in call.inputs) for call in scaling):
            return True
    return False


def _settings(calls: Both[LossCall]) -> dict[str, object]:
    return {**calls.reference.settings, "function": calls.reference.loss.function}


def _afterwards(logged: Diff | None, calls: Both[LossCall]) -> Fault | None:
    """Return a fault if one side's loss is a multiple of its loss function's output; else `None`."""
    if logged is None:
        return None
    figures = logged.figures
    outputs = calls.map(lambda call: call.output)
    if figures is None or any(output is None or output.size != 1 for output in outputs):
        return None
    values = [float(output.ravel()[0]) for output in outputs if output is not None]
    if not all(values) or not figures.values.reference:
        return None
    factors = Both(figures.values.reference / values[0], figures.values.candidate / values[1])
    if abs(factors.reference - 1) > _NEAR or abs(factors.candidate - 1) <= _FAR_LOSS:
        return None
    text = (
        f"the candidate's loss is {factors.candidate:.5g} times what its own loss function gives, the reference's is "
        "what the function gives: another factor, or a term that is added"
    )
    return Fault(logged, Cause("loss_scale", text), kind="loss")


def _labels(scene: DiffContext, wrong: list[Diff]) -> Fault | None:
    """Return a fault if labels are the reference's in another order or with a constant offset; else `None`."""
    for diff in wrong:
        if is_of_loss(diff.pair.anchor) and loss_role(diff.pair.anchor.slot) == "labels":
            cause: Cause | None = labels_in_order(replace(scene, diff=diff))
            if cause is not None:
                return Fault(diff, cause, kind="labels")
    return None


def _off(values: np.ndarray | None, computed: np.ndarray | None) -> float | None:
    if values is None or computed is None or values.size != computed.size:
        return None
    norm = float(np.linalg.norm(computed))
    error = float(np.linalg.norm(values.ravel() - computed.ravel())) / norm if norm else None
    return error if error is not None and np.isfinite(error) else None


# Families of causes that may concern a single parameter group; all others concern the whole optimizer.
_OF_GROUPS = frozenset({"learning", "weight"})
# The most hypotheses that are tried to find the parameters of the first cause.
_TRIED = 40


def update_fault(scene: DiffContext, among: Collection[PairPlace] | None = None) -> Fault | None:
    """Return a proven fault of the optimizer that is independent of its gradients; `None` if there is none.

    Args:
        scene: the scene of the first diff, in a step whose updates differ.
        among: the parameters to check. Default: all.
    """
    wrong = [d for d in scene.diffs("update") if not d.passed and d.pair.complete]
    if among is not None:
        wrong = [d for d in wrong if place_of(d.pair) in among]
    if not wrong or any(side.source.sketched for d in wrong for side in d.pair.sides if side is not None):
        return None  # with sketches, only a few small parameters could be checked
    step_diffs = [d for d in scene.step if d.pair.stage != "update" or among is None or place_of(d.pair) in among]
    try:
        cause = explain(replace(scene, diff=wrong[0], step=step_diffs, _pairs={})).cause
    except (PadiffError, OSError):
        return None
    if cause is None or not cause.proven or (among is not None and not families(cause) <= _OF_GROUPS):
        return None
    if cause.kind.count("+") > ("learning" in families(cause)):
        return None  # two settings together may fit a diff that neither of them causes
    return Fault(wrong[0], cause, kind="update")


def unexplained(scene: DiffContext) -> set[PairPlace]:
    """Return the parameters whose updates differ and that the proven cause of the first diff does not cover.

    Args:
        scene: the scene of a first diff that is an update.
    """
    wrong = {place_of(d.pair) for d in scene.diffs("update") if not d.passed and d.pair.complete}
    if not _has_groups(scene):
        return set()  # all parameters are set alike
    explained = _explained(scene)
    if explained is None or not explained:
        return set()
    return {place for place in wrong if f"{place[0]}/update/{place[1]}" not in explained}


def _has_groups(scene: DiffContext) -> bool:
    """Return True if an optimizer has several parameter groups."""
    sides = scene.sides(scene.number)
    if sides is None:
        return False
    settings = sides.zip(scene.runs).map(lambda side: settings_at(side[1].info.settings, side[0].settings))
    return max(len(Optimizers.from_settings(side).groups) for side in settings) > 1


def _explained(scene: DiffContext) -> set[str] | None:
    """Return the sites of the tensors that the first proven hypothesis predicts; `None` if none is proven."""
    try:
        with np.errstate(all="ignore"):
            for hypothesis in _some(scene):
                predictions = list(hypothesis.predict())
                if hypothesis.telling and explains(weigh(predictions), hypothesis):
                    return {prediction.site for prediction in predictions}
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None
    return None


def _some(scene: DiffContext) -> Iterator[Hypothesis]:
    for number, hypothesis in enumerate(optimizers.hypotheses(scene)):
        if number >= _TRIED or isinstance(hypothesis, Cause):
            return
        yield hypothesis
