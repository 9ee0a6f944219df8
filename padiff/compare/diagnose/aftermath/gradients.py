"""Gradients of parameters that are not made of what the candidate's own layers were given and got back."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.aftermath.fault import Fault
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.recompute.recorded import Recorded, as_float64
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import LOOP, Both, Cause, Diff, Layer, Record

# Parameters that are looked at, and numbers of a layer's input or output.
_MOST, _ELEMENTS = 60, 2_000_000
# What is left of a gradient that is a multiple of what it is made of; how far multiples of one training may be apart;
# how far off a gradient is that is made of something else. Chosen.
_LEFT, _ALIKE, _ANOTHER = 1e-3, 2e-3, 0.1
# Parameters that have to tell the same.
_FEWEST = 3


@dataclass(frozen=True)
class _Made:
    """A side's gradients, beside what they are made of.

    Attributes:
        factors: by place, what each gradient is as a multiple of what it is made of.
        left: what is left of each, as a share of itself.
    """

    factors: dict[tuple[str, str], float]
    left: dict[tuple[str, str], float]

    def only(self, places: Collection[tuple[str, str]]) -> _Made:
        """What is known of some parameters."""
        return _Made(*({p: one for p, one in some.items() if p in places} for some in (self.factors, self.left)))

    def common(self) -> float | None:
        """The multiple that all gradients are; `None` if there is none."""
        if len(self.factors) < _FEWEST or max(self.left.values()) > _LEFT:
            return None
        middle = float(np.median(list(self.factors.values())))
        return middle if all(abs(one - middle) <= _ALIKE * abs(middle) for one in self.factors.values()) else None


def own_fault(scene: Scene, sides: Both[Recorded]) -> Fault | None:
    """Of a step whose gradients differ: what is wrong with them whatever the layers got; `None`: nothing that shows."""
    wrong = next((d for d in scene.diffs("grad") if not d.passed and d.pair.complete), None)
    if wrong is None or any(side.info.world_size > 1 for side in sides):
        return None
    try:
        with np.errstate(all="ignore"):
            made = _made(scene, sides)
            norms = sides.map(_norm)
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None
    one = made.reference.common()
    if one is None or not one > 0:
        return None
    other = made.candidate.common()
    cause = _other_gradients(made) if other is None else _other_factor(Both(one, other), norms)
    return None if cause is None else Fault(wrong, cause, kind="gradients")


def _other_factor(factors: Both[float], norms: Both[float]) -> Cause | None:
    """What makes gradients another multiple: clipping does, which goes with their norm."""
    one, other = factors
    if abs(other - one) <= 3 * _ALIKE * abs(one):
        return None
    proven = "gradients are what the layers' own inputs and output gradients make, times one number"
    before = Both(norms.reference / one, norms.candidate / other) if other else norms
    if one < 1 - _ALIKE and other > 0:
        # The reference clips, to this norm.
        limit = norms.reference
        if abs(norms.candidate - limit) <= 3 * _ALIKE * limit or (
            abs(other - 1) <= _ALIKE and before.candidate <= limit * (1 + 3 * _ALIKE)
        ):
            return None
        if abs(other - 1) <= _ALIKE:
            text = (
                f"the candidate's gradients are not clipped: their norm is {norms.candidate:.4g}, the reference's are "
                f"clipped to {limit:.4g}"
            )
            return Cause("clip_missing", text, True, proven)
        text = (
            f"the candidate's gradients are clipped to a norm of {norms.candidate:.4g}, the reference's to {limit:.4g}"
        )
        return Cause("clip_limit", text, True, proven) if other < 1 else _scaled(factors, proven)
    if abs(one - 1) <= _ALIKE and other < 1 and norms.candidate >= norms.reference * (1 - 3 * _ALIKE):
        return None  # both may clip by a norm that the reference's gradients do not come to
    return _scaled(factors, proven)


def _scaled(factors: Both[float], proven: str) -> Cause:
    one, other = factors
    text = (
        f"the candidate's gradients are {other:.5g} times what its layers' own inputs and output gradients make, the "
        f"reference's {one:.5g} times"
    )
    return Cause("gradient_scale", text, True, proven)


def _other_gradients(made: Both[_Made]) -> Cause | None:
    left = made.candidate.left
    if len(left) < _FEWEST or min(left.values()) < _ANOTHER:
        return None
    text = (
        "the candidate's gradients are not what its layers' own inputs and output gradients make, the reference's are: "
        "something is added to them, left from a step before, or taken off"
    )
    return Cause("gradients_changed", text, True, f"{len(left)} parameters' gradients were computed in float64")


def _norm(side: Recorded) -> float:
    """The norm of all gradients that the optimizer got."""
    squares = 0.0
    for record in side.step.records:
        if record.stage == "grad" and record.layer != LOOP:
            squares += float(np.sum(np.square(record.value.astype(np.float64))))
    return math.sqrt(squares)


def _made(scene: Scene, sides: Both[Recorded]) -> Both[_Made]:
    found = Both(_Made({}, {}), _Made({}, {}))
    gradients = sides.map(
        lambda side: {(r.layer, r.slot): r for r in side.step.records if r.stage == "grad" and r.layer != LOOP}
    )
    for diff in _spread(scene):
        pair = diff.pair
        both = []
        for side, own, record in zip(sides, gradients, pair.sides):
            known = None if record is None else own.get((record.layer, record.slot))
            made = None if known is None else _expected(side, known)
            both.append(None if made is None or known is None else (made, as_float64(known.value)))
        if any(one is None for one in both):
            continue
        place = pair.anchor.layer, pair.anchor.slot
        for side_made, one in zip(found, both):
            assert one is not None
            made, actual = one
            square = float(np.sum(np.square(made)))
            norm = float(np.linalg.norm(actual))
            if not square or not norm or made.shape != actual.shape:
                continue
            factor = float(np.sum(made * actual)) / square
            side_made.factors[place] = factor
            side_made.left[place] = float(np.linalg.norm(actual - factor * made)) / norm
    both_have = found.reference.factors.keys() & found.candidate.factors.keys()
    return found.map(lambda side: side.only(both_have))


def _spread(scene: Scene) -> Iterator[Diff]:
    """Gradients of matrices and biases whose own size is no rounding noise, spread over the model."""
    diffs = [d for d in scene.diffs("grad") if d.pair.complete and d.figures is not None]
    sizes = [d.figures.reference_l2 / math.sqrt(max(d.figures.size, 1)) for d in diffs if d.figures is not None]
    largest = max(sizes, default=0.0)
    some = [d for d, size in zip(diffs, sizes) if size > 1e-3 * largest]
    yield from some[:: max(1, -(-len(some) // _MOST))]


def _expected(side: Recorded, gradient: Record) -> np.ndarray | None:
    """A parameter's gradient, in float64, from what went into its layer and what came back; `None`: not known."""
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
            made = _summed_norm(out, gradient.shape) if kind in ("layernorm",) else out.sum(axis=axes)
        elif tensor.source.sketched or tensor.dtype not in ("float32", "int64", "int32"):
            return None
        elif kind == "linear":
            x = as_float64(tensor.source.read())
            made = out.reshape(-1, out.shape[-1]).T @ x.reshape(-1, x.shape[-1])
            if made.shape != gradient.shape or _in_out(side, layer, gradient.slot):
                made = made.T
        else:
            ids = tensor.source.read().ravel()
            made = np.zeros(gradient.shape)
            np.add.at(made, ids, out.reshape(-1, out.shape[-1]))
            index = layer.settings.get("padding_idx")
            if isinstance(index, int):
                made[index] = 0.0
        total = made if total is None else total + made
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
    """Whether a parameter has other names, or functions use it, too."""
    own = f"{layer.path}/{slot}"
    if any(own in call.parameters for call in side.graph.trace.calls if call.layer != layer.path):
        return True
    return any(
        (p.tied_to == own) or (one.path == layer.path and p.slot == slot and bool(p.tied_to))
        for one in side.info.layers
        for p in one.parameters
    )
