"""Hypotheses on changes of gradients between the backward and the optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from padiff.align import LayerPair
from padiff.compare.diagnose.hypotheses import parameter_history, transforms
from padiff.compare.diagnose.hypotheses.diff_context import (
    DiffContext,
    PairPlace,
    is_elements,
    like,
    place_of,
    rounding_of,
    values_of,
    whole_of,
)
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.place import graphs_of
from padiff.compare.diagnose.traced import slope_of
from padiff.model import equivalents
from padiff.pair.joined_calls import calls_of, is_joined
from padiff.records import LOOP, ROOT, SIDES, Both, Cause, Diff, Pair, Record, Step, TracedCall
from padiff.system.frames import Frame
from padiff.system.terminal import first_few

#: Most elements of a gradient that are compared.
LOOKED_AT = 2048
#: Difference of the gradients of two correct implementations: a multiple of the difference of the outputs' gradients,
#: at least a count of rounding units, and at most the share of the tensor above which a gradient shows nothing.
_OF_OUTPUTS, _ROUNDINGS, AT_MOST = 4.0, 32.0, 1e-3
# Share of the largest gradient of a bias below which another one is rounding noise. Chosen.
_TINY = 1e-5
#: Fewer rounding units for 16-bit numbers, as sums are computed in float32. Measured: gradients of a tiny LLaMA in
#: bfloat16 are off by 0.012 at most, three rounding units.
_SHORT, _OF_SHORT = 2.0**-12, 8.0


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step, as the optimizers received them.

    Attributes:
        stage: ``grad``, or ``backward`` for gradients of outputs.
        tensors: gradients with values on both sides; `Prediction.without` holds the reference's.
        places: place of the parameter or output of each gradient.
        elements: True for each gradient with elements, False for one with projections.
        failed: True for each gradient that did not pass.
        norms: norms of each whole tensor on both sides, by place.
    """

    stage: str
    tensors: tuple[Prediction, ...]
    places: tuple[PairPlace, ...]
    elements: tuple[bool, ...]
    failed: tuple[bool, ...]
    norms: Mapping[PairPlace, Both[float]]

    @property
    def wrong(self) -> list[Prediction]:
        """Return the gradients that did not pass; an empty list if none passed."""
        wrong = [tensor for tensor, failed in zip(self.tensors, self.failed) if failed]
        return [] if len(wrong) == len(self.tensors) else wrong

    def named(self, tensors: Sequence[Prediction]) -> str:
        """Return the names of gradients as text that follows "the gradients"."""
        names = list(dict.fromkeys(tensor.site.replace(f"/{self.stage}/", "/") for tensor in tensors))
        return f" of {first_few(names, 3)}"

    @property
    def all_norms(self) -> Both[float]:
        """Return the norm of all gradients together, on each side."""
        sides = Both([n.reference for n in self.norms.values()], [n.candidate for n in self.norms.values()])
        return sides.map(lambda norms: float(np.sqrt(np.sum(np.square(norms)))))


def gradients_of(scene: DiffContext, stage: str = "grad") -> Gradients:
    """Return the gradients of the first diff's step; for the stage ``backward`` the gradients of outputs."""
    diffs = [d for d in scene.diffs(stage) if d.figures is not None and d.pair.complete]
    level = noise_level(scene)
    scales: dict[str, float] = {}
    for diff in diffs:
        scales[diff.pair.anchor.layer] = max(scales.get(diff.pair.anchor.layer, 0.0), _rms(diff))
    tensors, places, elements, failed = [], [], [], []
    for diff in sorted(diffs, key=lambda d: -(d.figures.size if d.figures else 0)):
        values = values_of(diff.pair, LOOKED_AT)
        if values is None or np.iscomplexobj(values.reference):
            continue
        sketched = diff.figures is not None and diff.figures.basis != "tensors"
        size = float(np.sqrt(np.mean(np.square(values.reference)))) if values.reference.size else 0.0
        # A gradient that is zero up to rounding has the rounding errors of the layer's other gradients.
        noise = level * max(size, 0.0 if sketched else scales[diff.pair.anchor.layer])
        if noise > 0:
            limit = scene.limit(diff.pair)
            site = f"{diff.pair.anchor.layer}/{stage}/{diff.pair.anchor.slot}"
            tensors.append(Prediction(site, values.candidate, values.reference, values.reference, noise, limit))
            places.append(place_of(diff.pair))
            elements.append(is_elements(diff.pair))
            failed.append(not diff.passed)
    norms = {
        place_of(d.pair): Both(d.figures.reference_l2, d.figures.candidate_l2)
        for d in scene.step
        if d.pair.stage == stage and d.figures is not None and d.pair.anchor.layer != "(loop)"
    }
    return Gradients(stage, tuple(tensors), tuple(places), tuple(elements), tuple(failed), norms)


