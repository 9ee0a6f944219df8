"""Outputs of layers in float64, computed from what a step recorded: inputs, parameters and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from padiff.compare.declared.layers import modes_of, trains
from padiff.compare.diagnose import kernels
from padiff.compare.diagnose.kernels import by_statistics, grouped, looked_up, normalised
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import COARSENESS, allowed, coarse
from padiff.errors import PadiffError
from padiff.frameworks.settings import conventions_of
from padiff.model import equivalents
from padiff.records import Both, Layer, Parameter, Record, RunInfo, Step, TracedTensor, settings_at


@dataclass(frozen=True)
class Part:
    """A computed output of a call, or a part of an output.

    Attributes:
        values: the computed outputs.
        pick: function that selects the same elements of a recorded output.
        of: function from the picked elements to the computed values, if these depend on the recorded output (as the
            axis of a softmax is not recorded).
    """

    values: np.ndarray
    pick: Callable[[np.ndarray], np.ndarray]
    of: Callable[[np.ndarray], np.ndarray] | None = None

    def cut(self, cut: tuple[Any, ...]) -> Part:
        """Return this part with a `pick` for the whole output, of which this part covers the slice ``cut``."""
        return replace(self, pick=lambda output: self.pick(output[cut]))


def whole(values: np.ndarray) -> Part:
    """Return the part that has all outputs."""
    return Part(values, lambda out: out.reshape(values.shape))


def convolution(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, settings: Mapping[str, Any], most: int
) -> Part:
    """Return a convolution with channels second.

    Args:
        most: most products to compute; of larger convolutions only the first samples and some channels are computed.

    Raises:
        ValueError, KeyError, TypeError: the settings are incomplete, or do not fit the shapes.
    """
    n = x.ndim - 2
    outs, size = len(weight), weight.shape[2:]
    stride, dilation = (_each_output(settings.get(name, 1), n) for name in ("stride", "dilation"))
    groups = int(settings.get("groups", 1))
    if x.shape[1] != weight.shape[1] * groups or len(size) != n:
        raise ValueError(x.shape)
    pads = _padding(settings.get("padding", 0), size, stride, dilation, n)
    extents = [length + sum(pads[k]) for k, length in enumerate(x.shape[2:])]
    each = math.prod(kernels.counted(extents, size, stride, dilation)) * math.prod(weight.shape[1:])
    samples = min(len(x), max(1, most // max(each * outs, 1)))
    channels = np.unique(np.linspace(0, outs - 1, max(1, min(outs, most // max(each * samples, 1)))).astype(np.int64))
    mode = str(settings.get("padding_mode", "zeros"))
    result = kernels.conv(x[:samples], weight, stride, pads, dilation, groups, mode, channels)
    if bias is not None:
        result += bias.ravel()[channels].reshape((1, -1) + (1,) * n)
    return Part(result, lambda out: out[:samples, channels])


def pooling(x: np.ndarray, how: str, settings: Mapping[str, Any], shape: tuple[int, ...]) -> Part:
    """Return a pooling with channels second; ``how`` is ``max``, ``avg``, ``adaptivemax`` or ``adaptiveavg``.

    Raises:
        ValueError, KeyError, TypeError: the settings are incomplete, or do not fit the shapes.
    """
    n, by = x.ndim - 2, "max" if how.endswith("max") else "mean"
    if len(shape) != x.ndim:
        raise ValueError(shape)
    if how.startswith("adaptive"):
        return whole(kernels.pool_to(x, by, shape[2:]))
    size = _each_output(settings["kernel_size"], n)
    stride = _each_output(settings.get("stride", settings["kernel_size"]), n)
    dilation = _each_output(settings.get("dilation", 1), n)
    pads = _padding(settings.get("padding", 0), size, stride, dilation, n)
    extents = [length + sum(pads[k]) for k, length in enumerate(x.shape[2:])]
    if kernels.counted(extents, size, stride, dilation) != [*shape[2:]]:
        raise ValueError(shape)  # the last window is cut off
    if by == "mean" and any(map(sum, pads)) and not isinstance(settings.get("count_include_pad"), bool):
        raise KeyError("count_include_pad")
    exclusive = not settings.get("count_include_pad", True)
    return whole(kernels.pool(x, by, size, stride, pads, exclusive, dilation=dilation))


def _each_output(value: Any, n: int) -> list[int]:
    """Return a setting for each of ``n`` axes."""
    if isinstance(value, (list, tuple)):
        if len(value) != n:
            raise ValueError(value)
        return [int(number) for number in value]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return [value] * n


def _padding(value: Any, size: Any, stride: list[int], dilation: list[int], n: int) -> list[tuple[int, int]]:
    if isinstance(value, str):
        if value.lower() == "valid":
            return [(0, 0)] * n
        if value.lower() != "same" or set(stride) != {1}:
            raise ValueError(value)
        whole_ = [dilation[k] * (size[k] - 1) for k in range(n)]
        return [(width // 2, width - width // 2) for width in whole_]
    return [(width, width) for width in _each_output(value, n)]


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
    return whole(_scaled(call, normalised(x, axes, call.setting("eps")), shape))


def _rms_norm(call: Call) -> Part:
    x, shape = _of_last_axes(call)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    return whole(_scaled(call, normalised(x, axes, call.setting("eps", call.eps), centred=False), shape))


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
    return whole(_scaled(call, result, _channels(x)))


def _instance_norm(call: Call) -> Part:
    x = call.inputs[0]
    if "running_mean" in call.weights and not call.training:
        raise KeyError("training")
    return whole(_scaled(call, normalised(x, tuple(range(2, x.ndim)), call.setting("eps")), _channels(x)))


def _group_norm(call: Call) -> Part:
    x, groups = call.inputs[0], int(call.setting("num_groups"))
    return whole(_scaled(call, grouped(x, groups, call.setting("eps")), _channels(x)))


# -- element by element ------------------------------------------------------------------------------------------------


def _each(function: kernels.Function) -> Callable[[Call], Part]:
    return lambda call: whole(function(call.inputs[0]))


def _gelu(call: Call) -> Part:
    tanh = call.settings.get("approximate", "none") == "tanh"
    return whole((kernels.gelu_tanh if tanh else kernels.gelu)(call.inputs[0]))


def _elu(call: Call) -> Part:
    return whole(kernels.act(call.inputs[0], "ELU", call.setting("alpha", 1.0)))


def _celu(call: Call) -> Part:
    x, alpha = call.inputs[0], call.setting("alpha", 1.0)
    return whole(np.where(x > 0, x, alpha * np.expm1(np.minimum(x / alpha, 0))))


def _softplus(call: Call) -> Part:
    return whole(kernels.act(call.inputs[0], "softplus", call.setting("beta", 1.0)))


def _prelu(call: Call) -> Part:
    x, slope = call.inputs[0], call.weights["weight"]
    return whole(np.where(x > 0, x, (slope.reshape(_channels(x)) if slope.size > 1 else slope.item()) * x))


def _softmax(call: Call) -> Part:
    """Return a softmax over the axis that fits the recorded output best, as the set axis is not recorded."""
    x = call.inputs[0]
    return Part(x, lambda out: out, of=lambda out: _by_axis(x, out, kernels.softmax))


def _log_softmax(call: Call) -> Part:
    x = call.inputs[0]
    return Part(x, lambda out: out, of=lambda out: _by_axis(x, out, lambda v, k: np.log(kernels.softmax(v, k))))


def _by_axis(x: np.ndarray, out: np.ndarray, function: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    results = [function(x, axis) for axis in range(x.ndim) if x.shape[axis] > 1]
    return min(results, key=lambda result: float(np.linalg.norm(result - out)))


def _dropout(call: Call) -> Part:
    if call.training is not False and call.settings.get("p") != 0:
        raise KeyError("training")  # the dropped elements are not recorded
    return whole(call.inputs[0])


def _flatten(call: Call) -> Part:
    return whole(call.inputs[0].reshape(call.shape))


_FUNCTIONS = {
    "relu": "ReLU", "relu6": "ReLU6", "swish": "SiLU", "mish": "Mish", "tanh": "tanh", "sigmoid": "sigmoid",
    "selu": "SELU", "hardswish": "Hardswish", "hardsigmoid": "Hardsigmoid",
}  # fmt: skip
_LAYERS: dict[str, Callable[[Call], Part]] = {
    **{kind: _each(kernels.FUNCTIONS[name]) for kind, name in _FUNCTIONS.items()},
    "softsign": _each(lambda x: x / (1 + np.abs(x))),
    "logsigmoid": _each(lambda x: -np.logaddexp(0, -x)),
    "tanhshrink": _each(lambda x: x - np.tanh(x)),
    "identity": _each(lambda x: x),
    "leakyrelu": lambda call: whole(kernels.leaky(call.setting("slope"))(call.inputs[0])),
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


# Most elements of a layer's input or output to compute.
_MOST_RECORDED = 300_000
#: Distance of the numbers of a dtype at 1.
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Recorded:
    """The records of one side's step.

    Attributes:
        step: the step.
        info: the information on the whole run.
        graph: the trace of the step.
    """

    step: Step
    info: RunInfo
    graph: Graph

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        return {layer.path: layer for layer in self.info.layers}

    @cached_property
    def _weights(self) -> Mapping[tuple[str, str], Record]:
        return {(r.layer, r.slot): r for r in self.step.records if r.stage == "weight"}

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings that the run declares in this step."""
        return settings_at(self.info.settings, self.step.settings)

    @cached_property
    def _modes(self) -> tuple[bool, frozenset[str]] | None:
        return modes_of(self.settings)

    def training(self, layer: Layer) -> bool | None:
        """Return True if a layer is in training mode; `None` if unknown."""
        return None if self._modes is None else trains(layer, *self._modes)

    def off_by(self, record: Record) -> float | None:
        """Return the relative L2 error of a layer's output against float64; `None` if it can't be computed.

        Infinite if the output is not finite, though the input is.
        """
        part = self.part(record)
        return None if part is None else off_by(part, record)

    def dtype(self, record: Record) -> str:
        """Return the coarsest dtype among a layer's output and inputs."""
        call = self.graph.of_record(record)
        inputs = [] if call is None else [self.graph.trace.tensors[operand.tensor].dtype for operand in call.inputs]
        dtypes = [name for name in (coarse(dtype) for dtype in (record.dtype, *inputs)) if name in COARSENESS]
        return max(dtypes, key=COARSENESS.index, default="float32")

    def tensor_given(self, record: Record) -> TracedTensor | None:
        """Return the input of a layer's call that has a single input and output tensor, else `None`."""
        traced = self.graph.of_record(record)
        if traced is None or len(traced.inputs) != 1 or len(traced.outputs) != 1:
            return None
        return self.graph.trace.tensors[traced.inputs[0].tensor]

    def given(self, record: Record) -> np.ndarray | None:
        """Return the values of `tensor_given`; `None` if they are not recorded."""
        tensor = self.tensor_given(record)
        if tensor is None or tensor.source is None or tensor.source.sketched:
            return None
        try:
            values = tensor.source.read()
        except PadiffError:
            return None
        return values if values.shape == tensor.shape else None

    def part(
        self, record: Record, given: np.ndarray | None = None, weights: Mapping[str, np.ndarray] | None = None
    ) -> Part | None:
        """Return a layer's output, or a part, computed in float64; `None` if it can't be computed.

        Args:
            given: the input. Default: the recorded input of this side.
            weights: the layer's parameters and buffers, by this side's slots. Default: the recorded ones.
        """
        layer, tensor = self.layers.get(record.layer), self.tensor_given(record)
        layer_input = self.given(record) if given is None else given
        if layer is None or tensor is None or layer.children or layer_input is None:
            return None
        kind, training = equivalents.kind(layer), self.training(layer)
        try:
            weights = self._of_layer(layer, layer_input, weights)
            if weights is None or not layer_input.ndim or not record.shape:
                return None
            # Of large tensors only some samples are computed; some channels for layers that average over samples.
            channels = kind.startswith("batchnorm") and layer_input.ndim > 1
            axis = int(channels)
            if kind != "flatten" and layer_input.shape[axis] != record.shape[axis]:
                return None
            count = min(
                layer_input.shape[axis],
                max(1, _MOST_RECORDED * layer_input.shape[axis] // max(layer_input.size, record_size(record), 1)),
            )
            cut: tuple[slice, ...] = (*(slice(None),) * axis, slice(count))
            if channels:
                weights = {slot: values[:count] for slot, values in weights.items()}
            given = as_float64(layer_input[cut])
        except (PadiffError, ValueError, IndexError):
            return None
        if not np.isfinite(given).all():
            return None
        shape = tuple(count if k == axis else extent for k, extent in enumerate(record.shape))
        eps = _EPS.get(coarse(tensor.dtype), _EPS["float32"])
        result = computed(Call(kind, (given,), weights, layer.settings, training, shape, self.info.framework, eps))
        return None if result is None else result.cut(cut)

    def _of_layer(
        self, layer: Layer, given: np.ndarray, others: Mapping[str, np.ndarray] | None
    ) -> dict[str, np.ndarray] | None:
        """Return a layer's parameters by their common names; `None` if one is not recorded."""
        weights = {}
        for parameter in layer.parameters:
            if parameter.slot in equivalents.ONE_SIDED:
                continue
            if others is not None:
                values = as_float64(others[parameter.slot])
            else:
                record = self._record(layer, parameter)
                if record is None or record.source.sketched or record.shape != parameter.shape:
                    return None
                values = as_float64(record.value)
            if equivalents.kind(layer) == "linear" and values.ndim == 2:
                values = _out_in(values, equivalents.layout(layer, parameter), given.shape[-1])
            weights[equivalents.slot(parameter.slot)] = values
        return weights

    def _record(self, layer: Layer, parameter: Parameter) -> Record | None:
        record = self._weights.get((layer.path, parameter.slot))
        if record is None and parameter.tied_to:
            path, _, slot = parameter.tied_to.rpartition("/")
            record = self._weights.get((path, slot))
        return record


def recorded(steps: Both[Step], infos: Both[RunInfo], graphs: Both[Graph] | None = None) -> Both[Recorded]:
    """Return the records of both sides' step; graphs are built from the traces by default."""
    if graphs is None:
        graphs = steps.zip(infos).map(lambda side: Graph(side[0].trace, side[1].layers))
    return steps.zip(infos.zip(graphs)).map(lambda side: Recorded(side[0], *side[1]))


def off_by(part: Part, record: Record) -> float | None:
    """Return the relative L2 error of a recorded output against its computed part; `None` if unknown."""
    try:
        picked = part.pick(record.value).astype(np.float64)
        values = part.values if part.of is None else part.of(picked)
    except (PadiffError, ValueError, IndexError):
        return None  # only a sketch of the output is recorded, or its file was deleted
    norm = float(np.linalg.norm(values))
    if picked.shape != values.shape or not math.isfinite(norm) or not norm:
        return None
    return float(np.linalg.norm(picked - values)) / norm if np.isfinite(picked).all() else math.inf


def record_size(record: Record) -> int:
    """Return the count of elements of a record."""
    return math.prod(record.shape)


def rounding(dtype: str) -> float:
    """Return the largest relative error of a correct implementation of a layer."""
    return allowed(dtype, "forward")


def as_float64(values: np.ndarray) -> np.ndarray:
    """Return floating-point values as float64, other values unchanged."""
    return values if values.dtype.kind in "iub" else values.astype(np.float64)


def _out_in(values: np.ndarray, layout: str, inputs: int) -> np.ndarray:
    if layout not in ("in_out", "out_in"):
        # The layer's class does not tell the layout; the shape of a square matrix does not either.
        layout = "out_in" if values.shape[1] == inputs else "in_out"
        if values.shape[0] == values.shape[1]:
            raise ValueError(layout)
    return values.T if layout == "in_out" else values
