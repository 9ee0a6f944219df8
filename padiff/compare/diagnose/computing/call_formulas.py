"""Formulas of function calls: of arrays, windows, losses, and those that move elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.formula import (
    AXIS,
    CONSTANT,
    MADE,
    Add,
    Formula,
    KnownInputs,
    Made,
    UnknownError,
    Writing,
    constant,
    swapped,
)
from padiff.compare.diagnose.computing.layer_formulas import ACTIVATIONS, OF_BLOCKS
from padiff.compare.diagnose.kernels import RESIZED, each
from padiff.frameworks.settings import conventions_of


def _cat(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add(inputs.function, *inputs.all, axis=int(inputs.argument(AXIS, 1, 0)))


def _reshape(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("reshape", inputs.first, shape=inputs.numbers(("shape", "size"), 1))


def _flatten(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    shape = formula.values[inputs.first].shape
    start = int(inputs.argument(("start_dim", "start_axis"), 1, 0)) % max(len(shape), 1)
    end = int(inputs.argument(("end_dim", "stop_axis"), 2, -1)) % max(len(shape), 1)
    flat_shape = [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]]
    return add("reshape", inputs.first, shape=flat_shape)


def _transpose(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    ndim = formula.values[inputs.first].ndim
    order = list(range(ndim))
    perm = inputs.argument(("perm", "dims"), -1, None)
    if perm is None and (inputs.function == "permute" or isinstance(inputs.argument((), 1, None), list)):
        perm = inputs.numbers(("dims", "perm"), 1)
    if perm is not None:
        return add("transpose", inputs.first, order=[int(n) % ndim for n in perm])
    axis_a, axis_b = inputs.argument(("dim0", "axis0"), 1, -1), inputs.argument(("dim1", "axis1"), 2, -2)
    order[axis_a % ndim], order[axis_b % ndim] = order[axis_b % ndim], order[axis_a % ndim]
    return add("transpose", inputs.first, order=order)


def _getitem(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    key = inputs.argument(("key", "item", "indices"), 1, None)
    if len(inputs.nodes) == 1:
        return add("getitem", inputs.first, key=key)
    axes = [place - 1 for place in sorted(inputs.nodes) if place]
    if key is not None or len(axes) == 0:
        raise UnknownError("getitem")
    parts = [(int(name[4:]), part) for name, part in inputs.arguments.items() if name.startswith("key.")]
    # The traces of older runs lack the numbers of such an index: the writer checks the shape that whole axes give.
    return add("indexed", *inputs.all, axes=tuple(axes), parts=parts)


def _split(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> list[int]:
    shape = formula.values[inputs.first].shape
    axis = int(inputs.argument(AXIS, 2, 0)) % len(shape)
    parts = inputs.argument(("num_or_sections", "split_size", "split_size_or_sections", "chunks", "sections"), 1, 1)
    size = shape[axis]
    if inputs.function == "unbind":
        axis = int(inputs.argument(AXIS, 1, 0)) % len(shape)
        return [add("getitem", inputs.first, key=[*[":"] * axis, k]) for k in range(shape[axis])]
    if isinstance(parts, list):
        sizes = [int(n) for n in parts]
    elif inputs.function == "split" and not conventions_of(framework).splits_into:
        sizes = [int(parts)] * (size // int(parts)) + [size % int(parts)] * bool(size % int(parts))
    else:
        step = -(-size // int(parts))
        sizes = [min(step, size - k) for k in range(0, size, step)]
    nodes, at = [], 0
    for n in sizes:
        nodes.append(add("getitem", inputs.first, key=[*[":"] * axis, f"{at}:{at + n}"]))
        at += n
    return nodes


def _squeeze(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    shape = list(formula.values[inputs.first].shape)
    axis = inputs.argument(AXIS, 1, None)
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, list) else [axis]
    axes = [a % len(shape) for a in axes]
    return add("reshape", inputs.first, shape=[n for k, n in enumerate(shape) if not (k in axes and n == 1)])


def _unsqueeze(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    shape = list(formula.values[inputs.first].shape)
    axis = inputs.argument(AXIS, 1)
    for a in axis if isinstance(axis, list) else [axis]:
        shape.insert(a % (len(shape) + 1), 1)
    return add("reshape", inputs.first, shape=shape)


def _expand(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("expand", inputs.first, shape=inputs.numbers(("shape", "size", "sizes"), 1))


def _roll(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    shift, axis = inputs.argument(("shifts",), 1), inputs.argument(("dims", "axis"), 2)
    if isinstance(shift, list) or isinstance(axis, list):
        raise UnknownError("roll")
    return add("roll", inputs.first, shift=shift, axis=axis)


def _flip(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    axes = inputs.argument(("dims", "axis"), 1)
    return add("flip", inputs.first, axis=tuple(axes) if isinstance(axes, list) else axes)


def _select(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    axis, index = int(inputs.argument(AXIS, 1)), int(inputs.argument(("index",), 2))
    return add("getitem", inputs.first, key=[*[":"] * (axis % formula.values[inputs.first].ndim), index])


#: Writers of formulas, by the function's common name.
REARRANGING: Mapping[str, Writing] = {
    "cat": _cat,
    "stack": _cat,
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
    "roll": _roll,
    "flip": _flip,
    "select": _select,
}


def windows(given: KnownInputs, ndim: int, padding: Any) -> tuple[list[int], Any, list[int]]:
    """Return stride, padding and dilation of a window over the axes after the second.

    Raises:
        UnknownError: the padding is given as text.
    """
    count = ndim - 2
    if isinstance(padding, str):
        raise UnknownError("padding")
    return (
        each(given.argument(("stride",), 3, 1), count),
        [(n, n) for n in each(padding, count)],
        each(given.argument(("dilation",), 5, 1), count),
    )


def _conv(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    ndim = formula.values[inputs.first].ndim
    stride, padding, dilation = windows(inputs, ndim, inputs.argument(("padding",), 4, 0))
    groups = int(inputs.argument(("groups",), 6, 1))
    product = add(
        "conv", inputs.first, inputs.node(1), stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    return product if 2 not in inputs.nodes else add("channelwise", product, inputs.node(2), how="add")


def _pool(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    count = formula.values[inputs.first].ndim - 2
    kernel = each(inputs.argument(("kernel_size",), 1), count)
    stride = inputs.argument(("stride",), 2, None)
    by = "max" if inputs.function.startswith("max") else "mean"
    exclusive = inputs.argument(("exclusive",), -1, None)
    if exclusive is None:
        exclusive = conventions_of(framework).pools_without_padding or not inputs.argument(
            ("count_include_pad",), 5, True
        )
    return add(
        "pool",
        inputs.first,
        by=by,
        kernel=kernel,
        stride=each(stride, count) if stride else kernel,
        padding=each(inputs.argument(("padding",), 3, 0), count),
        exclusive=bool(exclusive) and by == "mean",
        ceil=bool(inputs.argument(("ceil_mode",), -1, False)),
    )


def _global_pool(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    size = inputs.argument(("output_size",), 1)
    shape = formula.values[inputs.first].shape
    sizes = each(size, len(shape) - 2)
    if any(n % w for n, w in zip(shape[2:], sizes)):
        raise UnknownError("adaptive pool")
    kernel = [n // w for n, w in zip(shape[2:], sizes)]
    by = "max" if "max" in inputs.function else "mean"
    return add("pool", inputs.first, by=by, kernel=kernel, stride=kernel, padding=[0] * len(kernel))


def _pad(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    pads = inputs.numbers(("pad",), 1)
    ndim = formula.values[inputs.first].ndim
    mode = inputs.argument(("mode",), 2, "constant")
    # Two numbers for each axis, the last axis first.
    both = [(0, 0)] * ndim
    if len(pads) == 2 * ndim and conventions_of(framework).pads_first_axis_first:
        both = [(pads[2 * k], pads[2 * k + 1]) for k in range(ndim)]
    else:
        for k in range(len(pads) // 2):
            both[ndim - 1 - k] = (pads[2 * k], pads[2 * k + 1])
    return add("pad", inputs.first, pads=both, mode=str(mode), value=float(inputs.argument(("value",), 3, 0.0) or 0.0))


def _interpolate(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    shape = formula.values[inputs.first].shape
    size, scale = inputs.argument(("size",), 1, None), inputs.argument(("scale_factor",), 2, None)
    count = len(shape) - 2
    sizes = each(size, count) if size else [int(n * s) for n, s in zip(shape[2:], _floats(scale, count))]
    mode = str(inputs.argument(("mode",), 3, "nearest"))
    if mode not in RESIZED or inputs.argument(("align_mode",), -1, 0):
        raise UnknownError(mode)
    corners = bool(inputs.argument(("align_corners",), 4, False))
    return add("resized", inputs.first, size=sizes, mode=RESIZED[mode], corners=corners)


def _sampled(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    x, grid = _two(inputs)
    mode, padding = inputs.argument(("mode",), 2, "bilinear"), inputs.argument(("padding_mode",), 3, "zeros")
    if formula.values[x].ndim != 4 or mode not in ("bilinear", "nearest") or padding not in ("zeros", "border"):
        raise UnknownError(inputs.function)
    corners = bool(inputs.argument(("align_corners",), 4, conventions_of(framework).samples_corners))
    return add("sampled", x, grid, padding=padding, nearest=mode == "nearest", corners=corners)


def _floats(value: Any, count: int) -> list[float]:
    return [float(n) for n in value] if isinstance(value, list) else [float(value)] * count


#: Writers of formulas, by the function's common name.
IN_WINDOWS: Mapping[str, Writing] = {
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
    "grid_sample": _sampled,
}


# Distances below this one are rounding; their square roots have no slope.
_TINY = 1e-12


def _setitem(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    value = inputs.nodes.get(2)
    if value is None:
        value = formula.leaf(constant(inputs.argument(("value",), 2)), CONSTANT)
    return add("setitem", inputs.first, value, key=inputs.argument(("key", "item"), 1))


def _cdist(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if inputs.argument(("p",), 2, 2.0) != 2:
        raise UnknownError("cdist")
    first, second = inputs.first, inputs.node(1)
    rows, columns = formula.values[first].shape, formula.values[second].shape
    first = add("reshape", first, shape=(*rows[:-1], 1, rows[-1]))
    second = add("reshape", second, shape=(*columns[:-2], 1, *columns[-2:]))
    squares = add("reduced", add("square", add("sub", first, second)), by="sum", axis=-1)
    return add("sqrt", add("clamp", squares, low=_TINY))


def _cosine(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    axis = int(inputs.argument(AXIS, 2, 1))
    low = float(inputs.argument(("eps",), 3, 1e-8))
    product = add("reduced", add("mul", inputs.first, inputs.node(1)), by="sum", axis=axis)
    norms = [add("clamp", add("reduced", k, by="norm", axis=axis), low=low) for k in (inputs.first, inputs.node(1))]
    return add("div", product, add("mul", *norms))


def _einsum(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("einsum", *inputs.all, equation=str(inputs.argument(("equation", "subscripts"), 0)))


def _running(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    axis = inputs.argument(AXIS, 1, None)
    return add(inputs.function, inputs.first, axis=None if axis is None else int(axis))


def _lerp(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    start, end = inputs.first, inputs.node(1)
    weight = inputs.nodes.get(2)
    if weight is None:
        weight = formula.leaf(constant(float(inputs.argument(("weight",), 2))), CONSTANT)
    return add("add", start, add("mul", add("sub", end, start), weight))


def _addmm(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if inputs.argument(("alpha",), -1, 1) != 1 or inputs.argument(("beta",), -1, 1) != 1:
        raise UnknownError(inputs.function)
    return add("add", inputs.first, add("matmul", inputs.node(1), inputs.node(2)))


def _tiled(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("tile", inputs.first, counts=inputs.numbers(("repeats", "repeat_times", "dims", "sizes"), 1))


def _repeated(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if len(inputs.nodes) > 1:
        raise UnknownError(inputs.function)
    axis = inputs.argument(AXIS, 2, None)
    return add("repeat", inputs.first, count=int(inputs.argument(("repeats",), 1)), axis=axis)


def _narrow(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    axis = int(inputs.argument(AXIS, 1)) % formula.values[inputs.first].ndim
    start, length = int(inputs.argument(("start",), 2)), int(inputs.argument(("length",), 3))
    return add("getitem", inputs.first, key=[*[":"] * axis, f"{start}:{start + length}"])


def _index_select(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    axis, index = inputs.argument(AXIS, 1, inputs.argument((), 2, 0)), inputs.all[-1]
    return add("rows", inputs.first, index, axis=int(axis))


def _pixel_shuffle(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    factor = int(inputs.argument(("upscale_factor",), 1))
    shape = formula.values[inputs.first].shape
    if len(shape) != 4 or inputs.argument(("data_format",), -1, "NCHW") != "NCHW":
        raise UnknownError("pixel_shuffle")
    n, c, h, w = shape
    parts = add("reshape", inputs.first, shape=(n, c // factor**2, factor, factor, h, w))
    parts = add("transpose", parts, order=[0, 1, 4, 2, 5, 3])
    return add("reshape", parts, shape=(n, c // factor**2, h * factor, w * factor))


def _added(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    """Write `scatter_add(x, dim, index, source)` and `index_add(x, dim, index, source)`."""
    if inputs.argument(("alpha",), -1, 1) != 1 or len(inputs.nodes) != 3:
        raise UnknownError(inputs.function)
    axis = int(inputs.argument(AXIS, 1, 0))
    x, index, source = inputs.all
    operation = "rows_added" if inputs.function == "index_add" else "elements_added"
    return add(operation, x, index, source, axis=axis)


def _scatter(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if inputs.argument(("overwrite",), 3, True):
        raise UnknownError("scatter")
    x, index, source = inputs.all
    cleared = add("rows_set", x, index)
    return add("rows_added", cleared, index, source, axis=0)


def _put(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if inputs.argument(("reduce",), 4, "assign") != "add":
        raise UnknownError("put_along_axis")
    x, index, source = inputs.all
    return add("elements_added", x, index, source, axis=int(inputs.argument(AXIS, 3)))


def _diff(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    count, axis = inputs.argument(("n",), 1, 1), int(inputs.argument(AXIS, 2, -1))
    if count != 1 or len(inputs.nodes) > 1:
        raise UnknownError("diff")
    before = [":"] * (axis % formula.values[inputs.first].ndim)
    later, earlier = (add("getitem", inputs.first, key=[*before, part]) for part in ("1:", ":-1"))
    return add("sub", later, earlier)


def _diagonal(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    offset = int(inputs.argument(("offset",), 1, 0))
    axes = int(inputs.argument(("dim1", "axis1"), 2, 0)), int(inputs.argument(("dim2", "axis2"), 3, 1))
    return add("diagonal", inputs.first, offset=offset, first=axes[0], second=axes[1])


def _without_nan(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if np.isinf(formula.values[inputs.first]).any():
        raise UnknownError("nan_to_num")
    return add("nan_to_num", inputs.first, nan=float(inputs.argument(("nan",), 1, 0.0) or 0.0))


def _with_mean(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> list[int]:
    """Write `var_mean` and `std_mean`."""
    how: dict[str, Any] = {"axis": inputs.argument(AXIS, 1, None), "keepdims": bool(inputs.argument(_KEEP, 3, False))}
    biased = inputs.argument(("correction",), -1, None) == 0 or not inputs.argument(("unbiased",), -1, True)
    spread = inputs.function.removesuffix("_mean")
    return [
        add("reduced", inputs.first, by=spread, ddof=0 if biased else 1, **how),
        add("reduced", inputs.first, by="mean", **how),
    ]


def _pairwise(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    p, eps = inputs.argument(("p",), 2, 2.0), float(inputs.argument(("eps", "epsilon"), 3, 1e-6))
    if p != 2:
        raise UnknownError("pairwise_distance")
    return _distance(add, formula, inputs.first, inputs.node(1), eps)


def _distance(add: Add, formula: Formula, first: int, second: int, eps: float) -> int:
    shifted = add("add", add("sub", first, second), formula.leaf(constant(eps), CONSTANT))
    return add("reduced", shifted, by="norm", axis=-1)


def _triplet(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if inputs.argument(("p",), -1, 2.0) != 2 or inputs.argument(("swap",), -1, False):
        raise UnknownError("triplet_margin_loss")
    anchor, positive, negative = inputs.all
    eps = float(inputs.argument(("eps", "epsilon"), -1, 1e-6))
    near, far = (_distance(add, formula, anchor, other, eps) for other in (positive, negative))
    return _hinged(add, formula, add("sub", near, far), inputs, 1.0)


def _ranking(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    first, second, sign = inputs.all
    return _hinged(add, formula, add("mul", add("neg", sign), add("sub", first, second)), inputs, 0.0)


def _hinged(add: Add, formula: Formula, rows: int, inputs: KnownInputs, margin: float) -> int:
    margin = float(inputs.argument(("margin",), 3, margin))
    rows = add("act", add("add", rows, formula.leaf(constant(margin), CONSTANT)), function="ReLU")
    how = inputs.argument(("reduction",), -1, "mean")
    return rows if how == "none" else add("reduced", rows, by=str(how))


def _cosine_loss(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    first, second, labels = inputs.all
    margin = float(inputs.argument(("margin",), 3, 0.0))
    cosine = _cosine(add, formula, KnownInputs("cosine_similarity", {0: first, 1: second}, {}), framework)
    one = formula.leaf(constant(1.0), CONSTANT)
    apart = add("act", add("sub", cosine, formula.leaf(constant(margin), CONSTANT)), function="ReLU")
    rows = add("where", add("eq", labels, one), add("sub", one, cosine), apart)
    how = inputs.argument(("reduction",), -1, "mean")
    return rows if how == "none" else add("reduced", rows, by=str(how))


def _soft_margin(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    scores, labels = inputs.all
    rows = add("act", add("neg", add("mul", labels, scores)), function="softplus", number=1.0)
    how = inputs.argument(("reduction",), -1, "mean")
    return rows if how == "none" else add("reduced", rows, by=str(how))


def _logit(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if inputs.argument(("eps",), 1, None) is not None:
        raise UnknownError("logit")
    one = formula.leaf(constant(1.0), CONSTANT)
    return add("log", add("div", inputs.first, add("sub", one, inputs.first)))


def _filled(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    """Write a tensor of one number: `full` or `full_like`."""
    if inputs.function == "full_like":
        shape: Sequence[int] = formula.values[inputs.first].shape
    else:
        shape = inputs.numbers(("shape", "size"), 0)
    number = inputs.argument(("fill_value",), 1)
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise UnknownError(inputs.function)
    return add("expand", formula.leaf(constant(float(number)), CONSTANT), shape=list(shape))


def _like(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    make = np.zeros if inputs.function.startswith("zeros") else np.ones
    if not inputs.function.endswith("_like"):
        return formula.leaf(make(inputs.numbers(("shape", "size"), 0)), MADE)
    like = formula.values[inputs.first]
    return formula.leaf(make(like.shape, like.dtype), MADE)


def _expanded(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("expand", inputs.first, shape=list(formula.values[inputs.node(1)].shape))


def _overwritten(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    """Write torch's `x.copy_(y)` and paddle's `x.set_value(y)`, after which x has the values of y."""
    return add("expand", inputs.node(1), shape=list(formula.values[inputs.first].shape))


def _rounded(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    if inputs.argument(("decimals",), 1, 0):
        raise UnknownError(inputs.function)
    return add("round", inputs.first)


def _meshgrid(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> list[int]:
    nodes = inputs.all
    if inputs.argument(("indexing",), -1, "ij") != "ij" or any(formula.values[k].ndim != 1 for k in nodes):
        raise UnknownError(inputs.function)
    shape = [formula.values[k].size for k in nodes]
    sides = [[n if at == place else 1 for at in range(len(nodes))] for place, n in enumerate(shape)]
    return [add("expand", add("reshape", k, shape=side), shape=shape) for k, side in zip(nodes, sides)]


def _diag(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    """Write the diagonal of a matrix, or a matrix with a diagonal."""
    values, offset = formula.values[inputs.first], int(inputs.argument(("diagonal", "offset"), 1, 0))
    if values.ndim == 2:
        return add("diagonal", inputs.first, offset=offset)
    if offset:
        raise UnknownError(inputs.function)
    places = formula.leaf(np.eye(values.size), MADE)
    return add("mul", add("reshape", inputs.first, shape=[values.size, 1]), places)


def _factored(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    """Write Cholesky factors, and solutions of linear equations by them or by a triangular matrix."""

    def transposed(node: int) -> int:
        return add("transpose", node, order=swapped(formula, node))

    name = inputs.function
    upper = bool(inputs.argument(("upper",), 1 if name == "cholesky" else 2, name == "triangular_solve"))
    if name == "cholesky":
        lower = add("cholesky", inputs.first)
        return transposed(lower) if upper else lower
    first, second = inputs.all
    if name == "cholesky_solve":
        product = (transposed(second), second) if upper else (second, transposed(second))
        return add("solve", add("matmul", *product), first)
    if inputs.argument(("unitriangular",), 4, False):
        raise UnknownError(name)
    matrix = add("triu" if upper else "tril", first)
    if inputs.argument(("transpose",), 3, False):
        matrix = transposed(matrix)
    if not inputs.argument(("left",), -1, True):
        return transposed(add("solve", transposed(matrix), transposed(second)))
    return add("solve", matrix, second)


def _logdet(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("log", add("det", inputs.first))


def _trace(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("reduced", _diagonal(add, formula, inputs, framework), by="sum", axis=-1)


def _at_places(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    """Write paddle's `gather_nd`: the last axis of the index has a place on each of the first axes."""
    index = inputs.node(1)
    count = formula.values[index].shape[-1]
    places = [add("getitem", index, key=["...", k]) for k in range(count)]
    return add("indexed", inputs.first, *places, axes=tuple(range(count)))


