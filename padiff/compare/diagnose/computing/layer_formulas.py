"""Formulas of layers whose code calls no recorded functions, and of functions of several operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.formula import (
    AXIS,
    CONSTANT,
    Add,
    Formula,
    KnownInputs,
    UnknownError,
    Writing,
    constant,
    swapped,
)
from padiff.compare.diagnose.kernels import RESIZED, each
from padiff.frameworks.settings import conventions_of


def linear(add: Add, formula: Formula, x: int, weight: int, bias: int | None, transposed: bool) -> int:
    """Add a matrix product with an optional bias and return its node.

    Args:
        transposed: True if the matrix is stored as (out, in).
    """
    if transposed:
        weight = add("transpose", weight, order=[1, 0])
    product = add("matmul", x, weight)
    return product if bias is None else add("add", product, bias)


def _linear_call(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return linear(add, formula, inputs.first, inputs.node(1), inputs.nodes.get(2), formula_lies_out_first(framework))


def formula_lies_out_first(framework: str) -> bool:
    """Return True if a framework's linear layers store their matrix as (out, in)."""
    return conventions_of(framework).layout == "out_in"


def attention(
    add: Add, formula: Formula, q: int, k: int, v: int, mask: int | None, causal: bool, scale: float | None = None
) -> int:
    """Add attention as single operations and return its node; heads are the axis before the last two.

    Args:
        q, k, v: the nodes of queries, keys and values.
        mask: the node of the mask, if there is one.
        causal: True to hide later positions.
        scale: the factor of the scores. Default: 1 over the square root of the width of a head.
    """
    transposed = add("transpose", k, order=swapped(formula, k))
    scores = add("matmul", q, transposed)
    number = formula.leaf(constant(scale or 1 / math.sqrt(formula.values[q].shape[-1])), CONSTANT)
    scores = add("mul", scores, number)
    if causal:
        scores = add("causal", scores)
    if mask is not None:
        scores = add("masked", scores, mask)
    return add("matmul", add("softmax", scores, axis=-1), v)


