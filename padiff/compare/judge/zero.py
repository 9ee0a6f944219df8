"""Gradients with a true value of zero, whose computed values are rounding noise that differs between the sides.

A convolution's bias before a BatchNorm has such a gradient, and an attention's key bias. Two correct implementations
can't meet a tolerance relative to the size of such a gradient.
"""

from __future__ import annotations

import numpy as np

from padiff.compare.judge.limits import CLEARLY, DIFFERENT
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records import Diff, Figure, Rule
from padiff.records.step_batch import StepBatch


class Scales:
    """Sizes of the gradients of steps' parameters, from their measured diffs.

    Attributes:
        layers: largest root mean square of the reference's gradients of each diff's layer.
        outputs: norm of the recorded gradients of the layer's outputs, over all calls, or 0: a bias's gradient is their
            sum.
    """

    def __init__(self, block: StepBatch) -> None:
        self.layers = largest_rms(block, "grad")
        squares = block.known_of_stage("backward", block.rows["reference_l2"] ** 2, 0.0)
        self.outputs = np.sqrt(block.sites.sums_of_layers("backward", squares))


@np.errstate(all="ignore")
def rounding_gradients(block: StepBatch) -> np.ndarray:
    """Return a mask of gradients that are only rounding noise: tiny beside their inputs, and different on either side.

    A bias's gradient is a sum of gradients of its layer's outputs; rounding leaves `SiteFacts.level` of the root of the
    sum of their squares. If these are unknown, or for another parameter, the layer's largest gradient estimates the
    scale. Because that estimate depends on the layer's inputs, noise then has to differ clearly.
    """
    facts, scales, rows = block.sites.fact(SiteFacts), block.fact(Scales), block.rows

    def of_grads(values: np.ndarray) -> np.ndarray:
        return block.of_stage("grad", values)

    result = np.zeros(rows.shape, np.bool_)
    size, norms = of_grads(rows["size"]), of_grads(np.maximum(rows["reference_l2"], rows["candidate_l2"]))
    outputs = of_grads(scales.outputs)
    sums = (outputs != 0) & of_grads(facts.biases)
    most = facts.level * np.where(sums, outputs, of_grads(scales.layers) * np.sqrt(size))
    small = of_grads(block.known) & (norms <= most) & (size > 0) & (of_grads(rows["nonfinite"]) == 0)
    if small.any():
        differ = of_grads(rows["l2"]) > np.where(sums, DIFFERENT, CLEARLY) * norms
        result[:, block.sites.places["grad"]] = small & differ
    return result


def is_nothing(diff: Diff) -> bool:
    """Return True if a lone gradient or update is all zeros, which the other framework represents by no tensor."""
    figures = diff.figures
    zero = figures is not None and figures.reference_l2 == figures.candidate_l2 == 0 and figures.size > 0
    return zero and diff.pair.stage in ("grad", "update")


def noted(diff: Diff) -> Diff:
    """Return the diff of a gradient, passed as rounding noise around zero."""
    figures = diff.figures
    assert figures is not None
    # Two unrelated tensors differ by at most the sum of their norms.
    most = (figures.reference_l2 + figures.candidate_l2) / (figures.reference_l2 or 1.0)
    value = figures.l2 / (figures.reference_l2 or 1.0)
    return diff.judged(True, Figure.AROUND_ZERO, value, max(most, value), Rule.AROUND_ZERO)


def largest_rms(block: StepBatch, stage: str) -> np.ndarray:
    """Return the largest root mean square of the reference's gradients or updates, of each diff's layer."""
    sites, size = block.sites, block.of_stage(stage, block.rows["size"])
    # Empty tensors have no root mean square; the loop's numbers are no gradients.
    is_gradient = block.of_stage(stage, block.known & ~sites.fact(SiteFacts).of_loop) & (size > 0)
    rms = np.where(is_gradient, block.of_stage(stage, block.rows["reference_l2"]) / np.sqrt(np.maximum(size, 1)), 0.0)
    return np.asarray(np.fmax(sites.largest_of_layers(stage, rms), 0.0))
