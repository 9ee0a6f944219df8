"""Outputs of layers in float64, computed from inputs, parameters and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.compare.diagnose.kernels import activations
from padiff.compare.diagnose.kernels.norms import by_statistics, grouped, normalised
from padiff.compare.diagnose.kernels.tables import looked_up
from padiff.compare.diagnose.recompute.partial_outputs import Part, convolution, pooling
from padiff.compare.diagnose.recompute.partial_outputs import whole as _whole
from padiff.frameworks.conventions import conventions_of

# Most products to compute for a layer: of larger layers only a part of the outputs is computed.
_MOST = 20_000_000


@dataclass(frozen=True)
class Call:
    """A recorded call of a layer.

    Attributes:
        kind: kind of the layer, with a name common to both frameworks.
        inputs: the inputs; floating-point numbers are float64.
        weights: the layer's parameters and statistics by their common names, a linear layer's matrix as (out, in).
        settings: the layer's settings.
        training: True in training mode; `None` if unknown.
        shape: shape of the output.
        framework: name of the layer's framework.
        eps: rounding unit of the dtype that the layer computes in, the default of an epsilon.
    """

    kind: str
    inputs: Sequence[np.ndarray]
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: bool | None = None
    shape: tuple[int, ...] = ()
    framework: str = ""
    eps: float = 2.0**-23

    def setting(self, name: str, default: float | None = None) -> float:
        """Return a numeric setting.

        Raises:
            KeyError: the setting is missing without a default, or is no number.
        """
        value = self.settings.get(name, default)
        if not isinstance(value, (int, float)):
            raise KeyError(name)
        return float(value)


def is_known(kind: str) -> bool:
    """Return True if this module can compute a kind of layer."""
    return kind in _LAYERS


def computed(call: Call) -> Part | None:
    """Return the output of a call, or a part; `None` if this module can't compute the call."""
    compute = _LAYERS.get(call.kind)
    if compute is None or not call.inputs:
        return None
    try:
        with np.errstate(all="ignore"):
            return compute(call)
    except (KeyError, ValueError, IndexError, TypeError):
        return None  # a weight or setting is missing, or shapes do not fit


# -- products ----------------------------------------------------------------------------------------------------------


