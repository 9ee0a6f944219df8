"""Hypotheses on the weights that a training begins with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from padiff.compare.diagnose.hypotheses import transforms
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, rounding_of, whole_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.model import equivalents
from padiff.records import Both, Cause, Diff
from padiff.system.naming import first_few

# Count of gates of recurrent cells, whose rows follow one another in a weight, by kind of layer.
_GATES = {"lstm": 4, "lstmcell": 4, "gru": 3, "grucell": 3}
# Most parameters of other layers that are compared.
_OTHERS = 200
#: Most places that a text names.
_NAMED = 3


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis | Cause]:
    """Yield hypotheses on a first diff in a weight or buffer of the first step, the simplest first.

    For a weight, the last item is the general cause that the start weights differ.
    """
    pair = scene.diff.pair
    if scene.number != 0:
        return
    sides = whole_of(pair)
    if sides is not None and sides.reference.shape == sides.candidate.shape and np.isfinite(sides.candidate).all():
        yield from _changed(scene, sides)
    if not _is_buffer(scene, scene.diff):
        yield Cause("start_weights", _others(scene), True, "they differ before the first step", _MEND)


_MEND = "padiff.start_from(reference_run, candidate_model), or one checkpoint for both, before training"


def _changed(scene: DiffContext, sides: Both[np.ndarray]) -> Iterator[Hypothesis]:
    """Yield hypotheses on changes that happened to the weight when it was copied to the candidate."""
    pair = scene.diff.pair
    name = f"{pair.anchor.layer}/{pair.anchor.slot}"
    head = f"the candidate's {name} is at the start"
    rounding, limit, shape = rounding_of(pair), scene.limit(pair), sides.reference.shape

    def of(transform: transforms.Transform) -> Hypothesis:
        return transforms.hypothesis(transform, head, "weight", pair.anchor.site, tuple(sides), rounding, limit)

    if len(shape) == 2 and shape[0] == shape[1]:
        text = "transposed: carried over without regard to (in, out) against (out, in)"
        yield of(transforms.Transform("transposed", "transposed", text, np.transpose))
    kind = equivalents.kind(scene.layers.reference) if scene.layers is not None else ""
    gates = _GATES.get(kind, 0)
    if gates and shape and shape[0] % gates == 0:
        yield from (of(transform) for transform in _gates(gates))
    order = transforms.row_order(*sides) if shape and sides.reference[0].size > 1 else None
    if order is not None and not np.array_equal(order, np.arange(len(order))):
        text = f"the same with its rows {transforms.order_text(order)}"
        yield of(transforms.Transform("rows_permuted", "rows in another order", text, lambda v: v[order], len(order)))
    columns = transforms.row_order(sides.reference, sides.candidate, 1) if len(shape) == 2 else None
    if columns is not None and not np.array_equal(columns, np.arange(len(columns))):
        text = f"the same with its columns {transforms.order_text(columns)}"
        yield of(
            transforms.Transform(
                "columns_permuted", "columns in another order", text, lambda v: v[:, columns], len(columns)
            )
        )
    for transform in transforms.orders(shape, first=0):
        yield of(transform)
    for transform in transforms.affine(*sides):
        if transform.kind == "scaled":
            yield of(transform)
    grid = transforms.grid_of(sides.candidate)
    if grid and not transforms.grid_of(sides.reference):
        text = f"rounded to {grid}: carried over by way of a checkpoint in {grid}"
        yield of(transforms.Transform("precision", grid, text, lambda v: transforms.on_grid(v, grid)))
    yield from _of_another(scene, sides, head)


def _gates(count: int) -> Iterator[transforms.Transform]:
    for order in permutations(range(count)):
        if order != tuple(range(count)):
            text = f"the same with its {count} gates in the order {', '.join(map(str, order))}"

            def make(values: np.ndarray, order: tuple[int, ...] = order) -> np.ndarray:
                return np.concatenate([np.split(values, count)[k] for k in order])

            yield transforms.Transform("gates_permuted", "gates in another order", text, make, tried=24)


def _of_another(scene: DiffContext, sides: Both[np.ndarray], head: str) -> Iterator[Hypothesis]:
    """Yield hypotheses that the weight is the reference's weight of another layer."""
    pair = scene.diff.pair
    size = 0
    for (layer, slot, _), weight in scene.pairs(scene.number, "weight").items():
        if weight is pair or weight.anchor.shape != pair.anchor.shape:
            continue
        size += 1
        values = whole_of(weight) if size <= _OTHERS else None
        if values is None or not np.allclose(
            values.reference.ravel()[:64], sides.candidate.ravel()[:64], rtol=1e-5, atol=0
        ):
            continue

        def predict(other_values: np.ndarray = values.reference) -> Iterator[Prediction]:
            noise = transforms.noise_of(other_values, rounding_of(pair))
            yield Prediction(pair.anchor.site, sides.candidate, other_values, sides.reference, noise, scene.limit(pair))

        text = f"{head} the reference's {layer}/{slot}: layers in another order"
        yield Hypothesis("weight_of_another_layer", "another layer's weight", text, predict, tried=size)


def _others(scene: DiffContext) -> str:
    """Return text on the start weights that differ, and the count of those that agree."""
    weights = [d for d in scene.diffs("weight") if d.compared and not _is_buffer(scene, d)]
    wrong = [d for d in weights if not d.passed]
    # Weights of all ones or zeros are usual initial values: their agreement shows nothing.
    weights = [d for d in weights if not d.passed or not _is_constant(d)]
    names = [f"{d.pair.anchor.layer}/{d.pair.anchor.slot}" for d in wrong]
    if len(wrong) == len(weights):
        return "the runs start from different weights: copy them over (or load one checkpoint) before training"
    return (
        f"the runs start from different weights in {first_few(names, _NAMED)}, and from equal ones in "
        f"{len(weights) - len(wrong)} others: not all were carried over"
    )


def _is_constant(diff: Diff) -> bool:
    """Return True if all elements have the same absolute value."""
    figures = diff.figures
    return figures is not None and figures.mean_reference * figures.size**0.5 >= figures.reference_l2 * (1 - 1e-6)


def _is_buffer(scene: DiffContext, diff: Diff) -> bool:
    anchor = diff.pair.anchor
    return any(
        layer.path == anchor.layer and any(p.slot == anchor.slot and p.role == "buffer" for p in layer.parameters)
        for layer in scene.runs.reference.info.layers
    )
