"""Writes down what functions compute, as operations of a formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.given import Given
from padiff.compare.diagnose.kernels.windows import each
from padiff.frameworks.known import FRAMEWORKS

_AXIS = ("dim", "axis")
_KEEP = ("keepdim", "keepdims")
_BINARY = frozenset({"add", "sub", "mul", "div", "pow", "matmul", "maximum", "minimum", "remainder", "eq", "ne", "lt",
                     "le", "gt", "ge", "logical_and", "logical_or", "outer", "dot"})  # fmt: skip
_TURNED = {"rsub": "sub", "rdiv": "div", "rpow": "pow", "rmatmul": "matmul"}
_UNARY = frozenset({"neg", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "abs", "square", "reciprocal", "logical_not"})
_SAME = frozenset({"contiguous", "clone", "detach", "assign", "dropout", "dropout2d", "dropout3d", "alpha_dropout",
                   "identity"})  # fmt: skip
#: Functions of each element, by their common names.
ACTIVATIONS = {
    "relu": "ReLU", "sigmoid": "sigmoid", "tanh": "tanh", "swish": "SiLU", "silu": "SiLU", "relu6": "ReLU6",
    "selu": "SELU", "mish": "Mish", "hardswish": "Hardswish", "hardsigmoid": "Hardsigmoid", "logsigmoid": "",
}  # fmt: skip
_NUMBERED = {"leaky_relu": ("leaky ReLU", "negative_slope", 0.01), "elu": ("ELU", "alpha", 1.0),
             "softplus": ("softplus", "beta", 1.0)}  # fmt: skip
_REDUCING = frozenset({"sum", "mean", "max", "min", "prod", "var", "std", "logsumexp", "norm"})

Made = int | list[int]


def written(formula: Formula, given: Given, about: int, framework: str) -> Made:
    """The node of what a function gives; several where it gives several.

    Raises:
        UnknownError: it is not known what it computes.
    """
    name = given.function
    add = _adder(formula, about)
    if name in _BINARY or name in _TURNED:
        return _binary(add, formula, given)
    if name in _UNARY:
        return add(name, given.first)
    if name in _SAME:
        rate = given.argument(("p", "dropout_p"), 1, 0.0)
        if "dropout" in name and rate and given.argument(("training",), 2, True):
            raise UnknownError("dropout")
        return given.first
    if ACTIVATIONS.get(name):
        return add("act", given.first, function=ACTIVATIONS[name])
    if name == "gelu":
        form = "tanh-form GELU" if given.argument(("approximate",), 1, False) in ("tanh", True) else "exact GELU"
        return add("act", given.first, function=form)
    if name in _NUMBERED:
        function, argument, usual = _NUMBERED[name]
        return add("act", given.first, function=function, number=float(given.argument((argument,), 1, usual)))
    if name in _REDUCING:
        return _reduced(add, formula, given)
    found = _FUNCTIONS.get(name)
    if found is None:
        raise UnknownError(name)
    return found(add, formula, given, framework)


Add = Callable[..., int]


def _adder(formula: Formula, about: int) -> Add:
    def add(operation: str, *nodes: int, **how: Any) -> int:
        return formula.add(operation, *nodes, about=about, **how)

    return add


def _binary(add: Add, formula: Formula, given: Given) -> int:
    name = _TURNED.get(given.function, given.function)
    nodes = dict(given.nodes)
    for place, names in ((0, ("input", "x", "0")), (1, ("other", "y", "exponent", "factor", "1"))):
        if place not in nodes:
            number = given.argument(names, place, None)
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise UnknownError(given.function)
            nodes[place] = formula.leaf(_constant(number), CONSTANT)
    first, second = nodes[0], nodes[1]
    if given.function in _TURNED:
        first, second = second, first
    if name == "matmul":
        if given.argument(("transpose_x",), 2, False):
            first = add("transpose", first, order=_swapped(formula, first))
        if given.argument(("transpose_y",), 3, False):
            second = add("transpose", second, order=_swapped(formula, second))
    if name == "dot":
        name = "matmul"
    if name in ("add", "sub") and "alpha" in given.arguments and given.arguments["alpha"] != 1:
        raise UnknownError("alpha")
    if name == "div" and given.argument(("rounding_mode",), 2, None):
        raise UnknownError("rounding_mode")
    return add(name, first, second)


#: The name of a leaf that is a number in the code.
CONSTANT = "(number)"


def _constant(number: float) -> np.ndarray:
    return np.asarray(number, np.float64)


def _swapped(formula: Formula, node: int) -> list[int]:
    order = list(range(formula.values[node].ndim))
    order[-1], order[-2] = order[-2], order[-1]
    return order


def _reduced(add: Add, formula: Formula, given: Given) -> int | list[int]:
    name = given.function
    axis = given.argument(_AXIS, 1 if name != "norm" else 2, None)
    keep = bool(given.argument(_KEEP, 2, False))
    if name in ("max", "min") and 1 in given.nodes:
        return add("maximum" if name == "max" else "minimum", given.first, given.node(1))
    how: dict[str, Any] = {"by": name, "axis": axis, "keepdims": keep}
    if name in ("var", "std"):
        how["ddof"] = int(given.argument(("correction",), -1, 1 if given.argument(("unbiased",), -1, True) else 0))
    if name == "norm" and given.argument(("p", "ord"), 1, 2) not in (2, 2.0, "fro"):
        raise UnknownError("norm")
    return add("reduced", given.first, **how)


def linear(add: Add, formula: Formula, x: int, weight: int, bias: int | None, transposed: bool) -> int:
    """A matrix product, with a bias.

    Args:
        transposed: whether the matrix lies as (out, in).
    """
    if transposed:
        weight = add("transpose", weight, order=[1, 0])
    found = add("matmul", x, weight)
    return found if bias is None else add("add", found, bias)


def _linear(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return linear(add, formula, given.first, given.node(1), given.nodes.get(2), formula_lies_out_first(framework))


def formula_lies_out_first(framework: str) -> bool:
    """Whether a framework's linear layers hold their matrix as (out, in)."""
    known = FRAMEWORKS.get(framework)
    return known is not None and known.layout == "out_in"


