"""The gradients of a first diff's step, and the sums that gradients of biases consist of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import (
    DiffContext,
    Place,
    is_elements,
    place_of,
    rounding_of,
    values_of,
    whole_of,
)
from padiff.compare.diagnose.hypotheses.hypothesis import Prediction
from padiff.model import equivalents
from padiff.records import SIDES, Both, Diff, Pair
from padiff.system.naming import first_few

#: Most elements of a gradient that are compared.
LOOKED_AT = 2048
#: Difference of the gradients of two correct implementations: a multiple of the difference of the outputs' gradients,
#: at least a count of rounding units, and at most the share of the tensor above which a gradient shows nothing.
_OF_OUTPUTS, _ROUNDINGS, AT_MOST = 4.0, 32.0, 1e-3
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
    places: tuple[Place, ...]
    elements: tuple[bool, ...]
    failed: tuple[bool, ...]
    norms: Mapping[Place, Both[float]]

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


def bias_sums(scene: DiffContext, number: int) -> list[tuple[Pair, Both[list[np.ndarray]]]]:
    """Return gradients of biases, each with the sums of the output's gradient over each call of the layer.

    The sums show the gradient as the backward computed it, before clipping or scaling changed it for the optimizer.
    """
    kinds = {p.reference.path: equivalents.group_of_kinds(equivalents.kind(p.reference)) for p in scene.alignment.pairs}
    outputs: dict[str, list[Pair]] = {}
    for pair in scene.pairs(number, "backward").values():
        outputs.setdefault(pair.anchor.layer, []).append(pair)
    rows = []
    for (layer, slot, call), pair in scene.pairs(number, "grad").items():
        if call or equivalents.slot(slot) != "bias" or kinds.get(layer) not in ("linear", "conv"):
            continue
        calls = sorted(outputs.get(layer, ()), key=lambda call: call.anchor.call)
        sums = [_summed(output, kinds[layer], pair.anchor.shape) for output in calls]
        if sums and all(total is not None for total in sums):
            sides = [total for total in sums if total is not None]
            rows.append((pair, Both([s.reference for s in sides], [s.candidate for s in sides])))
    return rows


def _summed(pair: Pair, kind: str, shape: tuple[int, ...]) -> Both[np.ndarray] | None:
    values = whole_of(pair)
    if values is None or len(shape) != 1 or values.reference.ndim < 2:
        return None
    axis = values.reference.ndim - 1 if kind == "linear" else 1
    if values.reference.shape[axis] != shape[0]:
        return None
    axes = tuple(k for k in range(values.reference.ndim) if k != axis)
    return values.map(lambda v: np.asarray(v.sum(axis=axes)))


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
                pairs.append((getattr(gradients, side).ravel(), sum(getattr(sums, side))))
        for got, gave in pairs:
            above, below = above + float(got @ gave), below + float(gave @ gave)
        ratio = above / below if below > 0 else None
        if ratio is not None:
            error = sum(float(np.sum(np.square(got - ratio * gave))) for got, gave in pairs)
            total = sum(float(np.sum(np.square(got))) for got, _ in pairs)
            ratio = ratio if error <= AT_MOST**2 * total else None
        ratios.append(ratio)
    return Both(*ratios)
