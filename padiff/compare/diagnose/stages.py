"""The likely cause of a diff, guessed from its stage and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from padiff.align import LayerPair
from padiff.compare.diagnose.values import CONSTANT, masked_apart, ratio_of, round_ratio, same_values, times, values_of
from padiff.compare.judge.scale_errors import key_of
from padiff.model import equivalents
from padiff.records import LOOP, ROOT, Both, Cause, Diff, Layer, is_functional


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
        return _forward(reference, candidate, kind, layers)
    ratio = ratio_of(reference, candidate)
    if stage == "loss":
        return _loss(ratio)
    if stage == "backward":
        return _backward(diff, reference, candidate, ratio)
    if stage == "grad":
        return _grad(ratio, step)
    return _update(diff, reference, candidate, ratio, step)


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
    return Cause("loss_term_weight", text)


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
    if ratio is not None:
        return Cause("gradient_scale", f"the gradient is {times(ratio)}")
    return _unknown("gradients of outputs agree: the cause lies between the backward and the optimizer")


def _update(
    diff: Diff, reference: np.ndarray, candidate: np.ndarray, ratio: float | None, step: Sequence[Diff]
) -> Cause:
    rates = _rates(step)
    if rates:
        return Cause("learning_rate", rates)
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


def _rates(step: Sequence[Diff]) -> str:
    """Return the learning rates of a step by parameter group as text if they differ between the runs; else empty."""
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
        return ""
    by_group = " (by parameter group)" if max(map(len, texts)) > 1 else ""
    return f"the learning rates differ: {' against '.join(map(', '.join, texts))}{by_group}"