def noise_level(scene: DiffContext) -> float:
    """Return the largest expected relative difference of the gradients of two correct implementations.

    Estimated from the passed diffs of outputs and of their gradients.
    """
    errors = [d.figures.rel_l2 for d in scene.diffs("backward", "forward") if d.passed and d.figures is not None]
    rounding = max((rounding_of(d.pair) for d in scene.diffs("forward", "grad")), default=2.0**-24)
    outputs = float(np.percentile([e for e in errors if math.isfinite(e)] or [0.0], 90))
    roundings = (_ROUNDINGS if rounding < _SHORT else _OF_SHORT) * rounding
    return min(max(_OF_OUTPUTS * outputs, roundings), max(AT_MOST, roundings))


def _rms(diff: Diff) -> float:
    figures = diff.figures
    return figures.reference_l2 / math.sqrt(figures.size) if figures is not None and figures.size else 0.0


# -- the terms of a gradient ----------------------------------------------------------------------------------------


#: The backwards of a layer's calls: number of the step, of the call, and the slot of the output.
_Backwards = dict[tuple[int, int, str], np.ndarray]


# The axis of an output that a bias is added along, by the kind of the layer or its group.
_CHANNELS = {"linear": -1, "conv": 1, "layernorm": -1, "groupnorm": 1, "batchnorm1d": 1, "batchnorm2d": 1}


def bias_sums(scene: DiffContext, number: int, update: int = 0) -> list[tuple[Pair, Both[_Backwards]]]:
    """Return gradients of biases, each with the sums of its output's gradients over each backward of the layer.

    The sums show the gradient as the backward computed it, before clipping or scaling changed it for the optimizer.

    Args:
        number: the step.
        update: the number of the update in the step that the gradients are of.
    """
    kinds = {p.reference.path: equivalents.kind(p.reference) for p in scene.alignment.pairs}
    kinds = {path: kind if kind in _CHANNELS else equivalents.group_of_kinds(kind) for path, kind in kinds.items()}
    steps = scene.sides(number)
    rows = []
    for (layer, slot, call), pair in scene.pairs(number, "grad").items():
        axis = _CHANNELS.get(kinds.get(layer, ""))
        if steps is None or call != update or equivalents.slot(slot) != "bias" or axis is None:
            continue
        sums = Both(*(_summed(step, record, axis) for step, record in zip(steps, pair.sides)))
        if all(sums):
            rows.append((pair, sums))
    return rows


def _summed(step: Step, bias: Record | None, axis: int) -> _Backwards:
    """Return the sums that make a bias's gradient; empty if an output's gradient is a sketch, or has another form."""
    sums = {}
    for record in step.records:
        if bias is None or record.stage != "backward" or record.layer != bias.layer:
            continue
        if record.source.sketched or len(record.shape) < 2 or (record.shape[axis],) != bias.shape:
            return {}
        axes = tuple(k for k in range(len(record.shape)) if k != axis % len(record.shape))
        sums[step.number, record.call, record.slot] = np.asarray(record.value.astype(np.float64).sum(axis=axes))
    return sums


def made_of(scene: DiffContext, number: int) -> Both[float | None]:
    """Return each side's ratio of the optimizer's gradients to the backward's; `None` if not constant or unknown."""
    rows = bias_sums(scene, number)
    ratios: list[float | None] = []
    for side in SIDES:
        above = below = error = 0.0
        pairs = []
        for pair, sums in rows:
            gradients = whole_of(pair)
            if gradients is not None:
                pairs.append((getattr(gradients, side).ravel(), sum(getattr(sums, side).values())))
        for got, gave in pairs:
            above, below = above + float(got @ gave), below + float(gave @ gave)
        ratio = above / below if below > 0 else None
        if ratio is not None:
            error = sum(float(np.sum(np.square(got - ratio * gave))) for got, gave in pairs)
            total = sum(float(np.sum(np.square(got))) for got, _ in pairs)
            ratio = ratio if error <= AT_MOST**2 * total else None
        ratios.append(ratio)
    return Both(*ratios)


# Most steps before this one that a stale gradient may come from.
_BEFORE = 4
# Largest relative difference of two tensors' ratios to the reference that count as equal.
_SAME_RATIO = 1e-4


