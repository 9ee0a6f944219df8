"""Hypotheses on normalisations and softmax, from their outputs alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis
from padiff.compare.diagnose.hypotheses.layer_output import (
    Output,
    channel_axes,
    has_statistics,
    is_norm,
    named,
    near,
    output_hypothesis,
)
from padiff.compare.diagnose.kernels import activations
from padiff.records import Both

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
            if near(activations.softmax(layer_input, axis), reference, output):
                for second in range(layer_input.ndim):
                    if second != axis:
                        text = (
                            f"the candidate takes the softmax over axis {second} for the reference's {axis} (of {site})"
                        )
                        predicted = activations.softmax(layer_input, second)
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
