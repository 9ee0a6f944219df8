"""Formulas of further functions on whole tensors: distances, products, running sums, writes, repeats, lookups."""

from __future__ import annotations

from collections.abc import Mapping

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.known_inputs import KnownInputs
from padiff.compare.diagnose.computing.writing import AXIS, CONSTANT, Add, Writing, constant

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
}