def backward_hypotheses(scene: DiffContext) -> Iterator[Hypothesis | Cause]:
    """Yield hypotheses on a first diff in the gradients of outputs, or in the loss."""
    gradients = gradients_of(scene, "backward")
    yield from _at_zero(scene)
    yield from _calls(scene)
    if not gradients.tensors:
        return
    yield from _of_micro_batches(scene)
    # Other outputs' gradients, and those of the steps before, agree: no call of the loop is left out or added.
    later = scene.number > next(iter(scene.numbers), scene.number)
    for hypothesis in _ratios(scene, gradients, "gradients of outputs"):
        text = f"{hypothesis.sentence}, from this step on: the weight of the terms of the loss that they come from"
        yield replace(hypothesis, sentence=text) if later and hypothesis.changes > 1 else hypothesis


def _at_zero(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis that a leaky ReLU gets exact zeros, where torch's slope is that below zero, paddle's 1."""
    sides, gradient = scene.sides(scene.number), whole_of(scene.diff.pair)
    layer, slot, call = place_of(scene.diff.pair)
    output = scene.pairs(scene.number, "forward").get((layer, slot.partition("@")[0], call))
    values = None if output is None else whole_of(output)
    if sides is None or gradient is None or output is None or values is None:
        return
    if sorted(scene.frameworks) != ["paddle", "torch"] or values.reference.shape != gradient.reference.shape:
        return
    zeros = (values.reference == 0) & (values.candidate == 0)
    slopes: set[float] = set()
    lines: list[Frame | None] = []
    for graph, record in zip(graphs_of(sides, scene.runs.map(lambda run: run.info)), output.sides):
        tensor = None if record is None else graph.tensor_of(record)
        calls = [each for each in graph.trace.calls if any(operand.tensor == tensor for operand in each.inputs)]
        slopes.update(slope for each in calls if (slope := slope_of(each)) is not None)
        lines.append(next((each.line for each in calls if slope_of(each) is not None), None))
    if len(slopes) != 1 or not zeros.any() or not (slope := slopes.pop()):
        return
    factor = 1 / slope if scene.frameworks.candidate == "paddle" else slope
    count = int(zeros.sum())
    text = (
        f"at exactly 0 paddle's leaky_relu has the slope of the positive side, torch's {slope:g}: {count:,} elements "
        "of what goes in are 0"
    )
    made = np.where(zeros, factor * gradient.reference, gradient.reference)
    noise = noise_level(scene) * float(np.sqrt(np.mean(np.square(gradient.reference))))
    site, limit = scene.diff.pair.anchor.site, scene.limit(scene.diff.pair)
    prediction = Prediction(site, gradient.candidate, made, gradient.reference, noise, limit)
    fix = f"paddle.where(x > 0, x, {slope:g} * x)" if scene.frameworks.candidate == "paddle" else ""
    yield Hypothesis(
        "known_difference", "the slope at 0", text, lambda: [prediction], fix=fix, code=True, lines=Both(*lines)
    )


def _of_micro_batches(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis that one side divides the loss of each part of what is one batch on the other side."""
    level = noise_level(scene)
    tensors: list[tuple[Pair, Both[np.ndarray]]] = []
    extents: list[list[int]] = []
    for diff in scene.diffs("backward"):
        parts = next((calls_of(record) for record in diff.pair.sides if record is not None and is_joined(record)), ())
        values = whole_of(diff.pair) if len(parts) > 1 else None
        if values is not None and values.reference.any():
            tensors.append((diff.pair, values))
            extents.append([extent for _, extent in parts])
    if not tensors or len(set(map(len, extents))) > 1:
        return
    split = [
        list(zip(*(np.split(side, np.cumsum(rows)[:-1]) for side in values)))
        for (_, values), rows in zip(tensors, extents)
    ]
    above, below = np.sum([[(np.vdot(r, c), np.vdot(r, r)) for r, c in rows] for rows in split], axis=0).T
    if not below.all() or np.ptp(above / below) <= _SAME_RATIO * np.abs(above / below).max():
        return  # one ratio is another hypothesis
    ratios, samples = above / below, np.array(extents[-1], np.float64)
    candidate = tensors[-1][0].candidate
    side, other = SIDES.swapped() if candidate is not None and is_joined(candidate) else SIDES
    means = samples.sum() / (len(samples) * samples)
    expected = means if side == SIDES.candidate else 1 / means
    is_mean = bool(np.allclose(ratios, expected, rtol=1e-3))
    counts, factors = (" and ".join(f"{x:.4g}" for x in numbers) for numbers in (samples, ratios))
    total = f"{samples.sum():g}"
    of_means = (
        f"the loss of each micro-batch is a mean over its own samples ({counts}) in the {side}, the {other}'s is one "
        f"mean over all {total}"
    )
    of_others = (
        f"gradients of the micro-batches are {factors} times the reference's: the {side} divides the loss of each by a "
        f"number of its own, such as its tokens, the {other} by one for all"
    )

    def predict() -> Iterator[Prediction]:
        for (pair, values), rows in zip(tensors, split):
            made = np.concatenate([r * ratio for (r, _), ratio in zip(rows, expected if is_mean else ratios)])
            noise = level * float(np.sqrt(np.mean(np.square(values.reference))))
            yield Prediction(pair.anchor.site, values.candidate, made, values.reference, noise, scene.limit(pair))

    text, free = (of_means, 0) if is_mean else (of_others, len(ratios))
    yield Hypothesis("micro_batch_mean", "means of micro-batches", text, predict, "gradients of outputs", free)


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis | Cause]:
    """Yield hypotheses on a first diff in the gradients that an optimizer received, the simplest first."""
    yield from _calls(scene)
    gradients = gradients_of(scene)
    if not gradients.tensors:
        return
    departing, is_constant = _departing(scene)
    for hypothesis in _ratios(scene, gradients, "gradients"):
        if hypothesis.changes == 1:
            text, telling = hypothesis.sentence + departing, hypothesis.telling or is_constant
            hypothesis = replace(hypothesis, sentence=text, telling=telling)
        yield hypothesis
    yield from _stale(scene, gradients)
    yield from _of_backwards(scene)
    yield from _decayed(scene, gradients)


