"""Hypotheses on a layer's output, from the outputs of this layer and of the layers before alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from padiff.compare.declared.layers import layer_fix
from padiff.compare.diagnose import kernels
from padiff.compare.diagnose.hypotheses import transforms
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, rounding_of, whole_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.judge.drift import was_excused
from padiff.model import equivalents
from padiff.records import Both, Cause, Diff

# Count of earlier outputs that may be the layer's input.
_BEFORE = 4
# Largest difference of two correct implementations of a layer: a count of rounding units, or a multiple of the
# difference of earlier outputs.
_ROUNDINGS, _TIMES = 16.0, 2.0
# Most elements that are used: of larger tensors the first samples.
_MOST = 400_000


@dataclass(frozen=True)
class Output:
    """The output at which the runs differ first.

    Attributes:
        reference, candidate: the tensors, or the first samples of them.
        noise: rounding error of an element, as a share of the tensor's root mean square.
        inputs: possible inputs of the layer, by site: earlier outputs of the candidate, the nearest first, in float64.
    """

    reference: np.ndarray
    candidate: np.ndarray
    noise: float
    inputs: tuple[tuple[str, np.ndarray], ...]

    @property
    def absolute(self) -> float:
        size = max(root(self.reference), root(self.candidate))
        return max(self.noise * size, 1e-300)


def output_of(scene: DiffContext) -> Output | None:
    """Return the output of a scene's first diff; `None` if sketched, complex, not finite or of two shapes."""
    sides = whole_of(scene.diff.pair)
    if sides is None or np.iscomplexobj(sides.reference) or sides.reference.shape != sides.candidate.shape:
        return None
    if sides.reference.size < 2 or not all(np.isfinite(side).all() for side in sides):
        return None
    rows = _rows(sides.reference.shape)
    noise = noise_level(scene)
    inputs: list[tuple[str, np.ndarray]] = []
    for diff in _before(scene):
        values = whole_of(diff.pair)
        if values is not None and values.reference.shape == sides.reference.shape and len(inputs) < _BEFORE:
            # The candidate's output was computed from the candidate's inputs.
            inputs.append((diff.pair.anchor.site, values.candidate[:rows]))
    return Output(sides.reference[:rows], sides.candidate[:rows], noise, tuple(inputs))


def noise_level(scene: DiffContext) -> float:
    """Return the largest expected difference of two correct implementations of the layer, as a share of the output."""
    errors = [d.figures.rel_l2 for d in _before(scene) if d.figures is not None and math.isfinite(d.figures.rel_l2)]
    return max(_ROUNDINGS * rounding_of(scene.diff.pair), _TIMES * max(errors, default=0.0))


def _before(scene: DiffContext) -> list[Diff]:
    """Return the passed diffs of outputs and inputs before the first diff, the latest first."""
    order = scene.diff.pair.anchor.order
    passed = [d for d in scene.diffs("forward", "input") if d.passed and d.pair.complete and not was_excused(d)]
    diffs = [d for d in passed if d.pair.anchor.order < order]
    return sorted(diffs, key=lambda d: -d.pair.anchor.order)


