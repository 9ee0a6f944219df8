"""The likely cause of a diff, guessed from its place, its stage and its values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from padiff.align import Alignment, LayerPair
from padiff.compare.declared.layers import layer_fix
from padiff.compare.diagnose.place import Calls, Place
from padiff.compare.diagnose.settings import cause_around, cause_in_settings
from padiff.compare.diagnose.traced import Graph, call_value, called, calls_text
from padiff.compare.judge.missing_records import whole_stage_missing
from padiff.compare.judge.site_facts import key_of
from padiff.compare.measure.operands import operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.model import equivalents
from padiff.records import (
    LOOP,
    ROOT,
    SIDES,
    Both,
    Cause,
    Diff,
    Difference,
    Kind,
    Layer,
    Pair,
    Problem,
    Record,
    TracedCall,
    is_below,
    is_functional,
)
from padiff.system.frames import Frame
from padiff.system.terminal import first_few

#: Relative spread below which a ratio of two tensors counts as one constant.
CONSTANT = 1e-3
# Fewest numbers of a constant whose differences follow a rule not by chance.
_FEWEST = 4


def values_of(pair: Pair) -> Both[np.ndarray]:
    """Return the values of both sides in one layout, or the projections of their sketches.

    Projections keep the ratios of the tensors' values and the angle between the tensors.

    Raises:
        SketchOnlyError: neither values nor projections are available.
    """
    tensors = operands(pair)
    values = None if isinstance(tensors, Problem) else tensors.values()
    if values is None:
        raise SketchOnlyError(pair.anchor.site)
    return values


def ratio_of(reference: np.ndarray, candidate: np.ndarray) -> float | None:
    """Return the constant ratio of the candidate to the reference; `None` if not constant, or close to 1."""
    r, c = reference.ravel(), candidate.ravel()
    square = float(np.real(np.vdot(r, r)))
    if r.size == 0 or square == 0 or not np.isfinite(c).all() or not np.isfinite(r).all():
        return None
    ratio = float(np.real(np.vdot(r, c))) / square
    residual = float(np.linalg.norm(c - ratio * r))
    if ratio == 0 or residual > CONSTANT * abs(ratio) * math.sqrt(square) or abs(ratio - 1) < 10 * CONSTANT:
        return None
    return ratio


def round_ratio(ratio: float) -> bool:
    """Return True if a ratio, or its inverse, is a whole number that could be a batch size or a number of classes."""
    factor = max(abs(ratio), 1 / abs(ratio))
    return factor < 1e5 and abs(factor - round(factor)) < 1e-4 * factor and round(factor) > 1


def times(ratio: float) -> str:
    return f"{ratio:.5g} times the reference's"


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 1 and a.size == b.size and _agree(np.sort(a, axis=None), np.sort(b, axis=None))


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 0 and bool(np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a))


def masked_apart(reference: np.ndarray, candidate: np.ndarray) -> bool:
    """Return True if both tensors have many zeros, partly at different places, and agree where neither is zero."""
    zeros, others = reference == 0, candidate == 0
    few = 0.02 * reference.size
    if reference.shape != candidate.shape or min(zeros.sum(), others.sum(), (zeros != others).sum()) <= few:
        return False
    return _agree(reference[~zeros & ~others], candidate[~zeros & ~others])


def cause_by_stage(diff: Diff, step: Sequence[Diff], layers: LayerPair | None) -> Cause:
    """Return the likely cause of a diff, from the values of its pair and of its step.

    Args:
        diff: the first diff that did not pass.
        step: the diffs of its step.
        layers: the pair of layers that the diff belongs to; `None` if there is none.

    Raises:
        SketchOnlyError, RunFolderError: the values can no longer be read.
    """
    reference, candidate = values_of(diff.pair)
    stage = diff.pair.stage
    if diff.pair.derived:
        text = "the outputs that this input is computed from agree: the cause is the loop's code between the two models"
        return _unknown(text)
    if stage == "input":
        return _input(reference, candidate)
    if stage == "weight":
        return _weight(diff, reference, candidate, layers)
    if stage == "forward":
        slot = diff.pair.anchor.slot
        kind = slot.partition("()")[0] if is_functional(slot) else layers.reference.kind if layers else ""
        cause = _forward(reference, candidate, kind, layers)
        return _written_between(diff, step, layers) or cause if cause.kind == "unknown" else cause
    ratio = ratio_of(reference, candidate)
    if stage == "loss":
        return _loss(ratio)
    if stage == "backward":
        return _backward(diff, reference, candidate, ratio)
    if stage == "grad":
        return _grad(ratio, step)
    return _update(diff, reference, candidate, ratio, step)


#: Kind of the cause that the loop writes weights between two calls of a step.
BETWEEN_CALLS = "weights_between_calls"


def _written_between(diff: Diff, step: Sequence[Diff], layers: LayerPair | None) -> Cause | None:
    """Return the cause that weights changed between two calls of a step; `None` unless the layer's first call agrees.

    Weights are recorded once in a step: those that the loop writes between two calls show in outputs only.
    """
    first = diff.pair.anchor
    if layers is None or not layers.reference.parameters or not first.call:
        return None
    before = [
        other
        for other in step
        if other.pair.stage == "forward"
        and (other.pair.anchor.layer, other.pair.anchor.slot) == (first.layer, first.slot)
        and other.pair.anchor.call < first.call
    ]
    if not before or not all(other.compared and other.passed for other in before):
        return None
    text = "the step's calls before agree, and all inputs of this one: the loop writes other weights between the calls"
    return Cause(BETWEEN_CALLS, text)


def _input(reference: np.ndarray, candidate: np.ndarray) -> Cause:
    if same_values(reference, candidate) and not np.array_equal(reference, candidate):
        return Cause("input_order", "the same values in another order: shuffling, or another layout of the batch")
    ratio = ratio_of(reference, candidate)
    if ratio is not None:
        return Cause("input_scale", f"the inputs are {times(ratio)}: another normalisation")
    return Cause("other_batch", "other batches: other samples, or the same prepared otherwise")


def _weight(diff: Diff, reference: np.ndarray, candidate: np.ndarray, layers: LayerPair | None) -> Cause:
    slot = equivalents.slot(diff.pair.anchor.slot)
    if diff.pair.step == 0:
        if layers is not None and _is_table(layers.reference, diff.pair.anchor.slot):
            text = "a table that the model makes itself, where a checkpoint does not hold it, is made otherwise"
            return Cause("other_table", text)
        if reference.ndim == 2 and reference.shape[0] == reference.shape[1] and np.allclose(reference, candidate.T):
            text = "the matrix is transposed: carried over without regard to (in, out) against (out, in)"
            return Cause("weight_transposed", text)
        text = "the runs start from different weights: copy them over (or load one checkpoint) before training"
        return Cause("start_weights", text)
    if slot.startswith("running_"):
        text = "the layers' running statistics are fed differently (momentum, other batches, train or eval mode)"
        return Cause("running_statistics", text)
    return _unknown("the weights differ by more than the updates of previous steps explain")


def _is_table(layer: Layer, slot: str) -> bool:
    """Return True if a slot is a buffer that training does not change, such as frequencies, positions or a mask."""
    roles = {p.slot: p.role for p in layer.parameters}
    return roles.get(slot) == "buffer" and not equivalents.slot(slot).startswith("running_")


def _forward(reference: np.ndarray, candidate: np.ndarray, kind: str, layers: LayerPair | None) -> Cause:
    drops = "dropout" in kind and not _drops_nothing(layers)
    if drops or ("dropout" not in kind and "pool" not in kind and masked_apart(reference, candidate)):
        text = "dropout: each run draws its own random mask; train with rate 0 (or record in eval mode) to compare"
        return Cause("dropout", text)
    ratio = ratio_of(reference, candidate)
    if ratio is not None:
        return Cause("output_scale", f"the output is {times(ratio)}")
    if reference.ndim > 1 and same_values(reference, candidate):
        text = "the same values in another order: another layout, axis or interpolation of indices"
        return Cause("output_order", text)
    kinds = Both("", "") if layers is None else Both(layers.reference, layers.candidate).map(equivalents.kind)
    if kinds.reference != kinds.candidate and equivalents.same_family(*kinds):
        return Cause("layer_kind", f"the candidate has a layer `{kinds.candidate}`, the reference `{kinds.reference}`")
    return _unknown("all inputs agree: the cause is inside this layer")


def _loss(ratio: float | None) -> Cause:
    # Two numbers always have a ratio; only a round ratio points to another reduction.
    if ratio is not None and round_ratio(ratio):
        text = f"the loss is {times(ratio)}: another reduction (mean, sum), weighting or scaling"
        return Cause("loss_scale", text)
    return _unknown("the model's outputs agree: the cause is the loss function or the labels of this batch")


def _backward(diff: Diff, reference: np.ndarray, candidate: np.ndarray, ratio: float | None) -> Cause:
    anchor = diff.pair.anchor
    if anchor.layer == ROOT and reference.size == candidate.size == 1 and ratio is not None:
        return weight_in_loss(diff)
    if ratio is not None:
        return Cause("gradient_scale", f"the gradient is {times(ratio)}")
    return _unknown("forward agrees here: the cause is in the backward of a later layer, or of the loss")


def weight_in_loss(diff: Diff) -> Cause:
    """Return the cause that a scalar output has another weight in the loss, given the diff of its gradient.

    Raises:
        SketchOnlyError, RunFolderError: the values can no longer be read.
    """
    weights = [float(side.reshape(-1)[0]) for side in values_of(diff.pair)]
    text = (
        f"the weight of `{diff.pair.anchor.slot}` in the loss is {weights[1]:.4g} for the reference's {weights[0]:.4g}"
    )
    return Cause("loss_term_weight", text, values=Both(*weights))


# The most gradients that differ in another way than all others.
_APART = 3


def _unknown(where: str) -> Cause:
    """Return a cause of kind ``unknown`` that names the place to look at."""
    return Cause("unknown", f"unknown; {where}")


def _drops_nothing(layers: LayerPair | None) -> bool:
    """Return True if both dropout layers have rate 0."""
    return layers is not None and layers.reference.settings.get("p") == layers.candidate.settings.get("p") == 0


def _grad(ratio: float | None, step: Sequence[Diff]) -> Cause:
    grads = [d for d in step if d.pair.stage == "grad" and d.compared and d.figures and d.figures.reference_l2 > 0]
    if ratio is not None and len(grads) > 1:
        largest = max(d.figures.reference_l2 / d.figures.size**0.5 for d in grads if d.figures)
        # Gradients of pure noise (a bias before a normalisation) follow no ratio.
        sizes = [
            d.figures.candidate_l2 / d.figures.reference_l2
            for d in grads
            if d.figures and d.figures.reference_l2 / d.figures.size**0.5 > 1e-4 * largest
        ]
        if np.ptp(sizes) <= CONSTANT * abs(np.mean(sizes)):
            return Cause("gradient_scale", f"all gradients are {times(ratio)}")
    factors = [(d, d.figures.candidate_l2 / d.figures.reference_l2) for d in grads if d.figures]
    factors = [each for each in factors if each[0].pair.anchor.layer != LOOP]
    common = float(np.median([factor for _, factor in factors])) if factors else 0.0
    apart = [d for d, factor in factors if abs(factor - common) > CONSTANT * common]
    if ratio is not None and 0 < len(apart) <= _APART < len(factors) / 2 and abs(common - ratio) <= CONSTANT * common:
        names = first_few([f"`{d.pair.anchor.layer}/{d.pair.anchor.slot}`" for d in apart], _APART)
        text = f"all gradients but {names} are {times(ratio)}, as if clipped together: {names} differs in another way"
        return Cause("gradient_apart", text)
    if ratio is not None:
        return Cause("gradient_scale", f"the gradient is {times(ratio)}")
    if not any(d.pair.stage == "backward" for d in step):
        return _unknown(
            "no gradient of an output is recorded: the cause lies in the code up to the backward, or after it"
        )
    return _unknown("gradients of outputs agree: the cause lies between the backward and the optimizer")


def _update(
    diff: Diff, reference: np.ndarray, candidate: np.ndarray, ratio: float | None, step: Sequence[Diff]
) -> Cause:
    rates = _rates(step)
    if rates is not None:
        return rates
    if ratio is not None:
        return Cause("update_scale", f"the update is {times(ratio)} at the same gradient and learning rate")
    weight = next((d for d in step if d.pair.stage == "weight" and d.compared and key_of(d) == key_of(diff)), None)
    if weight is not None:
        values, _ = values_of(weight.pair)
        difference = (candidate - reference).ravel()
        norm = float(np.linalg.norm(values) * np.linalg.norm(difference))
        if norm and abs(np.vdot(values.ravel(), difference)) > 0.99 * norm:
            text = "the updates differ by a multiple of the weight: weight decay"
            return Cause("weight_decay", text)
    return _unknown("the gradients agree: the cause is in the optimizer's step")


def _rates(step: Sequence[Diff]) -> Cause | None:
    """Return the cause that the learning rates of a step differ between the runs, by parameter group."""
    rates: Both[list[float]] = Both([], [])
    equal = True
    for diff in step:
        if diff.pair.anchor.layer == LOOP and diff.pair.stage == "update" and diff.figures is not None:
            equal = equal and diff.compared and diff.passed
            for side, record, value in zip(rates, diff.pair.sides, diff.figures.values):
                if record is not None:
                    side.append(value)
    texts = rates.map(lambda side: [f"{rate:.6g}" for rate in side])
    # A group of one run may be several groups with the same rate in the other.
    if equal or not all(texts) or set(texts.reference) == set(texts.candidate):
        return None
    by_group = " (by parameter group)" if max(map(len, texts)) > 1 else ""
    text = f"the learning rates differ: {' against '.join(map(', '.join, texts))}{by_group}"
    return Cause("learning_rate", text, values=rates)


# Up to this many calls that only one side makes count as a missing or a surplus call. More calls mean that the code is
# written in another way.
_FEW = 3
_CAST = "cast"


def cause_in_place(place: Place) -> Cause | None:
    """Return the likely cause of a diff that a call of the layer's code shows, or random dropping of values; else
    `None`.

    Args:
        place: where in the code the diff comes from.
    """
    if place.between and place.diff.problem is None and _is_dropout(place):
        text = "dropout: each run draws its own random mask; train with rate 0 (or record in eval mode) to compare"
        return Cause("dropout", text)
    if place.calls is None:
        return None
    if place.diff.pair.stage == "input" and place.calls.slots is not None and place.calls.same is not None:
        return _other_operand(place, place.calls.same)
    cause = _overwritten(place) or cause_of_calls(place.calls)
    return _with_numbers(cause, place) if cause is not None and cause.kind == "call_input" else cause


def _with_numbers(cause: Cause, place: Place) -> Cause:
    """Return the cause that an input of a call differs, with how its numbers differ if that is simple."""
    calls = place.calls
    if calls is None or calls.same is None or calls.slots is None or place.graphs is None:
        return cause
    sides = []
    for call, slot, graph in zip(calls.same, calls.slots, place.graphs):
        tensor = next((operand.tensor for operand in call.inputs if operand.slot == slot), None)
        values = None if tensor is None else graph.values(tensor)
        if values is None:
            return cause
        sides.append(values)
    text = _numbers_text(*sides)
    return replace(cause, sentence=f"{cause.sentence.rpartition(': ')[0]}: {text}") if text else cause


def _numbers_text(reference: np.ndarray, candidate: np.ndarray) -> str:
    """Return how the numbers of a constant differ, in words; empty if that is not simple."""
    if reference.shape != candidate.shape or reference.size < _FEWEST or reference.dtype.kind not in "fiu":
        return ""
    first, second = reference.astype(np.float64).ravel(), candidate.astype(np.float64).ravel()
    with np.errstate(all="ignore"):
        bases = [_base(side) for side in (first, second)]
        if None not in bases:
            return f"powers of {bases[1]:.6g} for powers of the reference's {bases[0]:.6g} (frequencies by their base)"
        ratio, offset = second / first, second - first
    if np.allclose(ratio, ratio[0], 1e-5):
        return f"numbers that are {ratio[0]:.6g} times the reference's"
    if np.allclose(offset, offset[0], 1e-5, 1e-6 * float(np.abs(first).max())):
        return f"numbers that are larger by {offset[0]:.6g}"
    if np.array_equal(np.sort(first), np.sort(second)):
        return "the same numbers in another order"
    return ""


def _base(values: np.ndarray) -> float | None:
    """Return the base of ``n`` numbers ``base ** (-k / n)``, as of rotary or sinusoidal positions; else `None`."""
    if values[0] != 1 or not (values > 0).all():
        return None
    slopes = -np.log(values)[1:] / np.arange(1, len(values))
    return float(np.exp(slopes[-1] * len(values))) if np.allclose(slopes, slopes[-1], 1e-4) and slopes[-1] else None


def _other_operand(place: Place, calls: Both[TracedCall]) -> Cause:
    """Return the likely cause of an input of the model that the loop computes from other numbers."""
    goes_in = f"what goes into {called(calls.reference)} in the loop differs"
    assert place.graphs is not None and place.ends is not None
    graph, size = place.graphs.reference, place.graphs.reference.size(place.ends.reference)
    computed = place.computed.reference
    made = [call for call in graph.trace.calls if {operand.tensor for operand in call.outputs} & computed]
    leaves = {operand.tensor for call in made for operand in call.inputs} - computed
    if sum(graph.size(leaf) >= size for leaf in leaves) > 1:
        text = f"other samples, or other random numbers: {goes_in}"
        return Cause("other_numbers", text, lines=calls.map(lambda call: call.line))
    return Cause("other_batch", f"other batches: other samples, as {goes_in}")


def exchanged_inputs(place: Place) -> Cause | None:
    """Return the cause that a layer takes another input of the model than the reference's does; else `None`."""
    if not place.is_given or place.graphs is None or place.ends is None:
        return None
    calls = place.graphs.map(lambda graph: graph.layers[ROOT, place.diff.pair.anchor.call])
    slots = calls.zip(place.ends).map(lambda side: [operand.tensor for operand in side[0].inputs].index(side[1]))
    names = calls.zip(slots).map(lambda side: side[0].inputs[side[1]].slot.removeprefix("input."))
    counts = calls.map(lambda call: len(call.inputs))
    if counts.reference != counts.candidate or slots.reference == slots.candidate:
        return None
    partner = place.graphs.candidate.values(calls.candidate.inputs[slots.reference].tensor)
    expected = place.graphs.reference.values(place.ends.reference)
    if partner is None or expected is None or not np.array_equal(partner, expected):
        return None
    text = (
        f"`{place.diff.pair.anchor.layer}` takes the model's input {slots.candidate + 1} (`{names.candidate}`), in the "
        f"reference input {slots.reference + 1} (`{names.reference}`): inputs are exchanged"
    )
    return Cause("inputs_exchanged", text, True, "the inputs of the model agree, each with its partner")


