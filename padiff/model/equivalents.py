"""Names and layouts that differ between the frameworks although the layers are the same."""

from __future__ import annotations

import math
from functools import lru_cache

from padiff.records import Layer, Parameter

_KINDS = {
    "modulelist": "layerlist",
    "moduledict": "layerdict",
    "silu": "swish",
    "batchnorm": "batchnorm2d",
    "upsample": "upsampling",
    "nondynamicallyquantizablelinear": "linear",
    "syncbatchnorm": "batchnorm2d",
    "conv1dtranspose": "convtranspose1d",
    "conv2dtranspose": "convtranspose2d",
    "conv3dtranspose": "convtranspose3d",
    "rnn": "simplernn",
    "rnncell": "simplernncell",
    "columnparallellinear": "linear",
    "rowparallellinear": "linear",
    "columnsequenceparallellinear": "linear",
    "rowsequenceparallellinear": "linear",
    "vocabparallelembedding": "embedding",
}

_SLOTS = {
    "_mean": "running_mean",
    "_variance": "running_var",
    "moving_mean": "running_mean",
    "moving_var": "running_var",
    "moving_variance": "running_var",
    "running_variance": "running_var",
    "gamma": "weight",
    "beta": "bias",
    "_weight": "weight",  # paddle's PReLU
    "scale": "weight",  # paddle's InstanceNorm
}

#: Kinds with different contents in the frameworks (one packed matrix against three layers): paired as a whole.
COMPOSITE = frozenset({"multiheadattention"})

# Groups of layers, mostly without parameters, within which one layer may replace another.
_ACTIVATIONS = (
    "relu", "relu6", "leakyrelu", "elu", "selu", "celu", "gelu", "swish", "mish", "tanh", "sigmoid", "hardswish",
    "hardsigmoid", "hardtanh", "softplus", "softsign", "logsigmoid", "tanhshrink", "softshrink", "hardshrink",
    "thresholdedrelu", "glu", "prelu",
)  # fmt: skip
_POOLS = tuple(f"{how}pool{n}d" for how in ("max", "avg", "adaptiveavg", "adaptivemax", "lp") for n in (1, 2, 3))
_FAMILIES = (frozenset(_ACTIVATIONS), frozenset(_POOLS))

#: Names of layers and functions whose derivative jumps somewhere.
_KINKED = frozenset(
    {"relu", "relu6", "leakyrelu", "prelu", "rrelu", "hardswish", "hardsigmoid", "hardtanh", "hardshrink", "softshrink",
     "thresholdedrelu", "threshold", "maxout", "clip", "clamp", "abs", "max", "amax", "maximum", "minimum"}
)  # fmt: skip

#: Buffers that only one framework has: their absence on the other side is no diff.
ONE_SIDED = frozenset({"num_batches_tracked"})

#: Buffers that a normalisation computes from its inputs, not from gradients, under canonical slots.
STATISTICS = frozenset({"running_mean", "running_var", *ONE_SIDED})

#: Slots of a recurrent cell without biases that paddle fills with frozen zeros.
_FROZEN_ZEROS = dict.fromkeys(("lstmcell", "grucell", "simplernncell"), ("bias_ih", "bias_hh"))


def common_kind(name: str) -> str:
    """Return a kind under the name that both frameworks share."""
    return _KINDS.get(name, name)


@lru_cache(maxsize=4096)
def is_activation(name: str) -> bool:
    """Return True if a kind is an activation function."""
    return common_kind(name) in _FAMILIES[0]


@lru_cache(maxsize=4096)
def has_kinks(name: str) -> bool:
    """Return True if the derivative of a layer or function of this kind jumps: ReLU and similar ones, maxima."""
    plain = common_kind(name).replace("_", "")
    return plain in _KINKED or "maxpool" in plain


def same_family(one: str, other: str) -> bool:
    """Return True if two common kinds do the same job in different ways: two activations, two poolings."""
    return any(one in family and other in family for family in _FAMILIES)


@lru_cache(maxsize=4096)
def like_kinds(one: str, other: str) -> bool:
    """Return True if two kinds match by name: equal, or one contains the other at its start.

    A user's class may have a longer name for a known kind: ``siluactivation`` matches ``silu``.
    """
    shorter, longer = sorted((one, other), key=len)
    names = {shorter, *(name for name, common in _KINDS.items() if common == shorter)}
    return any(longer.startswith(name) for name in names)


_GROUPS = ("norm", "conv", "linear", "dense", "embedding", "lstm", "gru", "rnn", "attention")


@lru_cache(maxsize=4096)
def group_of_kinds(name: str) -> str:
    """Return the group of a kind by its name, e.g. ``norm`` for every normalisation, including the user's; or empty."""
    return next((group for group in _GROUPS if group in name), "")


def is_composite(name: str) -> bool:
    """Return True if layers of this kind are carried over as a whole."""
    return common_kind(name) in COMPOSITE | {"lstm", "gru", "simplernn"}


def kind(layer: Layer) -> str:
    """Return the layer's kind under the name that both frameworks share."""
    if layer.kind == "conv1d" and any(p.slot == "weight" and len(p.shape) == 2 for p in layer.parameters):
        return "linear"  # GPT-2's Conv1D, a linear layer with a transposed matrix
    return common_kind(layer.kind)


def slot(name: str) -> str:
    """Return a parameter's name under the name that both frameworks share."""
    return _SLOTS.get(name, name)


def stands_for_none(layer: Layer, parameter: Parameter) -> bool:
    """Return True if a parameter holds frozen zeros because the layer has no parameter of this name."""
    return not parameter.trainable and parameter.slot in _FROZEN_ZEROS.get(kind(layer), ())


# Kinds with (out, in) matrices in both frameworks, kinds whose matrices have no such order, and parallel linear layers
# of paddle.
_ROWS_FIRST = frozenset(
    {"lstm", "gru", "simplernn", "lstmcell", "grucell", "simplernncell", "multiheadattention", "bilinear"}
)
_PLAIN = frozenset({"embedding", "embeddingbag", "prelu", "layernorm", "rmsnorm"})
_PARALLEL_LINEAR = frozenset(
    f"{what}{how}linear" for what in ("column", "row") for how in ("parallel", "sequenceparallel")
)


def layout(layer: Layer, parameter: Parameter) -> str:
    """Return the layout of a matrix: ``out_in``, ``in_out``, empty if it has none, ``?`` if its class does not
    determine it.
    """
    if parameter.layout or len(parameter.shape) != 2:
        return parameter.layout
    name = kind(layer)
    if layer.kind in _PARALLEL_LINEAR:
        return "in_out"
    if name in _ROWS_FIRST:
        return "out_in"
    return "" if name in _PLAIN else "?"


def same_order(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if two shapes of a parameter hold the same values in the same order.

    paddle stores a Bilinear's bias as (1, n), and a LayerNorm's parameters as one row for any normalised shape.
    """
    rows = [[extent for extent in shape if extent != 1] for shape in (one, other)]
    return rows[0] == rows[1] or (math.prod(one) == math.prod(other) and min(map(len, rows)) <= 1)


def same_rows(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if two shapes have the same rows of values."""
    if one == other or same_order(one, other):
        return True
    return bool(one) and bool(other) and one[0] == other[0] and math.prod(one) == math.prod(other)
