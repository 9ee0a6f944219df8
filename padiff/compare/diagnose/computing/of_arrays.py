"""Formulas of further functions on whole tensors: distances, products, running sums, writes, repeats, lookups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.known_inputs import KnownInputs
from padiff.compare.diagnose.computing.writing import AXIS, CONSTANT, Add, Writing, constant

_KEEP = ("keepdim", "keepdims")
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
    return _hinged(add, formula, add("sub", near, far), inputs, 1.0, 3)


def _ranking(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    first, second, sign = inputs.all
    return _hinged(add, formula, add("mul", add("neg", sign), add("sub", first, second)), inputs, 0.0, 3)


def _hinged(add: Add, formula: Formula, rows: int, inputs: KnownInputs, margin: float, place: int) -> int:
    margin = float(inputs.argument(("margin",), place, margin))
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


#: Writers of formulas, by the function's common name.
OF_ARRAYS: Mapping[str, Writing] = {
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