def attention(
    add: Add, formula: Formula, q: int, k: int, v: int, mask: int | None, causal: bool, scale: float | None = None
) -> int:
    """Attention, step by step; heads are the axis before the last two."""
    turned = add("transpose", k, order=_swapped(formula, k))
    scores = add("matmul", q, turned)
    number = formula.leaf(_constant(scale or 1 / math.sqrt(formula.values[q].shape[-1])), CONSTANT)
    scores = add("mul", scores, number)
    if causal:
        scores = add("causal", scores)
    if mask is not None:
        scores = add("masked", scores, mask)
    return add("matmul", add("softmax", scores, axis=-1), v)


def _attention(add: Add, formula: Formula, given: Given, framework: str) -> int:
    if given.argument(("dropout_p",), 4, 0.0) and given.argument(("training",), 6, True):
        raise UnknownError("dropout")
    q, k, v = (given.node(n) for n in range(3))
    causal = bool(given.argument(("is_causal",), 5, False))
    mask = given.nodes.get(3)
    if framework == "paddle":  # its heads are the third axis
        q, k, v = (add("transpose", one, order=[0, 2, 1, 3]) for one in (q, k, v))
        return add("transpose", attention(add, formula, q, k, v, mask, causal), order=[0, 2, 1, 3])
    return attention(add, formula, q, k, v, mask, causal, given.argument(("scale",), -1, None))


def _norm(add: Add, formula: Formula, given: Given, framework: str) -> int:
    name = given.function
    shape = given.argument(("normalized_shape",), 1, [1])
    count = len(shape) if isinstance(shape, list) else 1
    eps = float(given.argument(("eps", "epsilon"), -1, 1e-5))
    ndim = formula.values[given.first].ndim
    found = add("normalised", given.first, axes=tuple(range(ndim - count, ndim)), eps=eps, centred=name == "layer_norm")
    return _scaled(add, found, given, 1)


def _scaled(add: Add, found: int, given: Given, place: int) -> int:
    if place in given.nodes:
        found = add("mul", found, given.node(place))
    if place + 1 in given.nodes:
        found = add("add", found, given.node(place + 1))
    return found