def where_in_code(place: Place, excluded: tuple[str, ...] = ()) -> Cause | None:
    """Return an unproven cause that names the code to read, for a diff that neither a call nor a hypothesis explains.

    Args:
        place: where in the code the diff comes from.
        excluded: hypotheses that were tried and ruled out.

    Returns:
        The cause, of kind ``unknown``; `None` if the traces do not narrow down the code.
    """
    if place.calls is not None and max(map(len, place.calls.only)) <= 2 * _FEW:
        texts = place.calls.only.map(lambda some: calls_text(some) if some else "nothing")
        calls = f"the reference calls {texts.reference} there, the candidate {texts.candidate}"
        return Cause("unknown", f"unknown; {calls}", excluded=excluded)
    if not place.between:
        return None
    uncalled = _called_by_one(place)
    if uncalled is not None:
        return replace(uncalled, excluded=excluded)
    where = "before this layer" if place.inside is False else "of this layer, after those inside of it"
    text = f"unknown; the code {where}: what it adds, scales or masks, and which tensors it hands on"
    return Cause("unknown", text, excluded=excluded)


def _called_by_one(place: Place) -> Cause | None:
    """Return the cause that one side never calls a layer that both models have; `None` unless these are few.

    Layers of lists do not count: experts are called if a row chooses them.
    """
    if place.graphs is None or place.ends is None:
        return None
    common = place.graphs.reference.paths & place.graphs.candidate.paths
    called = place.graphs.map(lambda graph: {path for path, _ in graph.layers if not path.split(".")[-1].isdigit()})
    only = called.zip(called.swapped()).map(lambda side: sorted((side[0] - side[1]) & common))
    if all(only) or not 0 < max(map(len, only)) <= _FEW:
        return None
    side, paths = ("reference", only.reference) if only.reference else ("candidate", only.candidate)
    return Cause("uncalled_layer", f"only the {side} calls {', '.join(f'`{path}`' for path in paths)}")


