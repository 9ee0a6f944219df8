"""Gradients of parameters that do not fit the inputs and output gradients of the candidate's own layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.followups.fault import Fault
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.recompute.recorded import Recorded, as_float64
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import LOOP, Both, Cause, Diff, Layer, Record

# The most parameters that are checked, and the most elements of a layer's input or output.
_MOST, _ELEMENTS = 60, 2_000_000
# The largest remaining error of a gradient that is a multiple of the computed one; the largest relative spread of these
# multiples in one training; the smallest remaining error of a gradient that is computed in another way. Chosen.
_LEFT, _ALIKE, _ANOTHER = 1e-3, 2e-3, 0.1
# The fewest parameters that have to agree.
_FEWEST = 3


@dataclass(frozen=True)
class _Made:
    """Gradients of one side, compared with the gradients computed from recorded inputs and output gradients.

    Attributes:
        factors: the ratio of the recorded to the computed gradient, by layer and slot.
        left: the remaining error after scaling by that ratio, as a share of the gradient's norm, by layer and slot.
    """

    factors: dict[tuple[str, str], float]
    left: dict[tuple[str, str], float]

    def only(self, places: Collection[tuple[str, str]]) -> _Made:
        """Return the entries of some parameters."""
        return _Made(
            *({p: value for p, value in values.items() if p in places} for values in (self.factors, self.left))
        )

    def common(self) -> float | None:
        """Return the ratio that all gradients share; `None` if there is none."""
        if len(self.factors) < _FEWEST or max(self.left.values()) > _LEFT:
            return None
        middle = float(np.median(list(self.factors.values())))
        return middle if all(abs(factor - middle) <= _ALIKE * abs(middle) for factor in self.factors.values()) else None


def own_fault(scene: DiffContext, sides: Both[Recorded]) -> Fault | None:
    """Return a fault of the gradients that is independent of what the layers got; `None` if the gradients show none.

    Args:
        scene: a step whose gradients differ.
        sides: the recorded tensors of either side.
    """
    wrong = next((d for d in scene.diffs("grad") if not d.passed and d.pair.complete), None)
    if wrong is None or any(side.info.world_size > 1 for side in sides):
        return None
    try:
        with np.errstate(all="ignore"):
            fits = _made(scene, sides)
            norms = sides.map(_norm)
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None
    reference_factor = fits.reference.common()
    if reference_factor is None or not reference_factor > 0:
        return None
    candidate_factor = fits.candidate.common()
    cause = (
        _other_gradients(fits)
        if candidate_factor is None
        else _other_factor(Both(reference_factor, candidate_factor), norms)
    )
    return None if cause is None else Fault(wrong, cause, kind="gradients")


def _other_factor(factors: Both[float], norms: Both[float]) -> Cause | None:
    """Return a cause for gradients with another ratio: clipping if the gradient norms fit clipping, else a scale."""
    expected, actual = factors
    if abs(actual - expected) <= 3 * _ALIKE * abs(expected):
        return None
    proven = "gradients are what the layers' own inputs and output gradients make, times one number"
    before = Both(norms.reference / expected, norms.candidate / actual) if actual else norms
    if expected < 1 - _ALIKE and actual > 0:
        # The reference clips, to this norm.
        limit = norms.reference
        if abs(norms.candidate - limit) <= 3 * _ALIKE * limit or (
            abs(actual - 1) <= _ALIKE and before.candidate <= limit * (1 + 3 * _ALIKE)
        ):
            return None
        if abs(actual - 1) <= _ALIKE:
            text = (
                f"the candidate's gradients are not clipped: their norm is {norms.candidate:.4g}, the reference's are "
                f"clipped to {limit:.4g}"
            )
            return Cause("clip_missing", text, True, proven)
        text = (
            f"the candidate's gradients are clipped to a norm of {norms.candidate:.4g}, the reference's to {limit:.4g}"
        )
        return Cause("clip_limit", text, True, proven) if actual < 1 else _scaled(factors, proven)
    if abs(expected - 1) <= _ALIKE and actual < 1 and norms.candidate >= norms.reference * (1 - 3 * _ALIKE):
        return None  # both sides may clip to a norm that the reference's gradients do not reach
    return _scaled(factors, proven)


def _scaled(factors: Both[float], proven: str) -> Cause:
    expected, actual = factors
    text = (
        f"the candidate's gradients are {actual:.5g} times what its layers' own inputs and output gradients make, the "
        f"reference's {expected:.5g} times"
    )
    return Cause("gradient_scale", text, True, proven)


def _other_gradients(fits: Both[_Made]) -> Cause | None:
    errors = fits.candidate.left
    if len(errors) < _FEWEST or min(errors.values()) < _ANOTHER:
        return None
    text = (
        "the candidate's gradients are not what its layers' own inputs and output gradients make, the reference's are: "
        "something is added to them, left from a step before, or taken off"
    )
    return Cause("gradients_changed", text, True, f"{len(errors)} parameters' gradients were computed in float64")


def _norm(side: Recorded) -> float:
    """Return the norm of all gradients that the optimizer got."""
    squares = 0.0
    for record in side.step.records:
        if record.stage == "grad" and record.layer != LOOP:
            squares += float(np.sum(np.square(record.value.astype(np.float64))))
    return math.sqrt(squares)


def _made(scene: DiffContext, sides: Both[Recorded]) -> Both[_Made]:
    fits = Both(_Made({}, {}), _Made({}, {}))
    gradients = sides.map(
        lambda side: {(r.layer, r.slot): r for r in side.step.records if r.stage == "grad" and r.layer != LOOP}
    )
    for diff in _spread(scene):
        pair = diff.pair
        both = []
        for side, side_gradients, record in zip(sides, gradients, pair.sides):
            gradient = None if record is None else side_gradients.get((record.layer, record.slot))
            computed = None if gradient is None else _expected(side, gradient)
            both.append(None if computed is None or gradient is None else (computed, as_float64(gradient.value)))
        if any(arrays is None for arrays in both):
            continue
        place = pair.anchor.layer, pair.anchor.slot
        for side_made, arrays in zip(fits, both):
            assert arrays is not None
            computed, actual = arrays
            square = float(np.sum(np.square(computed)))
            norm = float(np.linalg.norm(actual))
            if not square or not norm or computed.shape != actual.shape:
                continue
            factor = float(np.sum(computed * actual)) / square
            side_made.factors[place] = factor
            side_made.left[place] = float(np.linalg.norm(actual - factor * computed)) / norm
    both_have = fits.reference.factors.keys() & fits.candidate.factors.keys()
    return fits.map(lambda side: side.only(both_have))


def _spread(scene: DiffContext) -> Iterator[Diff]:
    """Yield diffs of gradients that are larger than rounding noise, spread over the model."""
    diffs = [d for d in scene.diffs("grad") if d.pair.complete and d.figures is not None]
    sizes = [d.figures.reference_l2 / math.sqrt(max(d.figures.size, 1)) for d in diffs if d.figures is not None]
    largest = max(sizes, default=0.0)
    large = [d for d, size in zip(diffs, sizes) if size > 1e-3 * largest]
    yield from large[:: max(1, -(-len(large) // _MOST))]


def _expected(side: Recorded, gradient: Record) -> np.ndarray | None:
    """Return a parameter's gradient in float64, computed from the recorded input and output gradient of its layer.

    `None` if they were not recorded or if this kind of layer is not supported.
    """
    layer = side.layers.get(gradient.layer)
    if layer is None or layer.children or _is_shared(side, layer, gradient.slot) or gradient.dtype != "float32":
        return None
    kind, slot = equivalents.kind(layer), equivalents.slot(gradient.slot)
    simple = kind == "linear" or (slot == "bias" and ("norm" in kind or kind.startswith("conv"))) or kind == "embedding"
    calls = [call for call in side.graph.trace.calls if call.layer == layer.path and not call.function]
    back = {r.call: r for r in side.step.records if r.stage == "backward" and r.layer == layer.path}
    if not simple or not calls or {call.call for call in calls} != back.keys():
        return None
    total: np.ndarray | None = None
    for call in calls:
        if len(call.inputs) != 1 or len(call.outputs) != 1:
            return None
        tensor, came = side.graph.trace.tensors[call.inputs[0].tensor], back[call.call]
        if tensor.source is None or came.source.sketched or came.dtype != "float32":
            return None
        if math.prod(came.shape) > _ELEMENTS or math.prod(tensor.shape) > _ELEMENTS:
            return None
        out = as_float64(came.value) / side.step.loss_scale
        if slot == "bias":
            axes = tuple(k for k in range(out.ndim) if k != _channel_axis(kind, out.ndim))
            part = _summed_norm(out, gradient.shape) if kind in ("layernorm",) else out.sum(axis=axes)
        elif tensor.source.sketched or tensor.dtype not in ("float32", "int64", "int32"):
            return None
        elif kind == "linear":
            x = as_float64(tensor.source.read())
            part = out.reshape(-1, out.shape[-1]).T @ x.reshape(-1, x.shape[-1])
            if part.shape != gradient.shape or _in_out(side, layer, gradient.slot):
                part = part.T
        else:
            ids = tensor.source.read().ravel()
            part = np.zeros(gradient.shape)
            np.add.at(part, ids, out.reshape(-1, out.shape[-1]))
            index = layer.settings.get("padding_idx")
            if isinstance(index, int):
                part[index] = 0.0
        total = part if total is None else total + part
    return None if total is None or total.size != math.prod(gradient.shape) else total.reshape(gradient.shape)


def _summed_norm(out: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    return np.asarray(out.reshape(-1, size).sum(axis=0))


def _channel_axis(kind: str, ndim: int) -> int:
    return ndim - 1 if kind in ("linear", "layernorm", "rmsnorm") or ndim < 3 else 1


def _in_out(side: Recorded, layer: Layer, slot: str) -> bool:
    parameter = next(p for p in layer.parameters if p.slot == slot)
    return equivalents.layout(layer, parameter) == "in_out"


def _is_shared(side: Recorded, layer: Layer, slot: str) -> bool:
    """Return True if a parameter has other names, or is also used by calls outside of its layer."""
    name = f"{layer.path}/{slot}"
    if any(name in call.parameters for call in side.graph.trace.calls if call.layer != layer.path):
        return True
    return any(
        (p.tied_to == name) or (info_layer.path == layer.path and p.slot == slot and bool(p.tied_to))
        for info_layer in side.info.layers
        for p in info_layer.parameters
    )
