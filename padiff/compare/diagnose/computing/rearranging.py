"""Writes down functions that put elements elsewhere and change none."""

from __future__ import annotations

import math
from collections.abc import Mapping

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.given import Given
from padiff.compare.diagnose.computing.writing import AXIS, Add, Writing
from padiff.frameworks.known import known


def _cat(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add(given.function, *given.all, axis=int(given.argument(AXIS, 1, 0)))


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
    axis = int(given.argument(AXIS, 2, 0)) % len(shape)
    parts = given.argument(("num_or_sections", "split_size", "split_size_or_sections", "chunks", "sections"), 1, 1)
    size = shape[axis]
    if given.function == "unbind":
        axis = int(given.argument(AXIS, 1, 0)) % len(shape)
        return [add("getitem", given.first, key=[*[":"] * axis, k]) for k in range(shape[axis])]
    if isinstance(parts, list):
        sizes = [int(n) for n in parts]
    elif given.function == "split" and not known(framework).splits_into:
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
    axis = given.argument(AXIS, 1, None)
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, list) else [axis]
    axes = [a % len(shape) for a in axes]
    return add("reshape", given.first, shape=[n for k, n in enumerate(shape) if not (k in axes and n == 1)])


def _unsqueeze(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shape = list(formula.values[given.first].shape)
    axis = given.argument(AXIS, 1)
    for one in axis if isinstance(axis, list) else [axis]:
        shape.insert(one % (len(shape) + 1), 1)
    return add("reshape", given.first, shape=shape)


def _expand(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add("expand", given.first, shape=given.numbers(("shape", "size", "sizes"), 1))


def _roll(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shift, axis = given.argument(("shifts",), 1), given.argument(("dims", "axis"), 2)
    if isinstance(shift, list) or isinstance(axis, list):
        raise UnknownError("roll")
    return add("roll", given.first, shift=shift, axis=axis)


def _flip(add: Add, formula: Formula, given: Given, framework: str) -> int:
    axes = given.argument(("dims", "axis"), 1)
    return add("flip", given.first, axis=tuple(axes) if isinstance(axes, list) else axes)


def _select(add: Add, formula: Formula, given: Given, framework: str) -> int:
    axis, index = int(given.argument(AXIS, 1)), int(given.argument(("index",), 2))
    return add("getitem", given.first, key=[*[":"] * (axis % formula.values[given.first].ndim), index])


#: By the names of the functions.
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
