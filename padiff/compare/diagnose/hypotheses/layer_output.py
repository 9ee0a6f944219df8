"""The output at which two runs differ first, with the inputs, channels and parameters of its layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, rounding_of, whole_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.model import equivalents
from padiff.records import Diff

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
    diffs = [d for d in scene.diffs("forward", "input") if d.passed and d.pair.complete and d.pair.anchor.order < order]
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
) -> Hypothesis:
    """Return a hypothesis that predicts the values of the output itself."""
    pair = scene.diff.pair

    def predict() -> Iterator[Prediction]:
        limit = scene.limit(pair)
        yield Prediction(pair.anchor.site, output.candidate, predicted, output.reference, output.absolute, limit)

    return Hypothesis(kind, name, text, predict, "outputs", free, tried, changes, telling=telling)


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
    layer = scene.diff.pair.anchor.layer
    parameters = []
    for pair in scene.pairs(scene.number, "weight").values():
        path, name = pair.anchor.layer, equivalents.slot(pair.anchor.slot)
        if (path == layer or path.startswith(f"{layer}.")) and name == slot:
            values = whole_of(pair)
            if values is not None:
                parameters.append((f"{path}/{pair.anchor.slot}", values.reference))
    return parameters


def near(made: np.ndarray, values: np.ndarray, output: Output) -> bool:
    """Return True if two tensors are equal up to rounding."""
    with np.errstate(all="ignore"):
        return bool(root(made - values) <= 3 * output.absolute)


def root(values: np.ndarray) -> float:
    """Return the root of the mean square; 0 for an empty array."""
    return math.sqrt(float(np.mean(np.square(values)))) if values.size else 0.0