def _overwritten(place: Place) -> Cause | None:
    """Return the cause that one side's call takes what a layer gives, where the other's takes what goes into it.

    If the layer stands inside of one that does not return its output, the layer has overwritten its input.
    """
    graphs, both = place.graphs, None if place.calls is None else place.calls.same
    if graphs is None or both is None:
        return None
    for side, other in (SIDES.swapped(), SIDES):
        graph, call, partner = getattr(graphs, side), getattr(both, side), getattr(both, other)
        for operand in call.inputs:
            maker = graph.producers.get(operand.tensor)
            if maker is None or maker.function or not maker.inputs or not is_below(maker.layer, call.layer):
                continue
            before, after = (graph.values(tensor) for tensor in (maker.inputs[0].tensor, operand.tensor))
            theirs = [getattr(graphs, other).values(o.tensor) for o in partner.inputs]
            if before is None or after is None or not any(_is_near(before, each) for each in theirs):
                continue
            if any(_is_near(after, each) for each in theirs):
                continue  # the other side's call takes it, too
            counts = Counter(path for path, _ in graph.layers)
            hidden = any(
                is_below(maker.layer, path) and is_below(path, call.layer) and counts[path] == counts[maker.layer]
                for (path, _), around in graph.layers.items()
                if path != maker.layer and all(o.tensor != operand.tensor for o in around.outputs)
            )
            what = f"`{maker.layer}` ({maker.layer_type})"
            text = (
                f"in the {side}, {what} overwrites its input in place: {called(call)} then takes what it gives, the "
                f"{other}'s what goes into it"
                if hidden
                else f"{called(call)} takes what {what} gives in the {side}, the {other}'s what goes into it: it "
                "overwrites its input in place, or the code hands on its output"
            )
            fix = f"nn.{maker.layer_type}(inplace=False)" if hidden and side == SIDES.candidate else ""
            return Cause(
                "in_place",
                text,
                hidden,
                "the other tensors that go in agree" * hidden,
                fix,
                values=Both("", maker.layer),
            )
    return None


