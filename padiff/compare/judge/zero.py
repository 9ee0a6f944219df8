"""Gradients whose true value is zero: what is computed of them is rounding noise, another on either side.

A convolution's bias before a BatchNorm has such a gradient, and an attention's key bias. No tolerance relative to
their own size can be met there, by two implementations that are equally right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from padiff.compare.judge.limits import CLEARLY, DIFFERENT, allowed
from padiff.compare.judge.step_figures import coarsest
from padiff.model import equivalents
from padiff.records import LOOP, STAGES, Diff, Figure, Rule


@dataclass(frozen=True)
class Scales:
    """How large the gradients of a step's parameters are.

    Attributes:
        layers: largest root mean square of the reference's gradients, by layer.
        outputs: norm of the gradients of a layer's outputs, all calls, where they were recorded: a bias's gradient is
            their sum.
    """

    layers: Mapping[str, float]
    outputs: Mapping[str, float]

    @classmethod
    def of(cls, diffs: Sequence[Diff]) -> Scales:
        """Those of a step, from its measured diffs."""
        squares: dict[str, float] = {}
        for diff in diffs:
            if diff.pair.stage == "backward" and diff.figures is not None and diff.compared:
                layer = diff.pair.anchor.layer
                squares[layer] = squares.get(layer, 0.0) + diff.figures.reference_l2**2
        return cls(largest_rms(diffs, "grad"), {layer: math.sqrt(square) for layer, square in squares.items()})


def is_rounding(diff: Diff, scales: Scales, level: float) -> bool:
    """Whether a gradient is nothing but rounding: tiny beside what it is made of, and another on either side.

    A bias's gradient is a sum of gradients of its layer's outputs; rounding leaves ``level`` of the root of the sum of
    their squares. Where these are not known, or for another parameter, the layer's largest gradient says how large it
    could be. That is a guess (it goes with the layer's inputs), so noise then has to differ clearly.
    """
    figures, anchor = diff.figures, diff.pair.anchor
    if figures is None or not diff.pair.complete or diff.pair.stage != "grad" or not figures.size or figures.nonfinite:
        return False
    own = max(figures.reference_l2, figures.candidate_l2)
    outputs = scales.outputs.get(anchor.layer, 0.0)
    if outputs and len(anchor.shape) == 1 and equivalents.slot(anchor.slot.partition("[")[0]).endswith("bias"):
        return own <= level * outputs and figures.l2 > DIFFERENT * own
    layer = scales.layers.get(anchor.layer, 0.0) * math.sqrt(figures.size)
    return own <= level * layer and figures.l2 > CLEARLY * own


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


def level_of(dtypes: Mapping[str, set[str]]) -> float:
    """What rounding leaves of a sum, relative to what it is a sum of, in the coarsest dtype that led to a gradient.

    Args:
        dtypes: of the step, as `padiff.compare.judge.step_figures.dtypes_of` gives them.
    """
    return allowed(coarsest(dtypes, [stage for stage in STAGES if stage not in ("loss", "update")]), "forward")


def largest_rms(diffs: Sequence[Diff], stage: str) -> dict[str, float]:
    """Largest root mean square of the reference's gradients or updates, by layer."""
    scales: dict[str, float] = {}
    for diff in diffs:
        layer = diff.pair.anchor.layer
        if diff.pair.stage == stage and layer != LOOP and diff.figures and diff.figures.size and diff.compared:
            rms = diff.figures.reference_l2 / math.sqrt(diff.figures.size)
            scales[layer] = max(scales.get(layer, 0.0), rms)
    return scales