def _linear(call: Call) -> Part:
    x, weight = call.inputs[0], call.weights["weight"]
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(x.shape)
    rows = x.reshape(-1, x.shape[-1])
    count = min(len(rows), max(1, _MOST // max(weight.size, 1)))
    picked = np.linspace(0, len(rows) - 1, count).astype(np.int64)
    result = rows[picked] @ weight.T
    if "bias" in call.weights:
        result = result + call.weights["bias"].ravel()
    return Part(result, lambda out: out.reshape(-1, len(weight))[picked])


def _embedding(call: Call) -> Part:
    ids, weight = call.inputs[0], call.weights["weight"]
    if ids.dtype.kind not in "iu":
        raise ValueError(ids.dtype)
    flat = ids.ravel()[: max(1, _MOST // (20 * weight.shape[-1]))]
    index = call.settings.get("padding_idx")
    zeros = conventions_of(call.framework).pads_with_zeros and isinstance(index, int)
    return Part(
        looked_up(flat, weight, index if zeros else None), lambda out: out.reshape(-1, weight.shape[-1])[: len(flat)]
    )


def _conv(call: Call) -> Part:
    return convolution(call.inputs[0], call.weights["weight"], call.weights.get("bias"), call.settings, _MOST)


def _pool(how: str) -> Callable[[Call], Part]:
    return lambda call: pooling(call.inputs[0], how, call.settings, call.shape)


# -- normalisations ----------------------------------------------------------------------------------------------------


def _scaled(call: Call, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for slot, combine in (("weight", np.multiply), ("bias", np.add)):
        if slot in call.weights:
            x = combine(x, call.weights[slot].reshape(shape))
    return x


def _of_last_axes(call: Call) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the input, and the shape of its normalised axes: as many last axes as the weight has elements for."""
    x, size = call.inputs[0], call.weights["weight"].size
    shape: tuple[int, ...] = ()
    for extent in reversed(x.shape):
        if math.prod(shape) >= size and shape:
            break
        shape = (extent, *shape)
    if math.prod(shape) != size:
        raise ValueError(x.shape)
    return x, shape


def _layer_norm(call: Call) -> Part:
    x, shape = _of_last_axes(call)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    return _whole(_scaled(call, normalised(x, axes, call.setting("eps")), shape))


def _rms_norm(call: Call) -> Part:
    x, shape = _of_last_axes(call)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    return _whole(_scaled(call, normalised(x, axes, call.setting("eps", call.eps), centred=False), shape))


def _channels(x: np.ndarray) -> tuple[int, ...]:
    return (1, -1) + (1,) * (x.ndim - 2)


def _batch_norm(call: Call) -> Part:
    x, eps = call.inputs[0], call.setting("eps")
    if call.training is None:
        raise KeyError("training")
    if call.training or "running_mean" not in call.weights:
        result = normalised(x, (0, *range(2, x.ndim)), eps)
    else:
        result = by_statistics(x, call.weights["running_mean"], call.weights["running_var"], eps, train=False)
    return _whole(_scaled(call, result, _channels(x)))


def _instance_norm(call: Call) -> Part:
    x = call.inputs[0]
    if "running_mean" in call.weights and not call.training:
        raise KeyError("training")
    return _whole(_scaled(call, normalised(x, tuple(range(2, x.ndim)), call.setting("eps")), _channels(x)))


def _group_norm(call: Call) -> Part:
    x, groups = call.inputs[0], int(call.setting("num_groups"))
    return _whole(_scaled(call, grouped(x, groups, call.setting("eps")), _channels(x)))


# -- element by element ------------------------------------------------------------------------------------------------


def _each(function: activations.Function) -> Callable[[Call], Part]:
    return lambda call: _whole(function(call.inputs[0]))


def _gelu(call: Call) -> Part:
    tanh = call.settings.get("approximate", "none") == "tanh"
    return _whole((activations.gelu_tanh if tanh else activations.gelu)(call.inputs[0]))


def _elu(call: Call) -> Part:
    return _whole(activations.act(call.inputs[0], "ELU", call.setting("alpha", 1.0)))


def _celu(call: Call) -> Part:
    x, alpha = call.inputs[0], call.setting("alpha", 1.0)
    return _whole(np.where(x > 0, x, alpha * np.expm1(np.minimum(x / alpha, 0))))


def _softplus(call: Call) -> Part:
    return _whole(activations.act(call.inputs[0], "softplus", call.setting("beta", 1.0)))


def _prelu(call: Call) -> Part:
    x, slope = call.inputs[0], call.weights["weight"]
    return _whole(np.where(x > 0, x, (slope.reshape(_channels(x)) if slope.size > 1 else slope.item()) * x))


def _softmax(call: Call) -> Part:
    """Return a softmax over the axis that fits the recorded output best, as the set axis is not recorded."""
    x = call.inputs[0]
    return Part(x, lambda out: out, of=lambda out: _by_axis(x, out, activations.softmax))


def _log_softmax(call: Call) -> Part:
    x = call.inputs[0]
    return Part(x, lambda out: out, of=lambda out: _by_axis(x, out, lambda v, k: np.log(activations.softmax(v, k))))


def _by_axis(x: np.ndarray, out: np.ndarray, function: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    results = [function(x, axis) for axis in range(x.ndim) if x.shape[axis] > 1]
    return min(results, key=lambda result: float(np.linalg.norm(result - out)))


def _dropout(call: Call) -> Part:
    if call.training is not False and call.settings.get("p") != 0:
        raise KeyError("training")  # the dropped elements are not recorded
    return _whole(call.inputs[0])


def _flatten(call: Call) -> Part:
    return _whole(call.inputs[0].reshape(call.shape))


_FUNCTIONS = {
    "relu": "ReLU", "relu6": "ReLU6", "swish": "SiLU", "mish": "Mish", "tanh": "tanh", "sigmoid": "sigmoid",
    "selu": "SELU", "hardswish": "Hardswish", "hardsigmoid": "Hardsigmoid",
}  # fmt: skip
_LAYERS: dict[str, Callable[[Call], Part]] = {
    **{kind: _each(activations.FUNCTIONS[name]) for kind, name in _FUNCTIONS.items()},
    "softsign": _each(lambda x: x / (1 + np.abs(x))),
    "logsigmoid": _each(lambda x: -np.logaddexp(0, -x)),
    "tanhshrink": _each(lambda x: x - np.tanh(x)),
    "identity": _each(lambda x: x),
    "leakyrelu": lambda call: _whole(activations.leaky(call.setting("slope"))(call.inputs[0])),
    "gelu": _gelu,
    "elu": _elu,
    "celu": _celu,
    "softplus": _softplus,
    "prelu": _prelu,
    "softmax": _softmax,
    "logsoftmax": _log_softmax,
    "dropout": _dropout,
    "flatten": _flatten,
    "linear": _linear,
    "embedding": _embedding,
    "layernorm": _layer_norm,
    "rmsnorm": _rms_norm,
    "groupnorm": _group_norm,
    **{f"batchnorm{n}d": _batch_norm for n in (1, 2, 3)},
    **{f"instancenorm{n}d": _instance_norm for n in (1, 2, 3)},
    **{f"conv{n}d": _conv for n in (1, 2, 3)},
    **{f"{how}pool{n}d": _pool(how) for how in ("max", "avg", "adaptiveavg", "adaptivemax") for n in (1, 2, 3)},
}