def _attention(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if inputs.argument(("dropout_p",), 4, 0.0) and inputs.argument(("training",), 6, True):
        raise UnknownError("dropout")
    q, k, v = (inputs.node(n) for n in range(3))
    causal = bool(inputs.argument(("is_causal",), 5, False))
    mask = inputs.nodes.get(3)
    if conventions_of(framework).heads_third:
        q, k, v = (add("transpose", part, order=[0, 2, 1, 3]) for part in (q, k, v))
        return add("transpose", attention(add, formula, q, k, v, mask, causal), order=[0, 2, 1, 3])
    return attention(add, formula, q, k, v, mask, causal, inputs.argument(("scale",), -1, None))


def _norm(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    name = inputs.function
    shape = inputs.argument(("normalized_shape",), 1, [1])
    count = len(shape) if isinstance(shape, list) else 1
    eps = float(inputs.argument(("eps", "epsilon"), -1, 1e-5))
    ndim = formula.values[inputs.first].ndim
    output = add(
        "normalised", inputs.first, axes=tuple(range(ndim - count, ndim)), eps=eps, centred=name == "layer_norm"
    )
    return _scaled_call(add, output, inputs, 1)


def _scaled_call(add: Add, output: int, inputs: KnownInputs, place: int) -> int:
    if place in inputs.nodes:
        output = add("mul", output, inputs.node(place))
    if place + 1 in inputs.nodes:
        output = add("add", output, inputs.node(place + 1))
    return output


def _group_norm_call(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    groups = int(inputs.argument(("num_groups",), 1))
    output = add("grouped", inputs.first, groups=groups, eps=float(inputs.argument(("eps", "epsilon"), -1, 1e-5)))
    for place, how in ((1, "mul"), (2, "add")):
        if place in inputs.nodes:
            output = add("channelwise", output, inputs.node(place), how=how)
    return output


def _normalize(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    axis = int(inputs.argument(AXIS, 2, 1))
    if inputs.argument(("p",), 1, 2) != 2:
        raise UnknownError("normalize")
    norm = add("reduced", inputs.first, by="norm", axis=axis, keepdims=True)
    return add("div", inputs.first, add("clamp", norm, low=float(inputs.argument(("eps", "epsilon"), 3, 1e-12))))


def _glu(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    axis = int(inputs.argument(AXIS, 1, -1)) % formula.values[inputs.first].ndim
    half = formula.values[inputs.first].shape[axis] // 2
    values = add("getitem", inputs.first, key=[*[":"] * axis, f":{half}"])
    gates = add("getitem", inputs.first, key=[*[":"] * axis, f"{half}:"])
    return add("mul", values, add("act", gates, function="sigmoid"))


#: Writers of formulas, by the function's common name.
OF_BLOCKS: Mapping[str, Writing] = {
    "linear": _linear_call,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "group_norm": _group_norm_call,
    "normalize": _normalize,
    "glu": _glu,
}


#: Layers that return their input.
_SAME = frozenset({"identity", "dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout"})
#: Elementwise functions, by their common names.
ACTIVATIONS = {
    "relu": "ReLU", "sigmoid": "sigmoid", "tanh": "tanh", "swish": "SiLU", "silu": "SiLU", "relu6": "ReLU6",
    "selu": "SELU", "mish": "Mish", "hardswish": "Hardswish", "hardsigmoid": "Hardsigmoid", "logsigmoid": "",
}  # fmt: skip
_NUMBERED = {"leakyrelu": ("leaky ReLU", "slope", 0.01), "elu": ("ELU", "alpha", 1.0),
             "softplus": ("softplus", "beta", 1.0)}  # fmt: skip


@dataclass(frozen=True)
class Called:
    """The call of a layer.

    Attributes:
        kind: the kind of the layer, by the name that both frameworks share.
        settings: the settings of the layer.
        inputs: the inputs as nodes of a formula, in order.
        parameters: the parameters as nodes, by the slots that both frameworks share.
        out_first: True if the layer's matrix is stored as (out, in).
        framework: the framework of the run.
        shape: the recorded shape of the output.
        training: True in training mode, False in evaluation mode; `None` if unknown.
    """

    kind: str
    settings: Mapping[str, Any]
    inputs: tuple[int, ...]
    parameters: Mapping[str, int]
    out_first: bool
    framework: str
    shape: tuple[int, ...] = ()
    training: bool | None = None

    def setting(self, name: str, usual: Any) -> Any:
        return self.settings.get(name, usual)

    def parameter(self, name: str) -> int:
        """Return the node of a parameter.

        Raises:
            UnknownError: the layer has no parameter of that name.
        """
        if name not in self.parameters:
            raise UnknownError(f"{self.kind} without {name}")
        return self.parameters[name]


LayerWriting = Callable[[Add, Formula, Called], int]


def writings(called: Called) -> Iterator[LayerWriting]:
    """Yield the possible formulas of a layer, the most usual first, as the settings do not determine some forms."""
    kind = called.kind
    if kind in _SAME:
        yield lambda add, formula, call: call.inputs[0]
    elif ACTIVATIONS.get(kind):
        yield partial(_act, function=ACTIVATIONS[kind])
    elif kind == "gelu":
        forms = ["exact GELU", "tanh-form GELU"]
        for form in forms[::-1] if called.setting("approximate", "none") in ("tanh", True) else forms:
            yield partial(_act, function=form)
    elif kind in _NUMBERED:
        yield _numbered
    elif kind in _SIMPLE:
        yield _SIMPLE[kind]
    elif kind in ("softmax", "logsoftmax"):
        declared = called.setting("axis", called.setting("dim", None))
        for axis in (-1, *range(len(called.shape) - 1)) if declared is None else (int(declared),):
            yield partial(_softmax, axis=axis)
    elif kind.startswith(("batchnorm", "instancenorm")):
        if kind.startswith("instancenorm"):
            yield _instance_norm
        else:
            for train in (True, False) if called.training is None else (called.training,):
                yield partial(_batch_norm, train=train)
    elif kind.startswith("convtranspose"):
        yield _conv_transpose
    elif kind.startswith("conv"):
        yield _conv
    elif kind.startswith("adaptive"):
        yield _adaptive_pool
    elif kind.startswith(("maxpool", "avgpool")):
        usual = called.setting("count_include_pad", not conventions_of(called.framework).pools_without_padding)
        for exclusive in (not usual, bool(usual)):
            yield partial(_pool, exclusive=exclusive)
    elif kind == "multiheadattention":
        yield _heads
    elif kind in ("lstm", "gru", "simplernn"):
        for first in (False, True):
            yield partial(_recurrent, time_first=first)
    elif kind == "prelu":
        yield _prelu
    elif kind.startswith("upsamp"):
        yield _resized


def _resized(add: Add, formula: Formula, call: Called) -> int:
    mode = str(call.setting("mode", "nearest"))
    if mode not in RESIZED or call.setting("align_mode", 0):
        raise UnknownError(mode)
    corners = bool(call.setting("align_corners", False))
    return add("resized", call.inputs[0], size=list(call.shape[2:]), mode=RESIZED[mode], corners=corners)


def _act(add: Add, formula: Formula, call: Called, function: str) -> int:
    return add("act", call.inputs[0], function=function)


def _numbered(add: Add, formula: Formula, call: Called) -> int:
    function, setting, usual = _NUMBERED[call.kind]
    return add("act", call.inputs[0], function=function, number=float(call.setting(setting, usual)))


def _linear(add: Add, formula: Formula, call: Called) -> int:
    return linear(add, formula, call.inputs[0], call.parameter("weight"), call.parameters.get("bias"), call.out_first)


def _embedding(add: Add, formula: Formula, call: Called) -> int:
    zero = call.setting("padding_idx", "none") if conventions_of(call.framework).pads_with_zeros else "none"
    return add("looked_up", call.inputs[0], call.parameter("weight"), zero=zero if isinstance(zero, int) else None)


def _scaled(add: Add, output: int, call: Called, channels: bool) -> int:
    for slot, how in (("weight", "mul"), ("bias", "add")):
        if slot in call.parameters:
            node = call.parameters[slot]
            output = add("channelwise", output, node, how=how) if channels else add(how, output, node)
    return output


def _layer_norm(add: Add, formula: Formula, call: Called) -> int:
    ndim = formula.values[call.inputs[0]].ndim
    weight = formula.values[call.parameters["weight"]] if "weight" in call.parameters else None
    # Paddle stores the weight of several axes as one row.
    count, size = 1, formula.values[call.inputs[0]].shape[-1]
    while weight is not None and size < weight.size and count < ndim:
        count += 1
        size *= formula.values[call.inputs[0]].shape[-count]
    axes = tuple(range(ndim - count, ndim))
    eps = call.setting("eps", 1e-5)
    if not isinstance(eps, (int, float)):
        raise UnknownError("eps")
    output = add("normalised", call.inputs[0], axes=axes, eps=float(eps), centred=call.kind == "layernorm")
    if weight is not None and weight.ndim != count:
        extents = formula.values[call.inputs[0]].shape[-count:]
        flat = {slot: add("reshape", call.parameters[slot], shape=extents) for slot in ("weight", "bias")
                if slot in call.parameters}  # fmt: skip
        call = replace(call, parameters=flat)
    return _scaled(add, output, call, channels=False)


def _group_norm(add: Add, formula: Formula, call: Called) -> int:
    groups, eps = int(call.setting("num_groups", 1)), float(call.setting("eps", 1e-5))
    return _scaled(add, add("grouped", call.inputs[0], groups=groups, eps=eps), call, channels=True)


def _instance_norm(add: Add, formula: Formula, call: Called) -> int:
    axes = tuple(range(2, formula.values[call.inputs[0]].ndim))
    output = add("normalised", call.inputs[0], axes=axes, eps=float(call.setting("eps", 1e-5)))
    return _scaled(add, output, call, channels=True)


def _batch_norm(add: Add, formula: Formula, call: Called, train: bool) -> int:
    eps = float(call.setting("eps", 1e-5))
    if "running_mean" not in call.parameters:
        axes = (0, *range(2, formula.values[call.inputs[0]].ndim))
        return _scaled(add, add("normalised", call.inputs[0], axes=axes, eps=eps), call, channels=True)
    mean, variance = call.parameter("running_mean"), call.parameter("running_var")
    output = add("by_statistics", call.inputs[0], mean, variance, eps=eps, train=train)
    return _scaled(add, output, call, channels=True)


def _flatten(add: Add, formula: Formula, call: Called) -> int:
    return add("reshape", call.inputs[0], shape=call.shape)


def _softmax(add: Add, formula: Formula, call: Called, axis: int) -> int:
    return add("softmax" if call.kind == "softmax" else "log_softmax", call.inputs[0], axis=axis)


def _softsign(add: Add, formula: Formula, call: Called) -> int:
    unit = formula.leaf(constant(1.0), CONSTANT)
    return add("div", call.inputs[0], add("add", add("abs", call.inputs[0]), unit))


def _log_sigmoid(add: Add, formula: Formula, call: Called) -> int:
    return add("neg", add("act", add("neg", call.inputs[0]), function="softplus", number=1.0))


def _tanhshrink(add: Add, formula: Formula, call: Called) -> int:
    return add("sub", call.inputs[0], add("act", call.inputs[0], function="tanh"))


def _celu(add: Add, formula: Formula, call: Called) -> int:
    alpha = formula.leaf(constant(float(call.setting("alpha", 1.0))), CONSTANT)
    return add("mul", alpha, add("act", add("div", call.inputs[0], alpha), function="ELU"))


_SIMPLE: Mapping[str, LayerWriting] = {
    "linear": _linear, "embedding": _embedding, "layernorm": _layer_norm, "rmsnorm": _layer_norm,
    "groupnorm": _group_norm, "flatten": _flatten, "softsign": _softsign, "logsigmoid": _log_sigmoid,
    "tanhshrink": _tanhshrink, "celu": _celu,
}  # fmt: skip


def _conv(add: Add, formula: Formula, call: Called) -> int:
    count = formula.values[call.inputs[0]].ndim - 2
    kernel = formula.values[call.parameter("weight")].shape[2:]
    stride, dilation = (each(call.setting(name, 1), count) for name in ("stride", "dilation"))
    padding = call.setting("padding", 0)
    if isinstance(padding, str):
        if padding.lower() not in ("same", "valid") or (padding.lower() == "same" and {*stride} != {1}):
            raise UnknownError("padding")
        spans = [d * (k - 1) if padding.lower() == "same" else 0 for d, k in zip(dilation, kernel)]
        pads = [(span // 2, span - span // 2) for span in spans]
    else:
        pads = [(n, n) for n in each(padding, count)]
    output = add(
        "conv",
        call.inputs[0],
        call.parameter("weight"),
        stride=stride,
        padding=pads,
        dilation=dilation,
        groups=int(call.setting("groups", 1)),
        mode=str(call.setting("padding_mode", "zeros")),
    )
    return output if "bias" not in call.parameters else add("channelwise", output, call.parameters["bias"], how="add")


def _conv_transpose(add: Add, formula: Formula, call: Called) -> int:
    shape = formula.values[call.inputs[0]].shape
    count = len(shape) - 2
    stride, dilation = (each(call.setting(name, 1), count) for name in ("stride", "dilation"))
    padding = each(call.setting("padding", 0), count)
    kernel = formula.values[call.parameter("weight")].shape[2:]
    usual = [
        (n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in zip(shape[2:], stride, padding, dilation, kernel)
    ]
    more = [size - n for size, n in zip(call.shape[2:], usual)]
    output = add(
        "conv_transpose",
        call.inputs[0],
        call.parameter("weight"),
        stride=stride,
        padding=padding,
        output_padding=more,
        dilation=dilation,
        groups=int(call.setting("groups", 1)),
    )
    return output if "bias" not in call.parameters else add("channelwise", output, call.parameters["bias"], how="add")


def _adaptive_pool(add: Add, formula: Formula, call: Called) -> int:
    shape, by = formula.values[call.inputs[0]].shape, "max" if "max" in call.kind else "mean"
    if any(n % max(w, 1) for n, w in zip(shape[2:], call.shape[2:])):
        return add("pool_to", call.inputs[0], by=by, shape=call.shape[2:])
    kernel = [n // w for n, w in zip(shape[2:], call.shape[2:])]
    return add("pool", call.inputs[0], by=by, kernel=kernel, stride=kernel, padding=[0] * len(kernel))


def _pool(add: Add, formula: Formula, call: Called, exclusive: bool) -> int:
    count = formula.values[call.inputs[0]].ndim - 2
    kernel = each(call.settings["kernel_size"], count) if "kernel_size" in call.settings else None
    if kernel is None:
        raise UnknownError("kernel_size")
    by = "max" if call.kind.startswith("max") else "mean"
    stride = call.setting("stride", None)
    return add(
        "pool",
        call.inputs[0],
        by=by,
        kernel=kernel,
        stride=each(stride, count) if stride else kernel,
        padding=each(call.setting("padding", 0), count),
        exclusive=exclusive and by == "mean",
        ceil=bool(call.setting("ceil_mode", False)),
        dilation=each(call.setting("dilation", 1), count),
    )


def _heads(add: Add, formula: Formula, call: Called) -> int:
    """Add multi-head attention with the batch first, from torch's packed input matrix.

    Raises:
        UnknownError: the matrices are stored separately, as in paddle, or there is a mask or dropout.
    """
    inputs = call.inputs if len(call.inputs) > 2 else (call.inputs[0],) * 3
    count = int(call.setting("num_heads", 1))
    if "in_proj_weight" not in call.parameters or len(call.inputs) > 3 or call.setting("dropout", 0.0):
        raise UnknownError("attention")
    width = formula.values[call.parameters["in_proj_weight"]].shape[1]
    parts = []
    for k in range(3):
        rows = f"{k * width}:{(k + 1) * width}"
        weight = add("getitem", call.parameters["in_proj_weight"], key=[rows])
        bias = (
            add("getitem", call.parameters["in_proj_bias"], key=[rows]) if "in_proj_bias" in call.parameters else None
        )
        part = linear(add, formula, inputs[k], weight, bias, True)
        shape = formula.values[part].shape
        part = add("reshape", part, shape=[*shape[:-1], count, width // count])
        parts.append(add("transpose", part, order=[0, 2, 1, 3]))
    q, k_, v = parts
    output = attention(add, formula, q, k_, v, None, False)
    output = add("transpose", output, order=[0, 2, 1, 3])
    output = add("reshape", output, shape=formula.values[inputs[0]].shape)
    return linear(add, formula, output, call.parameter("out_proj.weight"), call.parameters.get("out_proj.bias"), True)


def _recurrent(add: Add, formula: Formula, call: Called, time_first: bool) -> int:
    slots = [slot for slot in call.parameters if slot.startswith("weight_ih")]
    if len(slots) != 1 or len(call.inputs) != 1:
        raise UnknownError("several layers")
    end = slots[0].removeprefix("weight_ih")
    nodes = [call.parameter(f"weight_ih{end}"), call.parameter(f"weight_hh{end}")]
    biases = [
        call.parameters[f"bias_{which}{end}"] for which in ("ih", "hh") if f"bias_{which}{end}" in call.parameters
    ]
    name = {"lstm": "lstm", "gru": "gru", "simplernn": "rnn"}[call.kind]
    return add(name, call.inputs[0], *nodes, *biases, time_first=time_first)


def _prelu(add: Add, formula: Formula, call: Called) -> int:
    slope = formula.values[call.parameter("weight")]
    if slope.size == 1:
        return add("act", call.inputs[0], function="leaky ReLU", number=float(np.ravel(slope)[0]))
    zero = formula.leaf(constant(0.0), CONSTANT)
    scaled = add("channelwise", call.inputs[0], call.parameter("weight"), how="mul")
    return add("where", add("gt", call.inputs[0], zero), call.inputs[0], scaled)
