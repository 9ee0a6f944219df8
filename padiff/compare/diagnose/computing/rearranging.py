"""Formulas of functions that move elements without changing them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.known_inputs import KnownInputs
from padiff.compare.diagnose.computing.writing import AXIS, Add, Writing
from padiff.frameworks.conventions import conventions_of


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
    # A trace has the tensors of such an index; the writer checks the shape that whole axes in between give.
    axes = [place - 1 for place in sorted(inputs.nodes) if place]
    if key is not None or len(axes) == 0:
        raise UnknownError("getitem")
    return add("indexed", *inputs.all, axes=tuple(axes))


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