def _group_norm(add: Add, formula: Formula, given: Given, framework: str) -> int:
    groups = int(given.argument(("num_groups",), 1))
    found = add("grouped", given.first, groups=groups, eps=float(given.argument(("eps", "epsilon"), -1, 1e-5)))
    for place, how in ((1, "mul"), (2, "add")):
        if place in given.nodes:
            found = add("channelwise", found, given.node(place), how=how)
    return found


def _cat(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add(given.function, *given.all, axis=int(given.argument(_AXIS, 1, 0)))


def _softmax(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add(given.function, given.first, axis=int(given.argument(_AXIS, 1, -1)))


def _reshape(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add("reshape", given.first, shape=given.numbers(("shape", "size"), 1))


def _flatten(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shape = formula.values[given.first].shape
    start = int(given.argument(("start_dim", "start_axis"), 1, 0)) % max(len(shape), 1)
    end = int(given.argument(("end_dim", "stop_axis"), 2, -1)) % max(len(shape), 1)
    # The first axis is left open, so that fewer samples fit as well.
    wanted = [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]]
    return add("reshape", given.first, shape=wanted)


def _transpose(add: Add, formula: Formula, given: Given, framework: str) -> int:
    ndim = formula.values[given.first].ndim
    order = list(range(ndim))
    perm = given.argument(("perm", "dims"), -1, None)
    if perm is None and (given.function == "permute" or isinstance(given.argument((), 1, None), list)):
        perm = given.numbers(("dims", "perm"), 1)
    if perm is not None:
        return add("transpose", given.first, order=[int(n) % ndim for n in perm])
    one, other = given.argument(("dim0", "axis0"), 1, -1), given.argument(("dim1", "axis1"), 2, -2)
    order[one % ndim], order[other % ndim] = order[other % ndim], order[one % ndim]
    return add("transpose", given.first, order=order)


def _getitem(add: Add, formula: Formula, given: Given, framework: str) -> int:
    key = given.argument(("key", "item", "indices"), 1, None)
    if key is None or len(given.nodes) > 1:
        raise UnknownError("getitem")
    return add("getitem", given.first, key=key)


def _split(add: Add, formula: Formula, given: Given, framework: str) -> list[int]:
    shape = formula.values[given.first].shape
    axis = int(given.argument(_AXIS, 2, 0)) % len(shape)
    parts = given.argument(("num_or_sections", "split_size", "split_size_or_sections", "chunks", "sections"), 1, 1)
    size = shape[axis]
    if given.function == "unbind":
        axis = int(given.argument(_AXIS, 1, 0)) % len(shape)
        return [add("getitem", given.first, key=[*[":"] * axis, k]) for k in range(shape[axis])]
    if isinstance(parts, list):
        sizes = [int(n) for n in parts]
    elif given.function == "split" and framework != "paddle":
        sizes = [int(parts)] * (size // int(parts)) + [size % int(parts)] * bool(size % int(parts))
    else:
        step = -(-size // int(parts))
        sizes = [min(step, size - k) for k in range(0, size, step)]
    found, at = [], 0
    for n in sizes:
        found.append(add("getitem", given.first, key=[*[":"] * axis, f"{at}:{at + n}"]))
        at += n
    return found


def _squeeze(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shape = list(formula.values[given.first].shape)
    axis = given.argument(_AXIS, 1, None)
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, list) else [axis]
    axes = [a % len(shape) for a in axes]
    return add("reshape", given.first, shape=[n for k, n in enumerate(shape) if not (k in axes and n == 1)])


def _unsqueeze(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shape = list(formula.values[given.first].shape)
    axis = given.argument(_AXIS, 1)
    for one in axis if isinstance(axis, list) else [axis]:
        shape.insert(one % (len(shape) + 1), 1)
    return add("reshape", given.first, shape=shape)


def _expand(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add("expand", given.first, shape=given.numbers(("shape", "size", "sizes"), 1))


def _cast(add: Add, formula: Formula, given: Given, framework: str) -> int:
    dtype = given.argument(("dtype", "0", "1"), 1, "float32")
    return add("cast", given.first, dtype=str(dtype).rpartition(".")[2]) if isinstance(dtype, str) else given.first


def _where(add: Add, formula: Formula, given: Given, framework: str) -> int:
    nodes = dict(given.nodes)
    for place, names in ((1, ("input", "x")), (2, ("other", "y"))):
        if place not in nodes:
            nodes[place] = formula.leaf(_constant(given.argument(names, place)), CONSTANT)
    return add("where", nodes[0], nodes[1], nodes[2])


def _masked_fill(add: Add, formula: Formula, given: Given, framework: str) -> int:
    value = given.argument(("value",), 2, None)
    if value is None:
        raise UnknownError("masked_fill")
    return add("where", given.node(1), formula.leaf(_constant(float(value)), CONSTANT), given.first)


def _clamp(add: Add, formula: Formula, given: Given, framework: str) -> int:
    low, high = given.argument(("min",), 1, None), given.argument(("max",), 2, None)
    limits = {name: float(v) for name, v in (("low", low), ("high", high)) if v is not None}
    return add("clamp", given.first, **limits)


def _embedding(add: Add, formula: Formula, given: Given, framework: str) -> int:
    # torch's leaves the row's gradient out, paddle's gives zeros.
    zero = given.argument(("padding_idx",), 2, None) if framework == "paddle" else None
    return add("looked_up", given.first, given.node(1), zero=zero)


def windows(given: Given, ndim: int, padding: Any) -> tuple[list[int], Any, list[int]]:
    """Stride, padding and dilation of a window over the axes after the second."""
    count = ndim - 2
    if isinstance(padding, str):
        raise UnknownError("padding")
    return (
        each(given.argument(("stride",), 3, 1), count),
        [(n, n) for n in each(padding, count)],
        each(given.argument(("dilation",), 5, 1), count),
    )


def _conv(add: Add, formula: Formula, given: Given, framework: str) -> int:
    ndim = formula.values[given.first].ndim
    stride, padding, dilation = windows(given, ndim, given.argument(("padding",), 4, 0))
    groups = int(given.argument(("groups",), 6, 1))
    found = add("conv", given.first, given.node(1), stride=stride, padding=padding, dilation=dilation, groups=groups)
    return found if 2 not in given.nodes else add("channelwise", found, given.node(2), how="add")


def _pool(add: Add, formula: Formula, given: Given, framework: str) -> int:
    count = formula.values[given.first].ndim - 2
    kernel = each(given.argument(("kernel_size",), 1), count)
    stride = given.argument(("stride",), 2, None)
    by = "max" if given.function.startswith("max") else "mean"
    exclusive = given.argument(("exclusive",), -1, None)
    if exclusive is None:
        exclusive = not given.argument(("count_include_pad",), 5, True) if framework != "paddle" else True
    return add(
        "pool",
        given.first,
        by=by,
        kernel=kernel,
        stride=each(stride, count) if stride else kernel,
        padding=each(given.argument(("padding",), 3, 0), count),
        exclusive=bool(exclusive) and by == "mean",
        ceil=bool(given.argument(("ceil_mode",), -1, False)),
    )


def _global_pool(add: Add, formula: Formula, given: Given, framework: str) -> int:
    size = given.argument(("output_size",), 1)
    shape = formula.values[given.first].shape
    wanted = each(size, len(shape) - 2)
    if any(n % w for n, w in zip(shape[2:], wanted)):
        raise UnknownError("adaptive pool")
    kernel = [n // w for n, w in zip(shape[2:], wanted)]
    by = "max" if "max" in given.function else "mean"
    return add("pool", given.first, by=by, kernel=kernel, stride=kernel, padding=[0] * len(kernel))


def _pad(add: Add, formula: Formula, given: Given, framework: str) -> int:
    pads = given.numbers(("pad",), 1)
    ndim = formula.values[given.first].ndim
    mode = given.argument(("mode",), 2, "constant")
    # Two for each axis, from the last one on.
    both = [(0, 0)] * ndim
    if len(pads) == 2 * ndim and framework == "paddle":
        both = [(pads[2 * k], pads[2 * k + 1]) for k in range(ndim)]
    else:
        for k in range(len(pads) // 2):
            both[ndim - 1 - k] = (pads[2 * k], pads[2 * k + 1])
    return add("pad", given.first, pads=both, mode=str(mode), value=float(given.argument(("value",), 3, 0.0) or 0.0))


def _interpolate(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shape = formula.values[given.first].shape
    size, scale = given.argument(("size",), 1, None), given.argument(("scale_factor",), 2, None)
    count = len(shape) - 2
    wanted = each(size, count) if size else [int(n * s) for n, s in zip(shape[2:], _floats(scale, count))]
    mode = str(given.argument(("mode",), 3, "nearest"))
    kinds = {"nearest": "nearest", "bilinear": "linear", "linear": "linear", "trilinear": "linear"}
    if mode not in kinds or given.argument(("align_mode",), -1, 0):
        raise UnknownError(mode)
    corners = bool(given.argument(("align_corners",), 4, False))
    return add("resized", given.first, size=wanted, mode=kinds[mode], corners=corners)


def _floats(value: Any, count: int) -> list[float]:
    return [float(n) for n in value] if isinstance(value, list) else [float(value)] * count


def _normalize(add: Add, formula: Formula, given: Given, framework: str) -> int:
    axis = int(given.argument(_AXIS, 2, 1))
    if given.argument(("p",), 1, 2) != 2:
        raise UnknownError("normalize")
    norm = add("reduced", given.first, by="norm", axis=axis, keepdims=True)
    return add("div", given.first, add("clamp", norm, low=float(given.argument(("eps", "epsilon"), 3, 1e-12))))


def _triu(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add(given.function, given.first, diagonal=int(given.argument(("diagonal",), 1, 0)))


def _glu(add: Add, formula: Formula, given: Given, framework: str) -> int:
    axis = int(given.argument(_AXIS, 1, -1)) % formula.values[given.first].ndim
    half = formula.values[given.first].shape[axis] // 2
    one = add("getitem", given.first, key=[*[":"] * axis, f":{half}"])
    other = add("getitem", given.first, key=[*[":"] * axis, f"{half}:"])
    return add("mul", one, add("act", other, function="sigmoid"))


def _roll(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shift, axis = given.argument(("shifts",), 1), given.argument(("dims", "axis"), 2)
    if isinstance(shift, list) or isinstance(axis, list):
        raise UnknownError("roll")
    return add("roll", given.first, shift=shift, axis=axis)


def _flip(add: Add, formula: Formula, given: Given, framework: str) -> int:
    axes = given.argument(("dims", "axis"), 1)
    return add("flip", given.first, axis=tuple(axes) if isinstance(axes, list) else axes)


def _scale(add: Add, formula: Formula, given: Given, framework: str) -> int:
    factor, bias = given.argument(("scale",), 1, 1.0), given.argument(("bias",), 2, 0.0)
    found = add("mul", given.first, formula.leaf(_constant(float(factor)), CONSTANT))
    return add("add", found, formula.leaf(_constant(float(bias)), CONSTANT)) if bias else found


def _select(add: Add, formula: Formula, given: Given, framework: str) -> int:
    axis, index = int(given.argument(_AXIS, 1)), int(given.argument(("index",), 2))
    return add("getitem", given.first, key=[*[":"] * (axis % formula.values[given.first].ndim), index])


_Function = Callable[[Add, Formula, Given, str], Made]
_FUNCTIONS: Mapping[str, _Function] = {
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "group_norm": _group_norm,
    "cat": _cat,
    "stack": _cat,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _flatten,
    "transpose": _transpose,
    "permute": _transpose,
    "getitem": _getitem,
    "split": _split,
    "chunk": _split,
    "unbind": _split,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "broadcast_to": _expand,
    "cast": _cast,
    "to": _cast,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "embedding": _embedding,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "max_pool1d": _pool,
    "max_pool2d": _pool,
    "max_pool3d": _pool,
    "avg_pool1d": _pool,
    "avg_pool2d": _pool,
    "avg_pool3d": _pool,
    "adaptive_avg_pool1d": _global_pool,
    "adaptive_avg_pool2d": _global_pool,
    "adaptive_max_pool1d": _global_pool,
    "adaptive_max_pool2d": _global_pool,
    "pad": _pad,
    "interpolate": _interpolate,
    "normalize": _normalize,
    "triu": _triu,
    "tril": _triu,
    "glu": _glu,
    "roll": _roll,
    "flip": _flip,
    "scale": _scale,
    "select": _select,
}


def functions() -> Sequence[str]:
    """The functions that are known here."""
    return sorted({*_FUNCTIONS, *_BINARY, *_TURNED, *_UNARY, *_SAME, *ACTIVATIONS, *_NUMBERED, *_REDUCING, "gelu"})