def _is_near(values: np.ndarray, others: np.ndarray | None) -> bool:
    """Return True if two tensors agree, up to rounding."""
    if others is None or values.shape != others.shape or values.dtype.kind != "f":
        return False
    return bool(np.linalg.norm(values - others) <= CONSTANT * np.linalg.norm(values))


def _is_dropout(place: Place) -> bool:
    if place.graphs is not None:
        calls = [call for graph in place.graphs for call in graph.trace.calls]
        draws = any("dropout" in (call.function or call.layer_type).lower() for call in calls)
        if not draws and any(call.chooses for call in calls):
            return False  # what the code chooses is zero elsewhere, too: a capacity, a hard mask
    try:
        return masked_apart(*values_of(place.diff.pair))
    except (RunFolderError, SketchOnlyError):
        return False


def cause_of_calls(calls: Calls) -> Cause | None:
    """Return the likely cause that calls of both sides' code show; `None` if they show none."""
    both = calls.same
    if both is None:
        return _one_sided(calls.only)
    if calls.slots is not None:
        slots = calls.slots
        names = f"`{slots.reference}`" + (f" (`{slots.candidate}`)" if slots.candidate != slots.reference else "")
        text = f"{called(both.reference)} takes another {names}: another layer's output, a mask or a constant"
        return Cause("call_input", text, lines=both.map(lambda call: call.line))
    if calls.shapes is not None:
        shapes = calls.shapes.map(lambda shape: f"({', '.join(map(str, shape))})")
        text = f"{both.candidate.function}() gives a tensor of shape {shapes.candidate} for the reference's"
        return Cause("call_shape", f"{text} {shapes.reference}", lines=both.map(lambda call: call.line))
    texts, lines = both.map(called), both.map(lambda call: call.line)
    if calls.given_otherwise:
        text = f"{texts.reference} against {texts.candidate}, though the same goes in"
        return Cause("call_arguments", text, lines=lines, values=both.map(lambda call: (call_value(call),)))
    return Cause("call", f"{texts.reference} gives something else, though the same goes in", lines=lines)