def _added_at_places(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    """Write paddle's `scatter_nd_add`, for an index of rows."""
    x, index, source = inputs.all
    if formula.values[index].ndim != 2 or formula.values[index].shape[-1] != 1:
        raise UnknownError(inputs.function)
    return add("rows_added", x, add("getitem", index, key=[":", 0]), source, axis=0)


def _scatter_reduced(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    x, index, source = inputs.all
    how = str(inputs.argument(("reduce",), 4))
    if not inputs.argument(("include_self",), -1, True):
        raise UnknownError(inputs.function)
    return add("elements_reduced", x, index, source, axis=int(inputs.argument(AXIS, 1)), how=how)


#: Writers of formulas, by the function's common name.
OF_ARRAYS: Mapping[str, Writing] = {
    "trace": _trace,
    "cholesky": _factored,
    "cholesky_solve": _factored,
    "triangular_solve": _factored,
    "solve": lambda add, formula, inputs, framework: add("solve", *inputs.all),
    "inv": lambda add, formula, inputs, framework: add("inv", inputs.first),
    "det": lambda add, formula, inputs, framework: add("det", inputs.first),
    "logdet": _logdet,
    "gather_nd": _at_places,
    "scatter_nd_add": _added_at_places,
    "scatter_reduce": _scatter_reduced,
    "logcumsumexp": _running,
    "full": _filled,
    "full_like": _filled,
    "zeros": _like,
    "ones": _like,
    "zeros_like": _like,
    "ones_like": _like,
    "expand_as": _expanded,
    "copy": _overwritten,
    "meshgrid": _meshgrid,
    "round": _rounded,
    "setitem": _setitem,
    "cdist": _cdist,
    "cosine_similarity": _cosine,
    "einsum": _einsum,
    "cumsum": _running,
    "cumprod": _running,
    "lerp": _lerp,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "tile": _tiled,
    "repeat": _tiled,
    "repeat_interleave": _repeated,
    "narrow": _narrow,
    "index_select": _index_select,
    "pixel_shuffle": _pixel_shuffle,
    "index_add": _added,
    "scatter_add": _added,
    "scatter": _scatter,
    "put_along_axis": _put,
    "diff": _diff,
    "diagonal": _diagonal,
    "diag": _diag,
    "nan_to_num": _without_nan,
    "var_mean": _with_mean,
    "std_mean": _with_mean,
    "pairwise_distance": _pairwise,
    "triplet_margin_loss": _triplet,
    "margin_ranking_loss": _ranking,
    "cosine_embedding_loss": _cosine_loss,
    "soft_margin_loss": _soft_margin,
    "logit": _logit,
}


def _two(inputs: KnownInputs) -> tuple[int, int]:
    """Return the nodes of predictions and targets.

    Raises:
        UnknownError: the call has fewer than two operands.
    """
    nodes = inputs.all
    if len(nodes) < 2:
        raise UnknownError(inputs.function)
    return nodes[0], nodes[1]


def _reduced_loss(add: Add, formula: Formula, rows: int, inputs: KnownInputs) -> int:
    how = inputs.argument(("reduction",), -1, "mean")
    if how == "batchmean":
        count = formula.leaf(constant(formula.values[rows].shape[0]), CONSTANT)
        return add("div", add("reduced", rows, by="sum"), count)
    return rows if how == "none" else add("reduced", rows, by=str(how))


def _cross_entropy(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    logits, labels = _two(inputs)
    ndim = formula.values[logits].ndim
    usual = -1 if conventions_of(framework).classes_last or ndim <= 2 else 1
    axis = int(inputs.argument(AXIS, -1, usual)) % ndim
    use_softmax = inputs.argument(("use_softmax",), -1, True)
    logs = add("log_softmax", logits, axis=axis) if use_softmax else add("log", logits)
    if axis != ndim - 1:
        logs = add("transpose", logs, order=[*(k for k in range(ndim) if k != axis), axis])
    smoothing = float(inputs.argument(("label_smoothing",), -1, 0.0))
    shape = formula.values[logs].shape
    labels = _as_classes(add, formula, labels, shape)
    inputs = KnownInputs(inputs.function, {**inputs.nodes, 1: labels}, inputs.arguments)
    weights = inputs.nodes.get(2)
    if inputs.argument(("reduction",), -1, "mean") == "none" and formula.values[labels].shape == (*shape[:-1], 1):
        # Labels with an axis for the class give losses with such an axis.
        flat = KnownInputs(
            inputs.function, {**inputs.nodes, 1: add("reshape", labels, shape=shape[:-1])}, inputs.arguments
        )
        return add("reshape", _cross_entropy(add, formula, flat, framework), shape=(*shape[:-1], 1))
    if formula.values[labels].dtype.kind == "f":
        if formula.values[labels].shape != shape:
            raise UnknownError("cross_entropy of probabilities")
        return _of_shares(add, formula, inputs, framework, logs, smoothing)
    is_own = weights is not None or int(inputs.argument(("ignore_index",), -1, -100)) >= 0
    if smoothing and is_own and conventions_of(framework).counts_ignored:
        hot = add("targets", add("reshape", labels, shape=shape[:-1]), classes=shape[-1], smoothing=0.0)
        inputs = KnownInputs(inputs.function, {**inputs.nodes, 1: hot}, inputs.arguments)
        return _of_shares(add, formula, inputs, framework, logs, smoothing)
    return _of_labels(add, formula, inputs, framework, logs, smoothing)


def _of_shares(add: Add, formula: Formula, inputs: KnownInputs, framework: str, logs: int, smoothing: float) -> int:
    """Write the loss of log-probabilities and the share of each class in a row, both with their classes last.

    In paddle a row has one weight for all of its classes, and an ``ignore_index`` of 0 or more makes the mean divide by
    the (weighted) number of shares that differ from it.
    """
    shares, weights, among = inputs.nodes[1], inputs.nodes.get(2), -1
    if smoothing:
        kept = add("mul", shares, formula.leaf(constant(1 - smoothing), CONSTANT))
        shares = add("add", kept, formula.leaf(constant(smoothing / formula.values[logs].shape[-1]), CONSTANT))
    if not conventions_of(framework).counts_ignored:
        weighed = logs if weights is None else add("mul", logs, weights)
        return _reduced_loss(add, formula, _of_targets(add, shares, weighed), inputs)
    rows, ignored = _of_targets(add, shares, logs), int(inputs.argument(("ignore_index",), -1, -100))
    if weights is not None:
        among = add("reduced", add("mul", shares, weights), by="sum", axis=-1, keepdims=True)
        rows = add("mul", rows, add("reduced", among, by="sum", axis=-1))
    if ignored >= 0:
        counted = add("cast", add("ne", shares, formula.leaf(np.asarray(ignored), CONSTANT)), dtype="float32")
        among = counted if among < 0 else add("mul", counted, among)
    if among < 0 or inputs.argument(("reduction",), -1, "mean") != "mean":
        return _reduced_loss(add, formula, rows, inputs)
    return add("div", add("reduced", rows, by="sum"), add("reduced", among, by="sum"))


def _of_labels(
    add: Add, formula: Formula, inputs: KnownInputs, framework: str, logs: int, smoothing: float = 0.0
) -> int:
    """Write the loss of log-probabilities, with their classes last, and integer labels."""
    labels, weights, shape = inputs.nodes[1], inputs.nodes.get(2), formula.values[logs].shape
    if formula.values[labels].shape != shape[:-1]:
        labels = add("reshape", labels, shape=shape[:-1])
    targets = add("targets", labels, classes=shape[-1], smoothing=smoothing)
    by_class = weights is not None and smoothing > 0
    rows = _of_targets(add, targets, add("mul", logs, inputs.node(2)) if by_class else logs)
    ignored = int(inputs.argument(("ignore_index",), -1, -100))
    counted: int | None = None
    if bool((formula.values[labels] == ignored).any()):
        counted = add("ne", labels, formula.leaf(np.asarray(ignored), CONSTANT))
        counted = add("cast", counted, dtype="float32")
    if by_class and counted is not None:
        rows = add("mul", rows, counted)
    if weights is not None:
        class_weights = add("of_classes", weights, labels)
        counted = class_weights if counted is None else add("mul", class_weights, counted)
    if counted is None:
        return _reduced_loss(add, formula, rows, inputs)
    rows = rows if by_class else add("mul", rows, counted)
    all_count = weights is None and conventions_of(framework).counts_ignored and ignored < 0
    if inputs.argument(("reduction",), -1, "mean") != "mean" or all_count:
        return _reduced_loss(add, formula, rows, inputs)
    return add("div", add("reduced", rows, by="sum"), add("reduced", counted, by="sum"))


def _as_classes(add: Add, formula: Formula, labels: int, shape: tuple[int, ...]) -> int:
    """Return labels as integers: the code that makes them (a mask, a shift) may be computed in floating point."""
    values = formula.values[labels]
    if values.dtype.kind != "f" or values.shape == shape or (values != np.round(values)).any():
        return labels
    return add("cast", labels, dtype="int64")


def _of_targets(add: Add, targets: int, logs: int) -> int:
    return add("neg", add("reduced", add("mul", targets, logs), by="sum", axis=-1))


def _nll(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    logs, labels = _two(inputs)
    ndim = formula.values[logs].ndim
    if ndim < 2:
        raise UnknownError("nll_loss")
    if ndim > 2:
        logs = add("transpose", logs, order=[0, *range(2, ndim), 1])
    labels = _as_classes(add, formula, labels, formula.values[logs].shape)
    inputs = KnownInputs(inputs.function, {**inputs.nodes, 1: labels}, inputs.arguments)
    return _of_labels(add, formula, inputs, "torch", logs)  # neither framework counts ignored rows here


def _squares(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return _of_errors(add, formula, add("square", add("sub", *_two(inputs))), inputs)


def _absolute(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return _of_errors(add, formula, add("abs", add("sub", *_two(inputs))), inputs)


def _of_errors(add: Add, formula: Formula, rows: int, inputs: KnownInputs) -> int:
    """Write the reduced losses of errors; but for Huber's, a mean of weighed losses divides by the weights."""
    divides = inputs.function != "huber_loss" and inputs.argument(("reduction",), -1, "mean") == "mean"
    rows = _weighed(add, rows, inputs)
    if 2 not in inputs.nodes or not divides:
        return _reduced_loss(add, formula, rows, inputs)
    return add("div", add("reduced", rows, by="sum"), add("reduced", inputs.node(2), by="sum"))


def _smooth(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    beta = float(inputs.argument(("beta", "delta"), -1, 1.0))
    divided = not conventions_of(framework).smooth_undivided and inputs.function != "huber_loss"
    rows = add("huber", add("sub", *_two(inputs)), beta=beta, divided=divided)
    return _of_errors(add, formula, rows, inputs)


def _with_logits(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    logits, targets = _two(inputs)
    soft = add("act", logits, function="softplus", number=1.0)
    rows = add("sub", soft, add("mul", targets, logits))
    if 3 in inputs.nodes:
        # The loss of positive targets is added (pos_weight - 1) more times.
        once = formula.leaf(constant(1.0), CONSTANT)
        lacking = add("act", add("neg", logits), function="softplus", number=1.0)
        more = add("mul", add("sub", inputs.node(3), once), add("mul", targets, lacking))
        rows = add("add", rows, more)
    return _reduced_loss(add, formula, _weighed(add, rows, inputs), inputs)


def _weighed(add: Add, rows: int, inputs: KnownInputs) -> int:
    return add("mul", rows, inputs.node(2)) if 2 in inputs.nodes else rows


def _binary_loss(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    shares, targets = _two(inputs)
    unit, sure = formula.leaf(constant(1.0), CONSTANT), np.isin(formula.values[shares], (0.0, 1.0)).any()

    def log(node: int) -> int:  # both frameworks have this bound
        return add("clamp", add("log", node), low=-100.0) if sure else add("log", node)

    rows = add("mul", targets, log(shares))
    others = add("mul", add("sub", unit, targets), log(add("sub", unit, shares)))
    return _reduced_loss(add, formula, _weighed(add, add("neg", add("add", rows, others)), inputs), inputs)


def _divergence(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    logs, targets = _two(inputs)
    if inputs.argument(("log_target",), -1, False):
        return _reduced_loss(add, formula, add("mul", add("exp", targets), add("sub", targets, logs)), inputs)
    if (formula.values[targets] < 0).any():
        raise UnknownError("kl_div")
    positive = targets if formula.values[targets].all() else add("clamp", targets, low=1e-300)
    return _reduced_loss(add, formula, add("mul", targets, add("sub", add("log", positive), logs)), inputs)


def _picked(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    x, index = _two(inputs)
    if inputs.function == "gather" and conventions_of(framework).gathers_rows:
        return add("rows", x, index, axis=int(inputs.argument(AXIS, 2, 0)))
    return add("picked", x, index, axis=int(inputs.argument(AXIS, 1, inputs.argument((), 2, -1))))


def _one_hot(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    classes = inputs.argument(("num_classes",), 1)
    return add("targets", inputs.first, classes=int(classes), smoothing=0.0)


def _log_sigmoid(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("neg", add("act", add("neg", inputs.first), function="softplus", number=1.0))


#: Writers of formulas, by the function's common name.
OF_LOSSES: Mapping[str, Writing] = {
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll,
    "mse_loss": _squares,
    "l1_loss": _absolute,
    "smooth_l1_loss": _smooth,
    "huber_loss": _smooth,
    "binary_cross_entropy": _binary_loss,
    "binary_cross_entropy_with_logits": _with_logits,
    "kl_div": _divergence,
    "gather": _picked,
    "take_along_axis": _picked,
    "one_hot": _one_hot,
    "logsigmoid": _log_sigmoid,
}


_KEEP = ("keepdim", "keepdims")
_BINARY = frozenset({"add", "sub", "mul", "div", "pow", "matmul", "maximum", "minimum", "remainder", "eq", "ne", "lt",
                     "le", "gt", "ge", "logical_and", "logical_or", "outer", "dot", "atan2", "hypot",
                     "logaddexp", "fmod", "kron"})  # fmt: skip
_REVERSED = {"rsub": "sub", "rdiv": "div", "rpow": "pow", "rmatmul": "matmul"}
_UNARY = frozenset({"neg", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "abs", "square", "reciprocal", "logical_not",
                    "expm1", "log1p", "tan", "atan", "sinh", "cosh", "sign", "log10", "log2", "erf",
                    "erfc", "acos", "asin", "acosh", "asinh", "atanh", "isnan", "isinf", "isfinite",
                    "floor", "ceil", "trunc"})  # fmt: skip
_SAME = frozenset({"contiguous", "clone", "assign", "dropout", "dropout2d", "dropout3d", "alpha_dropout", "identity"})
_NUMBERED = {"leaky_relu": ("leaky ReLU", "negative_slope", 0.01), "elu": ("ELU", "alpha", 1.0),
             "softplus": ("softplus", "beta", 1.0)}  # fmt: skip
_REDUCING = frozenset({"sum", "mean", "max", "min", "prod", "var", "std", "logsumexp", "norm"})


def written(formula: Formula, given: KnownInputs, about: int, framework: str) -> Made:
    """Add a function's operations to a formula and return the node of its output.

    Args:
        formula: the formula.
        given: the inputs and arguments of the call.
        about: the position of the call in the trace.
        framework: the framework of the run.

    Returns:
        The node, or a list of nodes if the function has several outputs.

    Raises:
        UnknownError: the function or one of its arguments is not supported.
    """
    name = given.function
    add = _adder(formula, about)
    if name in _BINARY or name in _REVERSED:
        return _binary(add, formula, given)
    if name in _UNARY:
        return add(name, given.first)
    if name in _SAME:
        rate = given.argument(("p", "dropout_p"), 1, 0.0)
        if "dropout" in name and rate and given.argument(("training",), 2, True):
            raise UnknownError("dropout")
        return given.first
    if name == "detach":
        return add("detach", given.first)
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
    writing = _FUNCTIONS.get(name)
    if writing is None:
        raise UnknownError(name)
    return writing(add, formula, given, framework)


def _adder(formula: Formula, about: int) -> Add:
    def add(operation: str, *nodes: int, **how: Any) -> int:
        return formula.add(operation, *nodes, about=about, **how)

    return add


def _binary(add: Add, formula: Formula, inputs: KnownInputs) -> int:
    name = _REVERSED.get(inputs.function, inputs.function)
    nodes = dict(inputs.nodes)
    for place, names in ((0, ("input", "x", "0")), (1, ("other", "y", "exponent", "factor", "1"))):
        if place not in nodes:
            number = inputs.argument(names, place, None)
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise UnknownError(inputs.function)
            nodes[place] = formula.leaf(constant(number), CONSTANT)
    first, second = nodes[0], nodes[1]
    if inputs.function in _REVERSED:
        first, second = second, first
    if name == "matmul":
        if inputs.argument(("transpose_x",), 2, False):
            first = add("transpose", first, order=swapped(formula, first))
        if inputs.argument(("transpose_y",), 3, False):
            second = add("transpose", second, order=swapped(formula, second))
    if name == "dot":
        name = "matmul"
    factor = inputs.argument(("alpha",), -1, 1) if name in ("add", "sub") else 1
    if factor != 1:
        second = add("mul", second, formula.leaf(constant(float(factor)), CONSTANT))
    if name == "div" and inputs.argument(("rounding_mode",), 2, None):
        raise UnknownError("rounding_mode")
    return add(name, first, second)


def _reduced(add: Add, formula: Formula, inputs: KnownInputs) -> int | list[int]:
    name = inputs.function
    axis = inputs.argument(AXIS, 1 if name != "norm" else 2, None)
    keep = bool(inputs.argument(_KEEP, 2, False))
    if name in ("max", "min") and 1 in inputs.nodes:
        return add("maximum" if name == "max" else "minimum", inputs.first, inputs.node(1))
    how: dict[str, Any] = {"by": name, "axis": axis, "keepdims": keep}
    if name in ("var", "std"):
        how["ddof"] = int(inputs.argument(("correction",), -1, 1 if inputs.argument(("unbiased",), -1, True) else 0))
    if name == "norm" and (order := inputs.argument(("p", "ord"), 1, 2)) not in (2, 2.0, "fro"):
        return _of_order(add, formula, inputs, order, how)
    return add("reduced", inputs.first, **how)


def _of_order(add: Add, formula: Formula, inputs: KnownInputs, order: Any, how: Mapping[str, Any]) -> int:
    """Write a norm of another order than 2, of vectors: the root of a sum of powers."""
    if not isinstance(order, (int, float)) or not 0 < order < math.inf or isinstance(how["axis"], (list, tuple)):
        raise UnknownError(inputs.function)
    power = formula.leaf(constant(float(order)), CONSTANT)
    total = add("reduced", add("pow", add("abs", inputs.first), power), **{**how, "by": "sum"})
    return add("pow", total, formula.leaf(constant(1.0 / order), CONSTANT)) if order != 1 else total


def _norm(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    """Write `vector_norm(x, ord, dim, keepdim)` and `matrix_norm(x, ord, dim, keepdim)` of squares."""
    is_vector = inputs.function == "vector_norm"
    order = inputs.argument(("ord", "p"), 1, 2 if is_vector else "fro")
    if not is_vector and order != "fro":
        raise UnknownError(inputs.function)
    count = formula.values[inputs.first].ndim
    axis = inputs.argument(AXIS, 2, None if is_vector else [-2, -1])
    if isinstance(axis, (list, tuple)):
        axis = [int(number) % count for number in axis]
    how = {"by": "norm", "axis": axis, "keepdims": bool(inputs.argument(_KEEP, 3, False))}
    if order not in (2, 2.0, "fro"):
        return _of_order(add, formula, inputs, order, how)
    return add("reduced", inputs.first, **how)


def _softmax(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add(inputs.function, inputs.first, axis=int(inputs.argument(AXIS, 1, -1)))


def _cast(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    dtype = inputs.argument(("dtype", "0", "1"), 1, "float32")
    return add("cast", inputs.first, dtype=str(dtype).rpartition(".")[2]) if isinstance(dtype, str) else inputs.first


def _where(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    nodes = dict(inputs.nodes)
    for place, names in ((1, ("input", "x")), (2, ("other", "y"))):
        if place not in nodes:
            nodes[place] = formula.leaf(constant(inputs.argument(names, place)), CONSTANT)
    return add("where", nodes[0], nodes[1], nodes[2])


def _masked_fill(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    value = inputs.argument(("value",), 2, None)
    if value is None:
        raise UnknownError("masked_fill")
    return add("where", inputs.node(1), formula.leaf(constant(float(value)), CONSTANT), inputs.first)


def _clamp(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    low, high = inputs.argument(("min",), 1, None), inputs.argument(("max",), 2, None)
    limits = {name: float(v) for name, v in (("low", low), ("high", high)) if v is not None}
    return add("clamp", inputs.first, **limits)


def _one_limit(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    name = "min" if inputs.function == "clamp_min" else "max"
    limit = inputs.argument((name,), 1, None)
    if limit is None:
        raise UnknownError(inputs.function)
    return add("clamp", inputs.first, **{"low" if name == "min" else "high": float(limit)})


def _embedding(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    # In torch the padding row only gets no gradient; in paddle its output is zero.
    zero = inputs.argument(("padding_idx",), 2, None) if conventions_of(framework).pads_with_zeros else None
    return add("looked_up", inputs.first, inputs.node(1), zero=zero)


def _triu(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add(inputs.function, inputs.first, diagonal=int(inputs.argument(("diagonal",), 1, 0)))


def _sum_of_all(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return reduce(partial(add, "add"), inputs.all)


def _scale(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    factor, bias = inputs.argument(("scale",), 1, 1.0), inputs.argument(("bias",), 2, 0.0)
    product = add("mul", inputs.first, formula.leaf(constant(float(factor)), CONSTANT))
    return add("add", product, formula.leaf(constant(float(bias)), CONSTANT)) if bias else product


_FUNCTIONS: Mapping[str, Writing] = {
    **OF_BLOCKS,
    **OF_LOSSES,
    **REARRANGING,
    **IN_WINDOWS,
    **OF_ARRAYS,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "vector_norm": _norm,
    "matrix_norm": _norm,
    "cast": _cast,
    "to": _cast,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clamp_min": _one_limit,
    "clamp_max": _one_limit,
    "embedding": _embedding,
    "triu": _triu,
    "tril": _triu,
    "scale": _scale,
    "add_n": _sum_of_all,
}


def functions() -> Sequence[str]:
    """Return the names of the supported functions."""
    return sorted(
        {*_FUNCTIONS, *_BINARY, *_REVERSED, *_UNARY, *_SAME, "detach", *ACTIVATIONS, *_NUMBERED, *_REDUCING, "gelu"}
    )
