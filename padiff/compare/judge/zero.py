"""Gradients whose true value is zero: what is computed of them is rounding noise, another on either side.

A convolution's bias before a BatchNorm has such a gradient, and an attention's key bias. No tolerance relative to
their own size can be met there, by two implementations that are equally right.
"""

from __future__ import annotations

import numpy as np

from padiff.compare.judge.limits import CLEARLY, DIFFERENT
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records import Diff, Figure, Rule
from padiff.records.block import Block


class Scales:
    """How large the gradients of steps' parameters are, from their measured diffs.

    Attributes:
        layers: largest root mean square of the reference's gradients of each diff's layer.
        outputs: norm of the gradients of the layer's outputs, all calls, where they were recorded, else 0: a bias's
            gradient is their sum.
    """

    def __init__(self, block: Block) -> None:
        self.layers = largest_rms(block, "grad")
        squares = block.known_of_stage("backward", block.rows["reference_l2"] ** 2, 0.0)
        self.outputs = np.sqrt(block.sites.sums_of_layers("backward", squares))


@np.errstate(all="ignore")
def rounding_gradients(block: Block) -> np.ndarray:
    """Which gradients are nothing but rounding: tiny beside what they are made of, and another on either side.

    A bias's gradient is a sum of gradients of its layer's outputs; rounding leaves `SiteFacts.level` of the root of the
    sum of their squares. Where these are not known, or for another parameter, the layer's largest gradient says how
    large it could be. That is a guess (it goes with the layer's inputs), so noise then has to differ clearly.
    """
    facts, scales, rows = block.sites.fact(SiteFacts), block.fact(Scales), block.rows

    def of_grads(values: np.ndarray) -> np.ndarray:
        return block.of_stage("grad", values)

    found = np.zeros(rows.shape, np.bool_)
    size, own = of_grads(rows["size"]), of_grads(np.maximum(rows["reference_l2"], rows["candidate_l2"]))
    outputs = of_grads(scales.outputs)
    sums = (outputs != 0) & of_grads(facts.biases)
    most = facts.level * np.where(sums, outputs, of_grads(scales.layers) * np.sqrt(size))
    small = of_grads(block.known) & (own <= most) & (size > 0) & (of_grads(rows["nonfinite"]) == 0)
    if small.any():
        differ = of_grads(rows["l2"]) > np.where(sums, DIFFERENT, CLEARLY) * own
        found[:, block.sites.places["grad"]] = small & differ
    return found


def is_nothing(diff: Diff) -> bool:
    """Whether a lone gradient or update is all zeros: what one framework has for none where the other has nothing."""
    figures = diff.figures
    zero = figures is not None and figures.reference_l2 == figures.candidate_l2 == 0 and figures.size > 0
    return zero and diff.pair.stage in ("grad", "update")


def noted(diff: Diff) -> Diff:
    """A gradient that passes as rounding noise around zero, and says so."""
    figures = diff.figures
    assert figures is not None
    # Two unrelated tensors differ by at most the sum of their sizes, whatever share of either that is.
    most = (figures.reference_l2 + figures.candidate_l2) / (figures.reference_l2 or 1.0)
    value = figures.l2 / (figures.reference_l2 or 1.0)
    return diff.judged(True, Figure.AROUND_ZERO, value, max(most, value), Rule.AROUND_ZERO)


def largest_rms(block: Block, stage: str) -> np.ndarray:
    """Largest root mean square of the reference's gradients or updates, of each diff's layer."""
    sites, size = block.sites, block.of_stage(stage, block.rows["size"])
    # Of nothing there is no such root; the loop's own numbers are no gradients.
    known = block.of_stage(stage, block.known & ~sites.fact(SiteFacts).of_loop) & (size > 0)
    rms = np.where(known, block.of_stage(stage, block.rows["reference_l2"]) / np.sqrt(np.maximum(size, 1)), 0.0)
    return np.asarray(np.fmax(sites.largest_of_layers(stage, rms), 0.0))