def _one_sided(only: Both[tuple[TracedCall, ...]]) -> Cause | None:
    calls = only.reference or only.candidate
    # Casts are left to the hypotheses, which compute the rounding to another dtype.
    if all(only) or len(calls) > _FEW or all(call.function == _CAST for call in calls):
        return None
    texts = only.map(calls_text)
    if not only.candidate:
        values = only.map(lambda calls: tuple(map(call_value, calls)))
        return Cause("missing_call", f"only the reference calls {texts.reference} there", values=values)
    text = f"only the candidate calls {texts.candidate} there"
    return Cause("surplus_call", text, lines=Both(None, only.candidate[0].line))


def recorded_cause(
    diff: Diff,
    step: Sequence[Diff],
    alignment: Alignment,
    declared: Sequence[Difference],
    place: Place,
    framework: str,
) -> Cause | None:
    """Return the cause of a diff if the records of its step show it; else `None`.

    Args:
        diff: the first diff that did not pass.
        step: the diffs of its step.
        alignment: the pairs of layers and parameters.
        declared: the settings that differ between the runs in this step.
        place: where in the code the diff comes from.
        framework: the candidate's framework.
    """
    pair = diff.pair
    by_settings = cause_in_settings(pair, declared) if place.inside is not False else cause_around(place, declared)
    if not pair.complete:
        return by_settings or _missing(diff, step)
    shapes = diff.problem is not None and diff.problem.kind is Kind.SHAPES
    if by_settings and (not diff.problem or shapes):
        return by_settings
    if shapes and pair.stage == "input":
        return _input_shape(diff)
    if shapes and place.inside is not False:
        return Cause("sizes", "the layers have other sizes, or the tensor another layout")
    if diff.problem and place.inside is not False:
        return Cause("overflow", "an overflow, a division by zero or a log of zero on one side")
    by_axes = _axis_of_batch(_layers(pair, alignment), place, framework)
    if by_axes is not None:
        return by_axes
    if any(place.lone):
        return _lone_input(pair.anchor.layer, place)
    at_input = place.diff
    of_model = place.calls is not None and any(call.layer != LOOP for side in place.calls.only for call in side)
    is_given = place.inside is False and at_input.pair.complete and not place.last_agreeing and not of_model
    if is_given and at_input.problem is not None and at_input.problem.kind is Kind.SHAPES:
        return _input_shape(at_input)
    surplus = _surplus(step, alignment) if pair.stage not in ("input", "weight") else ""
    return Cause("surplus_layers", surplus) if surplus else _other_layer(place, alignment) or cause_in_place(place)