def _rows(shape: Sequence[int]) -> int:
    size = math.prod(shape)
    return shape[0] if size <= _MOST else max(1, _MOST * shape[0] // size)


def output_hypothesis(
    scene: DiffContext,
    output: Output,
    kind: str,
    name: str,
    text: str,
    predicted: np.ndarray,
    free: int = 0,
    tried: int = 1,
    telling: bool = True,
    changes: int = 1,
    values: Both[Any] | None = None,
    fix: str = "",
) -> Hypothesis:
    """Return a hypothesis that predicts the values of the output itself."""
    pair = scene.diff.pair

    def predict() -> Iterator[Prediction]:
        limit = scene.limit(pair)
        yield Prediction(pair.anchor.site, output.candidate, predicted, output.reference, output.absolute, limit)

    return Hypothesis(
        kind, name, text, predict, "outputs", free, tried, changes, fix=fix, telling=telling, values=values
    )


def channel_axes(scene: DiffContext, output: Output) -> list[int]:
    """Return the axes that may be channels: the last; for convolutions and similar layers first the second one."""
    last = output.reference.ndim - 1
    kind = equivalents.kind(scene.layers.reference) if scene.layers is not None else ""
    second = output.reference.ndim > 2 and any(
        name in kind for name in ("conv", "batchnorm", "instancenorm", "groupnorm")
    )
    return [1, last] if second and last != 1 else [last]


def is_norm(scene: DiffContext) -> bool:
    """Return True if the layer is a normalisation."""
    return scene.layers is not None and "norm" in equivalents.kind(scene.layers.reference)


def has_statistics(scene: DiffContext) -> bool:
    """Return True if the layer has running statistics."""
    layer = scene.layers.reference if scene.layers is not None else None
    return layer is not None and any(equivalents.slot(p.slot) == "running_mean" for p in layer.parameters)


def named(scene: DiffContext, slot: str) -> list[tuple[str, np.ndarray]]:
    """Return the reference's parameters with this slot name, of the layer and of the layers inside, by path."""
    return [(path, sides.reference) for path, sides in both_named(scene, slot)]


def both_named(scene: DiffContext, slot: str) -> list[tuple[str, Both[np.ndarray]]]:
    """Return the parameters of both sides with this slot name, of the layer and of the layers inside, by path."""
    layer = scene.diff.pair.anchor.layer
    parameters = []
    for pair in scene.pairs(scene.number, "weight").values():
        path, name = pair.anchor.layer, equivalents.slot(pair.anchor.slot)
        if (path == layer or path.startswith(f"{layer}.")) and name == slot:
            values = whole_of(pair)
            if values is not None:
                parameters.append((f"{path}/{pair.anchor.slot}", values))
    return parameters


def near(made: np.ndarray, values: np.ndarray, output: Output) -> bool:
    """Return True if two tensors are equal up to rounding."""
    with np.errstate(all="ignore"):
        return bool(root(made - values) <= 3 * output.absolute)


def root(values: np.ndarray) -> float:
    """Return the root of the mean square; 0 for an empty array."""
    return math.sqrt(float(np.mean(np.square(values)))) if values.size else 0.0


_AXIS = "softmax over another axis"


def norm_hypotheses(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield hypotheses on a normalisation's parameters, statistics and epsilon."""
    if is_norm(scene):
        yield from _channels(scene, output)
        yield from _rowwise(scene, output)


def softmax_hypotheses(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield hypotheses on a softmax over another axis, for outputs that add up to one along some axis."""
    reference, candidate = output.reference, output.candidate
    if reference.min() < 0 or candidate.min() < 0:
        return
    axes = Both(*([k for k in range(side.ndim) if _adds_up(side, k)] for side in (reference, candidate)))
    for site, layer_input in output.inputs:
        for axis in range(layer_input.ndim):
            if near(kernels.softmax(layer_input, axis), reference, output):
                for second in range(layer_input.ndim):
                    if second != axis:
                        text = (
                            f"the candidate takes the softmax over axis {second} for the reference's {axis} (of {site})"
                        )
                        predicted = kernels.softmax(layer_input, second)
                        yield output_hypothesis(
                            scene, output, "softmax_axis", "softmax over another axis", text, predicted, 0, 4
                        )
                return
    if len(axes.reference) == 1 and len(axes.candidate) == 1 and axes.reference != axes.candidate:
        first, second = axes.reference[0], axes.candidate[0]
        # Both sides are the same exponentials, divided by sums over different axes.
        logs = np.log(np.maximum(candidate, 1e-300)) - np.log(np.maximum(reference, 1e-300))
        parts = logs.mean(axis=second, keepdims=True) + logs.mean(axis=first, keepdims=True)
        parts = parts - logs.mean(axis=(first, second), keepdims=True)
        free = reference.size // reference.shape[first] + reference.size // reference.shape[second]
        text = f"the candidate takes the softmax over axis {second} for the reference's {first}"
        predicted = reference * np.exp(parts)
        yield output_hypothesis(scene, output, "softmax_axis", _AXIS, text, predicted, free, 2)


def _adds_up(values: np.ndarray, axis: int) -> bool:
    return values.shape[axis] > 1 and bool(np.allclose(values.sum(axis=axis), 1, rtol=0, atol=1e-4))


def _channels(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield hypotheses on a scale and offset by channel: a normalisation without parameters, or by other statistics."""
    axis = channel_axes(scene, output)[0]
    count = output.reference.shape[axis]
    rows = [np.moveaxis(side, axis, 0).reshape(count, -1) for side in (output.reference, output.candidate)]
    if rows[0].shape[1] < 4:
        return
    shape = [-1 if k == axis else 1 for k in range(output.reference.ndim)]
    weights, biases = (dict(named(scene, slot)) for slot in ("weight", "bias"))
    weight, bias = (next((v.ravel() for v in parameters.values()), None) for parameters in (weights, biases))
    if weight is not None and weight.shape == (count,) and np.all(weight != 0):
        shift = bias.reshape(shape) if bias is not None and bias.shape == (count,) else 0.0
        predicted = (output.reference - shift) / weight.reshape(shape)
        text = "the candidate's normalisation does not apply its weight and bias, the reference's does"
        yield output_hypothesis(
            scene, output, "norm_affine_missing", "weight and bias of the normalisation", text, predicted
        )
    yield from _running_variances(scene, output, bias, shape)
    r = rows[0] - rows[0].mean(axis=1, keepdims=True)
    c = rows[1] - rows[1].mean(axis=1, keepdims=True)
    square = np.sum(np.square(r), axis=1)
    factor = np.divide(np.sum(r * c, axis=1), square, out=np.ones(count), where=square > 0)
    offset = rows[1].mean(axis=1) - factor * rows[0].mean(axis=1)
    predicted = output.reference * factor.reshape(shape) + offset.reshape(shape)
    name = "other statistics"
    text = (
        "each channel is scaled and offset by itself, as by other statistics (train, eval) or another weight and bias"
    )
    yield output_hypothesis(scene, output, "norm_statistics", name, text, predicted, 2 * count, 1, False, 2)


def _running_variances(
    scene: DiffContext, output: Output, bias: np.ndarray | None, shape: Sequence[int]
) -> Iterator[Hypothesis]:
    """Yield the hypothesis that both sides normalise by running variances, each estimated as its framework does."""
    both = [sides for slot in ("running_mean", "running_var") for _, sides in both_named(scene, slot)]
    if len(both) != 2 or {*scene.frameworks} != {"torch", "paddle"} or scene.layers is None:
        return
    means, variances = both
    biased = variances.swapped(scene.frameworks.reference != "torch")
    if (
        not np.allclose(means.reference, means.candidate, rtol=1e-4, atol=1e-6)
        or (biased.candidate > biased.reference * (1 + 1e-5)).any()
    ):
        return
    eps = float(scene.layers.candidate.settings.get("eps", 1e-5))
    factor = np.sqrt((variances.reference + eps) / (variances.candidate + eps)).reshape(shape)
    shift = 0.0 if bias is None else bias.reshape(shape)
    text = (
        "the layer normalises by its running statistics: torch keeps the unbiased variance of a batch, paddle the "
        f"biased one, which changes outputs by {np.max(np.abs(factor - 1)):.2g} at most"
    )
    predicted = (output.reference - shift) * factor + shift
    if near(predicted, output.candidate, output):
        yield output_hypothesis(scene, output, "norm_statistics", "other statistics", text, predicted)


def _rowwise(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield the hypothesis of a scale for each normalised row: another epsilon."""
    if output.reference.ndim < 2 or has_statistics(scene):
        return
    bias = next((v.ravel() for _, v in named(scene, "bias")), None)
    shift = bias if bias is not None and bias.shape == output.reference.shape[-1:] else 0.0
    r, c = output.reference - shift, output.candidate - shift
    square = np.sum(np.square(r), axis=-1, keepdims=True)
    factor = np.divide(np.sum(r * c, axis=-1, keepdims=True), square, out=np.ones_like(square), where=square > 0)
    text = "each row is scaled by a number of its own: another epsilon of the normalisation, or another norm"
    yield output_hypothesis(
        scene, output, "norm_eps", "epsilon", text, r * factor + shift, factor.size, telling=False, changes=2
    )


# Largest relative error of bfloat16 and float16 if they replace float32 at one place.
_COARSE = {"bfloat16": 2.0**-5, "float16": 2.0**-8}
_MORE = "a missing or an extra activation"
# Numbers too common to be recognized as the root of a size in the run.
_ANYBODYS = (1.0, 2.0, 3.0, 4.0)
# Largest difference of the share of dropped elements from the rate, in standard deviations.
_BY_CHANCE = 5.0


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis | Cause]:
    """Yield hypotheses on a first diff in an output, the simplest first."""
    output = output_of(scene)
    if output is None:
        return
    yield from _grid(scene, output)
    yield from _dropout(scene, output)
    yield from _activation(scene, output)
    yield from _bias(scene, output)
    yield from _scale(scene, output)
    yield from _orders(scene, output)
    yield from softmax_hypotheses(scene, output)
    yield from norm_hypotheses(scene, output)


def _form_fix(scene: DiffContext, expected: str, name: str) -> str:
    """Return the call that makes the candidate's layer with the reference's setting of the same function; else ""."""
    settings = [kernels.activation_settings(each) for each in (expected, name)]
    if scene.layers is None or not settings[0] or settings[0].keys() != settings[1].keys():
        return ""
    return layer_fix(scene.frameworks.candidate, scene.layers.candidate, *next(iter(settings[0].items())))


def _activation(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield hypotheses on another activation, applied to an input of the layer or to the reference's output."""
    functions = kernels.FUNCTIONS
    for site, layer_input in output.inputs:
        names = [name for name, f in functions.items() if near(f(layer_input), output.reference, output)]
        as_is = near(layer_input, output.reference, output)
        if not names and not as_is:
            continue
        expected = names[0] if names else "no activation"
        for name, function in functions.items():
            if name != expected:
                text = f"the candidate uses {name} for the reference's {expected} (of {site})"
                yield output_hypothesis(
                    scene, output, "activation", "another activation", text, function(layer_input), 0, len(functions),
                    values=Both(names[0] if names else "", name), fix=_form_fix(scene, expected, name),
                )  # fmt: skip
        if names:
            text = f"the candidate has no activation, the reference {expected} (of {site})"
            yield output_hypothesis(
                scene, output, "activation_missing", "no activation", text, layer_input, values=Both(expected, "")
            )
            slope = _slope(layer_input, output.candidate)
            if slope is not None:
                text = f"the candidate uses leaky ReLU of slope {slope:.5g} for the reference's {expected} (of {site})"
                yield output_hypothesis(
                    scene, output, "activation", "slope", text, kernels.leaky(slope)(layer_input), 1,
                    values=Both(expected, f"leaky_relu of slope {slope:.5g}"),
                )  # fmt: skip
        return
    for name, function in functions.items():
        text = f"the candidate's output is {name} of the reference's: an activation more"
        predicted = function(output.reference)
        yield output_hypothesis(scene, output, "activation_added", _MORE, text, predicted, 0, len(functions))
        back = _swapped_hypothesis(scene, output, name, function(output.candidate), len(functions))
        yield back


def _swapped_hypothesis(scene: DiffContext, output: Output, name: str, predicted: np.ndarray, tried: int) -> Hypothesis:
    """Return the hypothesis that the reference's output is a function of the candidate's."""
    pair = scene.diff.pair

    def predict() -> Iterator[Prediction]:
        limit = scene.limit(pair)
        yield Prediction(pair.anchor.site, output.reference, predicted, output.candidate, output.absolute, limit)

    text = f"the reference's output is {name} of the candidate's: the candidate's activation is missing"
    return Hypothesis("activation_missing", _MORE, text, predict, "outputs", tried=tried)


def _slope(layer_input: np.ndarray, candidate: np.ndarray) -> float | None:
    """Return the slope of a leaky ReLU that fits the candidate's output, or `None`."""
    negative = layer_input < 0
    square = float(np.sum(np.square(layer_input[negative])))
    slope = float(np.sum(layer_input[negative] * candidate[negative])) / square if square else 0.0
    written = float(f"{slope:.3g}")
    return written if 0 < abs(slope) < 1 else None


def _bias(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield hypotheses on a bias that is missing, added twice, or another one."""
    for axis in channel_axes(scene, output):
        for name, bias in named(scene, "bias"):
            if bias.shape != (output.reference.shape[axis],) or not bias.any():
                continue
            added = bias.reshape([-1 if k == axis else 1 for k in range(output.reference.ndim)])
            for times, kind, text in (
                (-1.0, "bias_missing", f"the candidate does not add {name}, the reference does"),
                (1.0, "bias_added", f"the candidate adds {name} once more than the reference"),
            ):
                yield output_hypothesis(scene, output, kind, "bias", text, output.reference + times * added, 0, 2)
        axes = tuple(k for k in range(output.reference.ndim) if k != axis)
        if output.reference.size < 2 * output.reference.shape[axis]:
            continue  # a number for each element explains anything
        offset = (output.candidate - output.reference).mean(axis=axes, keepdims=True)
        text = f"the candidate's output is off by one number for each channel (axis {axis}): another bias, or mean"
        yield output_hypothesis(
            scene, output, "channel_offset", "an offset by channel", text, output.reference + offset, offset.size,
            telling=False, changes=2,
        )  # fmt: skip


def _scale(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the output is a multiple of the reference's."""
    square = float(np.vdot(output.reference, output.reference))
    ratio = float(np.vdot(output.reference, output.candidate)) / square if square else 1.0
    if not math.isfinite(ratio) or abs(ratio - 1) < 1e-5 or not ratio:
        return
    for value, text in _widths(scene, output).items():
        for scale, name in ((math.sqrt(value), f"sqrt({value:g})"), (1 / math.sqrt(value), f"1 / sqrt({value:g})")):
            if abs(ratio - scale) <= 2e-5 * scale and math.sqrt(value) not in _ANYBODYS:
                sentence = f"the candidate's output is {scale:.5g} times the reference's: {name}, of {text}"
                predicted = scale * output.reference
                # A whole number has many possible reasons; a root of a size is no proof.
                odd = math.sqrt(value) % 1 != 0
                yield output_hypothesis(
                    scene, output, "output_scale", "a scale", sentence, predicted, int(not odd), 8, telling=odd
                )
                return
    written = float(f"{ratio:.4g}")
    written = written if abs(written - ratio) <= 1e-5 * abs(ratio) else ratio
    sentence = f"the candidate's output is {written:.6g} times the reference's"
    if scene.diff.pair.derived:
        sentence = f"the candidate's input is {written:.6g} times the reference's"
    # The scale is certain, and the number does not show the reason.
    predicted = written * output.reference
    yield output_hypothesis(scene, output, "output_scale", "a scale", sentence, predicted, 1, telling=False)


def _widths(scene: DiffContext, output: Output) -> Mapping[float, str]:
    """Return sizes of the run whose root may be a scale, with their names."""
    widths = {float(output.reference.shape[-1]): "the width of the output"}
    heads = [layer.settings.get("num_heads") for layer in scene.runs.reference.info.layers]
    for count in heads:
        if isinstance(count, int) and count > 0 and output.reference.shape[-1] % count == 0:
            widths.setdefault(output.reference.shape[-1] / count, "the width of a head")
    return widths


def _orders(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield hypotheses on the same values in another order."""
    pair, sides = scene.diff.pair, (output.reference, output.candidate)
    head = "the candidate's output is"
    few = transforms.cropped(*sides)
    level = output.noise / 8  # `noise_of` multiplies it by its count of operations
    for transform in transforms.orders(few[0].shape):
        yield transforms.hypothesis(transform, head, "output", pair.anchor.site, few, level, scene.limit(pair))
    for axis in channel_axes(scene, output):
        order = _column_order(output, axis)
        if order is not None and not np.array_equal(order, np.arange(len(order))):
            text = f"{head} the same with axis {axis} {transforms.order_text(order)}"
            predicted = np.take(output.reference, order, axis)
            yield output_hypothesis(
                scene, output, "output_permuted", "another order of channels", text, predicted, len(order), changes=2
            )


def _column_order(output: Output, axis: int) -> np.ndarray | None:
    """Return the candidate's order of the reference's channels, by norms and means; `None` if not a permutation."""
    count = output.reference.shape[axis]
    if not 2 < count <= 4096 or output.reference.size < 4 * count:
        return None
    rows = [np.moveaxis(side, axis, 0).reshape(count, -1) for side in (output.reference, output.candidate)]
    keys = [np.stack([row.mean(axis=1), np.sqrt(np.mean(np.square(row), axis=1)), row[:, 0]], axis=1) for row in rows]
    order = [int(np.argmin(np.abs(keys[0] - key).sum(axis=1))) for key in keys[1]]
    return np.array(order) if len(set(order)) == count else None


def _grid(scene: DiffContext, output: Output) -> Iterator[Cause]:
    """Yield the cause that the values of one side are numbers of a coarser dtype."""
    grids = Both(transforms.grid_of(output.reference), transforms.grid_of(output.candidate))
    if grids.reference == grids.candidate or all(grids):
        return
    side, grid = ("reference", grids.reference) if grids.reference else ("candidate", grids.candidate)
    size = max(root(output.reference), 1e-300)
    error = root(output.candidate - output.reference) / size
    if error <= _COARSE[grid]:
        record = getattr(scene.diff.pair, side)
        if record is not None and record.dtype == grid:
            text = f"the {side}'s output is {grid} here, the other side's is not"
        else:
            text = f"the {side}'s values here are those of {grid}, though its type holds more: computed in it, or cast"
        evidence = f"all {output.reference.size} elements are {grid} numbers, the other side's are not"
        yield Cause("precision", text, True, evidence)


def _kept(site: str, actual: np.ndarray, full: np.ndarray, ratio: float, noise: float) -> Iterator[Prediction]:
    """Yield the prediction of the elements that dropout does not drop."""
    yield Prediction(site, actual, ratio * full, full, noise)


def _both_drop(scene: DiffContext) -> bool:
    """Return True if the diff comes from a layer or function that drops elements on both sides."""
    if any(difference.kind == "mode" for difference in scene.declared):
        return False
    calls = scene.place.calls if scene.place is not None else None
    if calls is not None and calls.same is not None and calls.same.reference.function:
        return all("dropout" in call.function and call.arguments.get("p") != 0 for call in calls.same)
    layers = scene.layers
    sides = () if layers is None else (layers.reference, layers.candidate)
    return bool(sides) and all("dropout" in equivalents.kind(layer) and layer.settings.get("p") for layer in sides)


def _dropout(scene: DiffContext, output: Output) -> Iterator[Hypothesis]:
    """Yield the hypothesis that one side drops elements at random and scales the others.

    If both sides drop elements, the share of zeros on one side alone is no rate.
    """
    if _both_drop(scene):
        return
    for side, swapped in (("candidate", False), ("reference", True)):
        full, dropped = (output.candidate, output.reference) if swapped else (output.reference, output.candidate)
        nonzero = full != 0
        zeroed = nonzero & (dropped == 0)
        share = float(zeroed.sum()) / max(int(nonzero.sum()), 1)
        if not 0.005 < share < 0.995:
            continue
        alive = nonzero & ~zeroed
        square = float(np.sum(np.square(full[alive])))
        ratio = float(np.sum(full[alive] * dropped[alive])) / square if square else 0.0
        rate = 1 - 1 / ratio if ratio > 1 else share
        deviation = math.sqrt(share * (1 - share) / max(int(nonzero.sum()), 1))
        if ratio <= 0 or (abs(ratio - 1) > 1e-3 and abs(rate - share) > _BY_CHANCE * deviation + 1e-3):
            continue
        rate = float(f"{rate:.3g}") if ratio > 1 + 1e-3 else share
        other = "reference" if side == "candidate" else "candidate"
        text = f"the {side} drops {share:.0%} of the elements at random (dropout of rate {rate:.3g}), the {other} none"
        predict = partial(_kept, scene.diff.pair.anchor.site, dropped[alive], full[alive], ratio, output.absolute)
        yield Hypothesis("dropout", "dropout", text, predict, "outputs", 1, 2, telling=abs(ratio - 1) > 1e-3)