def _calls(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that one side has fewer micro-batches in the step."""
    sides = scene.sides(scene.number)
    if sides is None:
        return
    counts = sides.map(lambda step: step.micro_batches)
    if counts.reference == counts.candidate or not all(counts):
        return
    if not all(any(record.stage == "forward" for record in step.records) for step in sides):
        return  # one loop computes with the parameters, and calls no layer
    before = scene.sides(scene.earlier[-1]) if scene.earlier else None
    if before is not None and len(set(before.map(lambda step: step.micro_batches))) > 1:
        return  # so it was in the step before, which agreed
    backwards = sides.map(lambda step: sum(r.stage == "backward" for r in step.records))
    fewer, more = SIDES if counts.reference < counts.candidate else SIDES.swapped()
    rows = sides.map(_rows_of_inputs)
    called = _called(scene, rows)
    if called and all(rows.reference.get(p.reference.path) == rows.candidate.get(p.candidate.path) for p in called):
        return  # one side puts the samples of several calls into one
    starts = sides.map(lambda step: step.trace.backwards)
    missing = _missing_call(scene, sides, fewer, more)
    if starts.reference == starts.candidate > 0 or any(missing.lines):
        if called:
            yield missing
        return
    text = (
        f"the {fewer}'s step has {min(counts)} micro-batch{'es' if min(counts) > 1 else ''}, the {more}'s "
        f"{max(counts)}: so often was the model called"
    )
    proven = (backwards.reference < backwards.candidate) == (counts.reference < counts.candidate)
    yield Cause("micro_batches", text, proven and all(backwards), "calls and backwards are recorded", values=counts)


def _rows_of_inputs(step: Step) -> Counter[str]:
    """Return the number of samples that the loop calls each of its models with."""
    rows: Counter[str] = Counter()
    for record in step.records:
        if record.stage == "input" and record.layer != LOOP and record.shape:
            rows[record.layer] += record.shape[0]
    return rows


def _called(scene: DiffContext, rows: Both[Counter[str]]) -> list[LayerPair]:
    """Return the pairs of layers that both loops call. One loop may call the layers inside of what the other calls."""
    return [
        p for p in scene.alignment.pairs if p.reference.path in rows.reference and p.candidate.path in rows.candidate
    ]


def _missing_call(scene: DiffContext, sides: Both[Step], fewer: str, more: str) -> Cause:
    """Return the cause that one side's loop calls a layer less often; with lines if the other side's calls of the layer
    stand in several lines, as those of micro-batches do not.
    """
    ends = {d.pair.anchor.layer: d for d in scene.step if d.pair.stage == "input" and getattr(d.pair, fewer) is None}
    step: Step = getattr(sides, fewer)
    called = {r.layer for r in step.records if r.stage == "input"}
    layers = [p for p in scene.alignment.pairs if p.reference.path in ends or p.candidate.path in ends]
    layers = [p for p in layers if getattr(p, fewer).path in called]
    text = f"the {fewer}'s loop calls the model less often than the {more}'s, in as many backwards"
    if not layers:
        return Cause("missing_call", text)
    name, other = (getattr(layers[0], side).path for side in (fewer, more))
    calls = len({r.call for r in step.records if r.stage == "input" and r.layer == name})
    place = next(d for path, d in ends.items() if path in (name, other)).pair.anchor.call
    often = "once" if calls == 1 else f"{calls} times"
    text = (
        f"the {fewer}'s loop calls `{name}` {often}, and has no partner of call {place + 1} of the {more}'s `{other}`: "
        f"what the {more}'s loss makes of it is missing"
    )
    traced = sides.map(lambda side: [call for call in side.trace.calls if not call.function])
    remaining = [call.line for call in getattr(traced, fewer) if call.layer == name]
    longer = {call.call: call.line for call in getattr(traced, more) if call.layer == other}
    if len({*longer.values()}) < 2:
        return Cause("missing_call", text)
    lines = Both(longer.get(place), next(iter(remaining), None)).swapped(more == SIDES.candidate)
    return Cause("missing_call", text, lines=lines)


def _ratios(scene: DiffContext, gradients: Gradients, what: str) -> Iterator[Hypothesis]:
    """Yield hypotheses on a single ratio of all gradients, or of the gradients that did not pass."""
    facts, counts = transforms.facts(scene), transforms.counts(scene)
    near = max(transforms.NEAR, rounding_of(scene.diff.pair))
    for hypothesis in transforms.ratio_hypotheses(gradients.tensors, what, "gradient_scale", facts, counts, near):
        yield hypothesis if hypothesis.telling else _with_factors(scene, hypothesis, gradients.tensors)
    wrong = gradients.wrong
    # The first explains all diffs, the second only some.
    for tensors, changes in ((wrong, 2), (_with_one_ratio(wrong or gradients.tensors), 3)):
        # A ratio of only a few gradients is never a number of the run.
        for hypothesis in transforms.ratio_hypotheses(
            tensors, f"{what}{gradients.named(tensors)}", "gradient_scale", ()
        ):
            if hypothesis.kind == "loss_scale" and len(tensors) < len(gradients.tensors):
                # A loss scale that is not undone scales all gradients: some have it where they are clipped before.
                text = hypothesis.sentence.rpartition(": ")[0]
                side = "candidate" if hypothesis.sentence.endswith("reference") else "reference"
                text = f"{text}: a loss scale, in gradients that the {side} clips before it undoes the scale"
                hypothesis = replace(hypothesis, sentence=text)
            hypothesis = replace(hypothesis, kind="gradient_scale", changes=changes, telling=False)
            yield _with_factors(scene, hypothesis, tensors)


def _with_factors(scene: DiffContext, hypothesis: Hypothesis, tensors: Sequence[Prediction]) -> Hypothesis:
    """Return the hypothesis of a ratio, with its reason if the code of both sides' layers shows the numbers."""
    written = _written(scene, transforms.ratio_of(tensors))
    if written is None:
        return hypothesis
    text, lines, values = written
    text = f"{hypothesis.sentence}: {text}"
    return replace(hypothesis, kind="scale", sentence=text, telling=True, lines=lines, values=values)


def _written(scene: DiffContext, ratio: float | None) -> tuple[str, Both[Frame | None], Both[float]] | None:
    """Return the numbers by which both sides' code of a layer scales, as text, with their lines; `None` unless one
    number of the candidate's code is such a multiple of one of the reference's.

    Weights that begin as zeros, such as LoRA's, hide a scale from the outputs of the first step.
    """
    steps, sides = scene.sides(scene.number), scene.diff.pair.sides
    if steps is None or ratio is None or None in [*sides]:
        return None
    paths = sides.map(lambda record: "" if record is None else record.layer)
    if LOOP in [*paths]:
        return None
    factors = steps.zip(paths).map(lambda side: dict(_factors(*side)))
    matches = [
        (here, there)
        for here, there in product(*factors)
        if math.isclose(there, ratio * here, rel_tol=transforms.NEAR)
        and not any(math.isclose(here, other) for other in factors.candidate)
        and not any(math.isclose(there, other) for other in factors.reference)
    ]
    if len(matches) != 1:
        return None
    (here, there) = matches[0]
    calls = Both(factors.reference[here], factors.candidate[there])
    text = (
        f"in the candidate, {calls.candidate.function}() in `{paths.candidate}` scales by {there:.6g} for the "
        f"reference's {here:.6g}"
    )
    return text, calls.map(lambda call: call.line), Both(here, there)


def _factors(step: Step, path: str) -> Iterator[tuple[float, TracedCall]]:
    """Yield the numbers by which calls in a layer, or in the layer above it, scale."""
    for call in step.trace.calls:
        numbers = [float(value) for value in call.arguments.values() if type(value) in (int, float)]
        near = call.layer == path or call.layer == (path.rpartition(".")[0] or ROOT)
        if near and call.function in ("mul", "div") and len(numbers) == 1 and numbers[0]:
            yield numbers[0] if call.function == "mul" else 1 / numbers[0], call


def _with_one_ratio(tensors: Sequence[Prediction]) -> list[Prediction]:
    """Return the gradients with the same ratio to the reference as the one with the largest error."""
    measured = [tensor for tensor in tensors if transforms.ratio_of([tensor]) is not None]
    if not measured:
        return []
    last = max(measured, key=lambda tensor: float(np.mean(np.square((tensor.actual - tensor.without) / tensor.noise))))
    ratio = transforms.ratio_of([last])
    assert ratio is not None
    same = [(tensor, transforms.ratio_of([tensor])) for tensor in measured]
    return [
        tensor
        for tensor, tensor_ratio in same
        if tensor_ratio is not None and abs(tensor_ratio - ratio) <= _SAME_RATIO * abs(ratio)
    ]


def _departing(scene: DiffContext) -> tuple[str, bool]:
    """Return text on the side whose optimizer received other gradients than its backward computed, and True if they are
    so in other steps, too, as where the loop scales them; an empty text if unknown.
    """
    factors = made_of(scene, scene.number)
    if factors.reference is None or factors.candidate is None:
        return "", False
    same = factors.map(lambda ratio: ratio is not None and abs(ratio - 1) <= AT_MOST)
    if same.reference == same.candidate:
        return "", False
    side = "reference" if same.candidate else "candidate"
    ratio = getattr(factors, side)
    others = [n for n in scene.numbers if abs(n - scene.number) == 1]
    again = [getattr(made_of(scene, number), side) for number in others]
    if again and all(partner is not None and abs(partner - ratio) <= AT_MOST * abs(ratio) for partner in again):
        return f": the {side} multiplies what its backward gave by {ratio:.5g} before its optimizer steps", True
    return f"; the {side}'s are {ratio:.5g} times what its backward gave, the other side's are what it gave", False


def _stale(scene: DiffContext, gradients: Gradients) -> Iterator[Hypothesis]:
    """Yield hypotheses that gradients of an earlier step were added to this step's, or replaced them."""
    now, wrong = scene.pairs(scene.number, "grad"), gradients.wrong
    for number in (scene.number, *scene.earlier[::-1][:_BEFORE]):
        before = scene.pairs(number, "grad")
        if number == scene.number:  # a step may hold several updates
            before = {(layer, slot, call + 1): pair for (layer, slot, call), pair in now.items()}
        old: list[np.ndarray | None] = []
        for place, tensor in zip(gradients.places, gradients.tensors):
            values = like(before[place], now[place], LOOKED_AT) if place in before and place in now else None
            fits = values is not None and values.candidate.shape == tensor.actual.shape
            old.append(values.candidate if values is not None and fits else None)
        # A gradient that the earlier step lacks comes from elsewhere.
        own = [values for place, values in zip(gradients.places, old) if place == place_of(scene.diff.pair)]
        if all(values is None for values in own or old):
            continue
        yield from _with_those_of(scene, gradients, old, number, "")
        if wrong:  # one of several optimizers zeroes its gradients
            old = [values if failed else None for values, failed in zip(old, gradients.failed)]
            yield from _with_those_of(scene, gradients, old, number, gradients.named(wrong))


def _with_those_of(
    scene: DiffContext, gradients: Gradients, old: Sequence[np.ndarray | None], number: int, of: str
) -> Iterator[Hypothesis]:
    """Yield hypotheses that gradients of an earlier step (or of an earlier update) are in this step's.

    Args:
        old: the earlier gradients, `None` for a gradient that the hypotheses are not about.
        number: number of the earlier step.
        of: names of the gradients, as text; empty if they are all.
    """
    text = f"the candidate's gradients{of} are this step's plus those of step {number}: they were not zeroed after it"
    if number == scene.number:
        text = (
            f"the candidate's gradients{of} are those of this update plus those of the update before it in the step: "
            "they were not zeroed after it"
        )

    def with_old(factor: float) -> Iterator[Prediction]:
        for tensor, values in zip(gradients.tensors, old):
            if values is not None:
                yield replace(tensor, predicted=factor * tensor.without + values)

    yield Hypothesis(
        "stale_gradient",
        f"gradients of step {number}",
        text,
        lambda: with_old(1.0),
        "gradients",
        tried=_BEFORE,
        fix=parameter_history.zeroing(scene.frameworks.candidate),
    )
    if number == scene.number:
        return
    yield Hypothesis(
        "gradient_of_another_step",
        f"gradients of step {number} alone",
        f"the candidate's gradients{of} are those of step {number}: its optimizer steps before this step's backward",
        lambda: with_old(0.0),
        "gradients",
        tried=_BEFORE,
    )
    yield from _mixtures(scene, gradients, old, number, of)


def _mixtures(
    scene: DiffContext, gradients: Gradients, old: Sequence[np.ndarray | None], number: int, of: str
) -> Iterator[Hypothesis]:
    """Yield hypotheses that the sum with an earlier step's gradients was clipped or scaled, as a whole or by tensor."""
    rows = [(tensor, values) for tensor, values in zip(gradients.tensors, old) if values is not None]
    common = _shares(rows)
    each = [_shares([row]) for row in rows]
    for parts, free, changes in (([common] * len(rows), 2, 2), (each, 2 * len(rows), 3)):
        factors = [part for part in parts if part is not None]
        if len(factors) < len(rows) or abs(factors[0][1]) < _SAME_RATIO:
            continue
        shares = f" ({factors[0][0]:.4g} and {factors[0][1]:.4g} times)" if changes == 2 else ""
        yield Hypothesis(
            "stale_gradient",
            f"a share of the gradients of step {number}",
            f"the candidate's gradients{of} are made of this step's and of those of step {number}{shares}: they were "
            "not zeroed after it, and are clipped or scaled besides",
            partial(_mixed, rows, factors),
            "gradients",
            free=free,
            tried=_BEFORE,
            changes=changes,
            fix=parameter_history.zeroing(scene.frameworks.candidate),
        )


_Rows = Sequence[tuple[Prediction, np.ndarray]]


def _shares(rows: _Rows) -> tuple[float, float] | None:
    """Return the factors of this and an earlier step's gradients whose sum fits the candidate; `None` if not finite."""
    columns = [np.stack([tensor.without, values], axis=1) / np.asarray(tensor.noise) for tensor, values in rows]
    target = [tensor.actual / tensor.noise for tensor, _ in rows]
    factors = np.linalg.lstsq(np.concatenate(columns), np.concatenate(target), rcond=None)[0]
    return (float(factors[0]), float(factors[1])) if np.isfinite(factors).all() else None


def _mixed(rows: _Rows, parts: Sequence[tuple[float, float]]) -> Iterator[Prediction]:
    for (tensor, values), (now, before) in zip(rows, parts):
        yield replace(tensor, predicted=now * tensor.without + before * values)


def _of_backwards(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the gradients hold those of other backwards than the reference's, from biases.

    Those of earlier backwards stay where nothing zeroes them, also where the backward is of another model's loss.
    """
    # A bias may pass where the weight of its layer does not, as limits grow with the drift of earlier updates.
    failed = {diff.pair.anchor.layer for diff in scene.diffs("grad") if not diff.passed}
    update = scene.diff.pair.anchor.call
    rows = [row for row in bias_sums(scene, scene.number, update) if row[0].anchor.layer in failed]
    reference = _held(rows, SIDES.reference)
    old = {place_of(pair): sums for number in scene.earlier[-1:] for pair, sums in bias_sums(scene, number)}
    longer = [
        (pair, sums.zip(old[place_of(pair)]).map(lambda s: s[0] | s[1])) for pair, sums in rows if place_of(pair) in old
    ]
    candidate = _held(rows, SIDES.candidate) or _held(longer, SIDES.candidate)
    if reference is None or candidate is None:
        return
    calls = Both(reference, candidate).map(lambda held: sorted(key[1:] for key in held.there))
    stale = [key for key in candidate.there if key[0] != scene.number]
    if calls.reference == calls.candidate and not stale:
        return
    counts = Both(reference, candidate).map(lambda held: f"{len(held.there)} of {held.count}")
    numbers = calls.map(lambda side: ", ".join(dict.fromkeys(str(call) for call, _ in side)))
    name = [record.layer for record in candidate.rows[0][0].sides if record is not None][-1]
    kind, of_what = "stale_gradient", "the update before" if update else "another loss"
    if stale:
        text = (
            f"the candidate's gradients are this step's plus those of call {stale[0][1] + 1} of `{name}` in step "
            f"{stale[0][0]}: a backward after the optimizer's step left them, and they were not zeroed"
        )
    elif len(calls.candidate) > len(calls.reference):
        text = (
            f"the candidate's gradients hold those of {counts.candidate} backwards of this step, the reference's of "
            f"{counts.reference}: those of {of_what} are not zeroed before this one's backward (calls "
            f"{numbers.candidate} of `{name}` for {numbers.reference})"
        )
    else:
        kind = "micro_batch_missing"
        only = (
            "only the last micro-batch is"
            if [call for call, _ in calls.candidate] == [candidate.count - 1]
            else f"only micro-batches {numbers.candidate} are"
        )
        text = (
            f"{only} in the candidate's gradients, of {candidate.count} whose backward ran: they are zeroed in between"
        )
    level = noise_level(scene)
    gradients = [(pair, sums, sides) for pair, sums in candidate.rows if (sides := whole_of(pair)) is not None]
    largest = max((float(np.abs(sides.candidate).max(initial=0.0)) for _, _, sides in gradients), default=0.0)

    def predict() -> Iterator[Prediction]:
        for pair, sums, sides in gradients:
            # The gradient of a bias before a batch norm is rounding.
            if float(np.abs(sides.candidate).max(initial=0.0)) > _TINY * largest:
                predicted = np.asarray(candidate.scale * sum(sums.candidate[key] for key in candidate.there))
                size = float(np.sqrt(np.mean(np.square(sides.candidate)))) or 1.0
                actual, without = sides.candidate.ravel(), sides.reference.ravel()
                yield Prediction(pair.anchor.site, actual, predicted, without, level * size)

    scaled = abs(candidate.scale - 1) > AT_MOST
    fix = parameter_history.zeroing(scene.frameworks.candidate) if kind == "stale_gradient" else ""
    yield Hypothesis(
        kind,
        "other backwards",
        text,
        predict,
        "gradients of biases",
        int(scaled),
        2**candidate.count,
        fix=fix,
        code=True,
    )


@dataclass(frozen=True)
class _Held:
    """The backwards whose gradients are in the gradients of biases: all with one scale, such as that of clipping."""

    rows: list[tuple[Pair, Both[_Backwards]]]
    there: list[tuple[int, int, str]]
    scale: float
    count: int


def _held(rows: list[tuple[Pair, Both[_Backwards]]], side: str) -> _Held | None:
    """Return the backwards that the gradients of one side hold; `None` if they are no plain sum of some of them."""
    groups: dict[tuple[tuple[int, int, str], ...], list[tuple[Pair, Both[_Backwards]]]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row[1], side)), []).append(row)
    keys, alike = max(groups.items(), key=lambda group: len(group[1]), default=((), []))
    gradients = [whole_of(pair) for pair, _ in alike]
    if not keys or any(sides is None for sides in gradients):
        return None
    columns = np.concatenate([np.stack([getattr(sums, side)[key] for key in keys], axis=1) for _, sums in alike])
    target = np.concatenate([getattr(sides, side).ravel() for sides in gradients if sides is not None])
    parts, _, rank, _ = np.linalg.lstsq(columns, target, rcond=None)
    present = np.abs(parts) > 0.5 * np.max(np.abs(parts))
    total = columns[:, present].sum(axis=1)
    if len(target) <= len(keys) or rank < len(keys) or not total.any():
        return None
    scale = float(total @ target / (total @ total))
    if np.linalg.norm(scale * total - target) > AT_MOST * np.linalg.norm(target):
        return None
    return _Held(alike, [key for key, is_present in zip(keys, present) if is_present], scale, len(keys))


def _decayed(scene: DiffContext, gradients: Gradients) -> Iterator[Hypothesis]:
    """Yield the hypothesis that a side's gradients contain a multiple of the weights (weight decay in the loss)."""
    weights, now = (scene.pairs(scene.number, stage) for stage in ("weight", "grad"))
    rows = []
    for place, tensor in zip(gradients.places, gradients.tensors):
        values = like(weights[place], now[place], LOOKED_AT) if place in weights and place in now else None
        if values is not None and values.reference.shape == tensor.actual.shape:
            rows.append((place, tensor, values.reference))
    for name, chosen in (("", rows), (" (matrices only)", [row for row in rows if len(_shape(scene, row[0])) > 1])):
        square = sum(float(np.sum(np.square(w / tensor.noise))) for _, tensor, w in chosen)
        if not square:
            continue
        product = sum(
            float(np.sum(w * (tensor.actual - tensor.without) / np.square(tensor.noise))) for _, tensor, w in chosen
        )
        decay = product / square
        if abs(decay) < 1e-9:
            continue
        side, other_side = SIDES if decay < 0 else SIDES.swapped()

        def predict(
            chosen: Sequence[tuple[PairPlace, Prediction, np.ndarray]] = chosen, decay: float = decay
        ) -> Iterator[Prediction]:
            for _, tensor, weight in chosen:
                yield replace(tensor, predicted=tensor.without + decay * weight)

        yield Hypothesis(
            "weight_decay_in_gradient",
            "weight decay in the gradient",
            f"{abs(decay):.5g} times the weight is added to the {side}'s gradients{name}, and not to the "
            f"{other_side}'s: weight decay in the loss or by hand",
            predict,
            "gradients",
            free=1,
            tried=2,
        )
        return


def _shape(scene: DiffContext, place: PairPlace) -> tuple[int, ...]:
    return scene.pairs(scene.number, "weight")[place].anchor.shape