def _input_shape(diff: Diff) -> Cause:
    shapes = diff.pair.sides.map(lambda record: record and f"({', '.join(map(str, record.shape))})")
    text = f"`{diff.pair.anchor.layer}` is called with a tensor of shape {shapes.candidate}, in the reference "
    return Cause("input_shape", f"{text}{shapes.reference}")


def _other_layer(place: Place, alignment: Alignment) -> Cause | None:
    """Return the cause that the candidate calls another layer than the partner of the reference's; else `None`."""
    both = None if place.calls is None or place.calls.slots or place.calls.shapes else place.calls.same
    if both is None or both.reference.function or both.candidate.function:
        return None
    partners = {pair.reference.path: pair.candidate.path for pair in alignment.pairs}
    if partners.get(both.reference.layer) in (None, both.candidate.layer):
        return None
    return other_network(both.map(lambda call: call.layer), both.map(lambda call: call.line))


def other_network(layers: Both[str], lines: Both[Frame | None], evidence: str = "") -> Cause:
    """Return the cause that the candidate calls one layer where the reference calls another one, no partner of it."""
    text = (
        f"the candidate calls `{layers.candidate}` where the reference calls `{layers.reference}`, with the same input"
    )
    return Cause("model", text, bool(evidence), evidence, lines=lines)


