"""Writes down what layers compute that call no functions in the open, as operations of a formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.of_blocks import attention, linear
from padiff.compare.diagnose.computing.writing import Add
from padiff.compare.diagnose.kernels.windows import each
from padiff.frameworks.known import known

#: Layers that hand on what they are given.
_SAME = frozenset({"identity", "dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout"})
_ACTIVATIONS = {
    "relu": "ReLU", "relu6": "ReLU6", "swish": "SiLU", "tanh": "tanh", "sigmoid": "sigmoid", "selu": "SELU",
    "mish": "Mish", "hardswish": "Hardswish", "hardsigmoid": "Hardsigmoid",
}  # fmt: skip
_NUMBERED = {"leakyrelu": ("leaky ReLU", "slope", 0.01), "elu": ("ELU", "alpha", 1.0),
             "softplus": ("softplus", "beta", 1.0)}  # fmt: skip


@dataclass(frozen=True)
class Called:
    """A layer's call.

    Attributes:
        kind: of layer, under the name that both frameworks share.
        settings: of the layer.
        inputs: nodes of a formula, in order.
        parameters: nodes, by the slots that both frameworks share.
        out_first: whether its matrix lies as (out, in).
        framework: the run's.
        shape: of what comes out, as recorded.
    """

    kind: str
    settings: Mapping[str, Any]
    inputs: tuple[int, ...]
    parameters: Mapping[str, int]
    out_first: bool
    framework: str
    shape: tuple[int, ...] = ()

    def number(self, name: str, usual: Any) -> Any:
        return self.settings.get(name, usual)

    def parameter(self, name: str) -> int:
        """Raises: UnknownError: it has none of that name."""
        if name not in self.parameters:
            raise UnknownError(f"{self.kind} without {name}")
        return self.parameters[name]


Writing = Callable[[Add, Formula, Called], int]


def writings(called: Called) -> Iterator[Writing]:
    """What a layer may compute, the most usual first: some forms its settings do not tell."""
    kind = called.kind
    if kind in _SAME:
        yield lambda add, formula, one: one.inputs[0]
    elif kind in _ACTIVATIONS:
        yield lambda add, formula, one: add("act", one.inputs[0], function=_ACTIVATIONS[kind])
    elif kind == "gelu":
        forms = ["exact GELU", "tanh-form GELU"]
        for form in forms[::-1] if called.number("approximate", "none") in ("tanh", True) else forms:
            yield partial(_act, function=form)
    elif kind in _NUMBERED:
        yield _numbered
    elif kind in ("linear", "embedding", "layernorm", "rmsnorm", "groupnorm", "flatten", "softmax"):
        yield _SIMPLE[kind]
    elif kind.startswith(("batchnorm", "instancenorm")):
        if kind.startswith("instancenorm"):
            yield _instance_norm
        else:
            yield partial(_batch_norm, train=True)
            yield partial(_batch_norm, train=False)
    elif kind.startswith("convtranspose"):
        yield _conv_transpose
    elif kind.startswith("conv"):
        yield _conv
    elif kind.startswith("adaptive"):
        yield _global_pool
    elif kind.startswith(("maxpool", "avgpool")):
        usual = called.number("count_include_pad", not known(called.framework).pools_without_padding)
        for exclusive in (not usual, bool(usual)):
            yield partial(_pool, exclusive=exclusive)
    elif kind == "multiheadattention":
        yield _heads
    elif kind in ("lstm", "gru", "simplernn"):
        for first in (False, True):
            yield partial(_recurrent, time_first=first)
    elif kind == "prelu":
        yield _prelu


def _act(add: Add, formula: Formula, one: Called, function: str) -> int:
    return add("act", one.inputs[0], function=function)


def _numbered(add: Add, formula: Formula, one: Called) -> int:
    function, setting, usual = _NUMBERED[one.kind]
    return add("act", one.inputs[0], function=function, number=float(one.number(setting, usual)))


def _linear(add: Add, formula: Formula, one: Called) -> int:
    return linear(add, formula, one.inputs[0], one.parameter("weight"), one.parameters.get("bias"), one.out_first)


def _embedding(add: Add, formula: Formula, one: Called) -> int:
    zero = one.number("padding_idx", "none") if known(one.framework).pads_with_zeros else "none"
    return add("looked_up", one.inputs[0], one.parameter("weight"), zero=zero if isinstance(zero, int) else None)


def _scaled(add: Add, found: int, one: Called, channels: bool) -> int:
    for slot, how in (("weight", "mul"), ("bias", "add")):
        if slot in one.parameters:
            node = one.parameters[slot]
            found = add("channelwise", found, node, how=how) if channels else add(how, found, node)
    return found


def _layer_norm(add: Add, formula: Formula, one: Called) -> int:
    ndim = formula.values[one.inputs[0]].ndim
    own = formula.values[one.parameters["weight"]] if "weight" in one.parameters else None
    # Paddle keeps the weight of several axes as one row.
    count, size = 1, formula.values[one.inputs[0]].shape[-1]
    while own is not None and size < own.size and count < ndim:
        count += 1
        size *= formula.values[one.inputs[0]].shape[-count]
    axes = tuple(range(ndim - count, ndim))
    eps = one.number("eps", 1e-5)
    if not isinstance(eps, (int, float)):
        raise UnknownError("eps")
    found = add("normalised", one.inputs[0], axes=axes, eps=float(eps), centred=one.kind == "layernorm")
    if own is not None and own.ndim != count:
        raise UnknownError("weight of a layer norm")
    return _scaled(add, found, one, channels=False)


def _group_norm(add: Add, formula: Formula, one: Called) -> int:
    groups, eps = int(one.number("num_groups", 1)), float(one.number("eps", 1e-5))
    return _scaled(add, add("grouped", one.inputs[0], groups=groups, eps=eps), one, channels=True)


def _instance_norm(add: Add, formula: Formula, one: Called) -> int:
    axes = tuple(range(2, formula.values[one.inputs[0]].ndim))
    found = add("normalised", one.inputs[0], axes=axes, eps=float(one.number("eps", 1e-5)))
    return _scaled(add, found, one, channels=True)


def _batch_norm(add: Add, formula: Formula, one: Called, train: bool) -> int:
    mean, variance = one.parameter("running_mean"), one.parameter("running_var")
    eps = float(one.number("eps", 1e-5))
    found = add("by_statistics", one.inputs[0], mean, variance, eps=eps, train=train)
    return _scaled(add, found, one, channels=True)


def _flatten(add: Add, formula: Formula, one: Called) -> int:
    return add("reshape", one.inputs[0], shape=one.shape)


def _softmax(add: Add, formula: Formula, one: Called) -> int:
    return add("softmax", one.inputs[0], axis=int(one.number("axis", one.number("dim", -1))))


_SIMPLE: Mapping[str, Writing] = {
    "linear": _linear, "embedding": _embedding, "layernorm": _layer_norm, "rmsnorm": _layer_norm,
    "groupnorm": _group_norm, "flatten": _flatten, "softmax": _softmax,
}  # fmt: skip


def _conv(add: Add, formula: Formula, one: Called) -> int:
    count = formula.values[one.inputs[0]].ndim - 2
    padding = one.number("padding", 0)
    if isinstance(padding, str):
        raise UnknownError("padding")
    found = add(
        "conv",
        one.inputs[0],
        one.parameter("weight"),
        stride=each(one.number("stride", 1), count),
        padding=[(n, n) for n in each(padding, count)],
        dilation=each(one.number("dilation", 1), count),
        groups=int(one.number("groups", 1)),
        mode=str(one.number("padding_mode", "zeros")),
    )
    return found if "bias" not in one.parameters else add("channelwise", found, one.parameters["bias"], how="add")


def _conv_transpose(add: Add, formula: Formula, one: Called) -> int:
    shape = formula.values[one.inputs[0]].shape
    count = len(shape) - 2
    stride, dilation = (each(one.number(name, 1), count) for name in ("stride", "dilation"))
    padding = each(one.number("padding", 0), count)
    kernel = formula.values[one.parameter("weight")].shape[2:]
    usual = [
        (n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in zip(shape[2:], stride, padding, dilation, kernel)
    ]
    more = [wanted - n for wanted, n in zip(one.shape[2:], usual)]
    found = add(
        "conv_transpose",
        one.inputs[0],
        one.parameter("weight"),
        stride=stride,
        padding=padding,
        output_padding=more,
        dilation=dilation,
        groups=int(one.number("groups", 1)),
    )
    return found if "bias" not in one.parameters else add("channelwise", found, one.parameters["bias"], how="add")


def _global_pool(add: Add, formula: Formula, one: Called) -> int:
    shape = formula.values[one.inputs[0]].shape
    if any(n % max(w, 1) for n, w in zip(shape[2:], one.shape[2:])):
        raise UnknownError("adaptive pool")
    kernel = [n // w for n, w in zip(shape[2:], one.shape[2:])]
    by = "max" if "max" in one.kind else "mean"
    return add("pool", one.inputs[0], by=by, kernel=kernel, stride=kernel, padding=[0] * len(kernel))


def _pool(add: Add, formula: Formula, one: Called, exclusive: bool) -> int:
    count = formula.values[one.inputs[0]].ndim - 2
    kernel = each(one.settings["kernel_size"], count) if "kernel_size" in one.settings else None
    if kernel is None:
        raise UnknownError("kernel_size")
    by = "max" if one.kind.startswith("max") else "mean"
    stride = one.number("stride", None)
    return add(
        "pool",
        one.inputs[0],
        by=by,
        kernel=kernel,
        stride=each(stride, count) if stride else kernel,
        padding=each(one.number("padding", 0), count),
        exclusive=exclusive and by == "mean",
        ceil=bool(one.number("ceil_mode", False)),
    )


def _heads(add: Add, formula: Formula, one: Called) -> int:
    """Torch's attention of several heads, batch first; and paddle's, whose matrices stand apart."""
    inputs = one.inputs if len(one.inputs) > 2 else (one.inputs[0],) * 3
    count = int(one.number("num_heads", 1))
    if "in_proj_weight" not in one.parameters or len(one.inputs) > 3 or one.number("dropout", 0.0):
        raise UnknownError("attention")
    width = formula.values[one.parameters["in_proj_weight"]].shape[1]
    parts = []
    for k in range(3):
        rows = f"{k * width}:{(k + 1) * width}"
        weight = add("getitem", one.parameters["in_proj_weight"], key=[rows])
        bias = add("getitem", one.parameters["in_proj_bias"], key=[rows]) if "in_proj_bias" in one.parameters else None
        part = linear(add, formula, inputs[k], weight, bias, True)
        shape = formula.values[part].shape
        part = add("reshape", part, shape=[*shape[:-1], count, width // count])
        parts.append(add("transpose", part, order=[0, 2, 1, 3]))
    q, k_, v = parts
    found = attention(add, formula, q, k_, v, None, False)
    found = add("transpose", found, order=[0, 2, 1, 3])
    found = add("reshape", found, shape=formula.values[inputs[0]].shape)
    return linear(add, formula, found, one.parameter("out_proj.weight"), one.parameters.get("out_proj.bias"), True)


def _recurrent(add: Add, formula: Formula, one: Called, time_first: bool) -> int:
    slots = [slot for slot in one.parameters if slot.startswith("weight_ih")]
    if len(slots) != 1 or len(one.inputs) != 1:
        raise UnknownError("several layers")
    end = slots[0].removeprefix("weight_ih")
    nodes = [one.parameter(f"weight_ih{end}"), one.parameter(f"weight_hh{end}")]
    biases = [one.parameters[f"bias_{which}{end}"] for which in ("ih", "hh") if f"bias_{which}{end}" in one.parameters]
    name = {"lstm": "lstm", "gru": "gru", "simplernn": "rnn"}[one.kind]
    return add(name, one.inputs[0], *nodes, *biases, time_first=time_first)


def _prelu(add: Add, formula: Formula, one: Called) -> int:
    slope = formula.values[one.parameter("weight")]
    if slope.size != 1:
        raise UnknownError("prelu")
    return add("act", one.inputs[0], function="leaky ReLU", number=float(np.ravel(slope)[0]))