def guess(diff: Diff, step: Sequence[Diff], alignment: Alignment, excluded: tuple[str, ...]) -> Cause | None:
    """Return the likely cause of a diff that no hypothesis explains, judged by the values of its stage.

    Args:
        diff: the first diff that did not pass.
        step: the diffs of its step.
        alignment: the pairs of layers and parameters.
        excluded: hypotheses that were tried and ruled out.

    Returns:
        The cause; `None` if one side's record is missing or the values can no longer be read.
    """
    if not diff.pair.complete:
        return None
    try:
        cause = cause_by_stage(diff, step, _layers(diff.pair, alignment))
    except (RunFolderError, SketchOnlyError):
        return None  # the values can't be read any more; the figures remain valid
    return replace(cause, excluded=excluded)


def _layers(pair: Pair, alignment: Alignment) -> LayerPair | None:
    return next((p for p in alignment.pairs if p.reference.path == pair.anchor.layer), None)


def _surplus(step: Sequence[Diff], alignment: Alignment) -> str:
    """Return a text that names layers with parameters that ran on one side and are absent on the other; else empty."""
    ran = [d.pair.anchor.layer for d in step if d.pair.stage == "forward" and not d.compared]
    described = []
    for name, other_side, surplus in zip(SIDES, SIDES.swapped(), alignment.surplus):
        paths = [p for p in surplus if any(r == p or r.startswith(f"{p}.") for r in ran)]
        if paths:
            described.append(f"the {name} has layers that the {other_side} has not: {first_few(paths, 3)}")
    return "; ".join(described)


def _lone_input(layer: str, place: Place) -> Cause:
    side, other = SIDES if place.lone.reference else SIDES.swapped()
    slots = [slot.removeprefix("input.") for slot in place.lone.reference or place.lone.candidate]
    names = " and ".join(f"`{name}`" for name in slots[:3])
    text = f"the {side} gives `{place.around or layer}` {names}, the {other} does not: a state, a mask or positions"
    if not place.around or place.graphs is None:
        return Cause("lone_input", text)
    calls = place.graphs.map(lambda graph: graph.layers.get((place.around, 0)))
    return Cause("lone_input", text, lines=calls.map(lambda call: None if call is None else call.line))


def _axis_of_batch(layers: LayerPair | None, place: Place, framework: str) -> Cause | None:
    """Return the cause that a recurrent layer takes another axis of its input as the batch than its partner."""
    first = layers.map(lambda layer: layer.settings.get("batch_first")) if layers is not None else Both(None, None)
    if layers is None or place.graphs is None or place.inside is False or None in first:
        return None
    shapes = place.graphs.zip(place.diff.pair.sides).map(lambda side: _shape_of_input(*side))
    reference, candidate = shapes
    differs = first.reference != first.candidate
    # A square may be meant either way: the setting tells.
    swapped = candidate == (*reference[1::-1], *reference[2:]) and not (differs and reference == candidate)
    if len(reference) != 3 or swapped is (reference == candidate) or swapped is differs:
        return None
    axes, paths = Both("sequence", "batch"), layers.map(lambda layer: layer.path)
    first_axis, second_axis = axes.swapped() if first.candidate else axes
    name, partner = paths.candidate, paths.reference
    if swapped:
        text = f"`{name}` takes the {first_axis} first, and gets the {second_axis} first: {candidate} for {reference}"
    else:
        text = f"`{name}` takes the {first_axis} first, `{partner}` the {second_axis}: both get {candidate}"
    return Cause("layer_setting", text, fix=layer_fix(framework, layers.candidate, "batch_first", not first.candidate))


def _shape_of_input(graph: Graph, record: Record | None) -> tuple[int, ...]:
    call = graph.of_record(record) if record is not None else None
    return graph.trace.tensors[call.inputs[0].tensor].shape if call is not None and call.inputs else ()


def _missing(diff: Diff, step: Sequence[Diff]) -> Cause | None:
    pair = diff.pair
    side, _ = SIDES.swapped() if pair.candidate is None else SIDES
    if pair.stage in ("forward", "backward") and whole_stage_missing(diff, step):
        if pair.stage == "forward":
            return Cause("not_called", f"the {side}'s model was not called in this step, as it was in others")
        if pair.stage == "backward":
            return Cause("no_backward", f"no backward ran on the {side} in this step, as it did in others")
    if pair.stage == "weight":
        return Cause("not_owned", f"the {side}'s layer does not own this tensor")
    if pair.stage in ("grad", "update"):
        text = f"on the {side} the parameter gets no gradient: frozen, detached, unused, or not in its optimizer"
        return Cause("no_gradient", text)
    return None
