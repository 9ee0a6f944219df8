"""Writes down functions that are blocks of operations: matrix products, attention, normalisations, gates."""

from __future__ import annotations

import math
from collections.abc import Mapping

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.given import Given
from padiff.compare.diagnose.computing.writing import AXIS, CONSTANT, Add, Writing, constant, swapped
from padiff.frameworks.known import known


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
    return known(framework).layout == "out_in"


def attention(
    add: Add, formula: Formula, q: int, k: int, v: int, mask: int | None, causal: bool, scale: float | None = None
) -> int:
    """Attention, step by step; heads are the axis before the last two."""
    transposed = add("transpose", k, order=swapped(formula, k))
    scores = add("matmul", q, transposed)
    number = formula.leaf(constant(scale or 1 / math.sqrt(formula.values[q].shape[-1])), CONSTANT)
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
    if known(framework).heads_third:
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


def _normalize(add: Add, formula: Formula, given: Given, framework: str) -> int:
    axis = int(given.argument(AXIS, 2, 1))
    if given.argument(("p",), 1, 2) != 2:
        raise UnknownError("normalize")
    norm = add("reduced", given.first, by="norm", axis=axis, keepdims=True)
    return add("div", given.first, add("clamp", norm, low=float(given.argument(("eps", "epsilon"), 3, 1e-12))))


def _glu(add: Add, formula: Formula, given: Given, framework: str) -> int:
    axis = int(given.argument(AXIS, 1, -1)) % formula.values[given.first].ndim
    half = formula.values[given.first].shape[axis] // 2
    one = add("getitem", given.first, key=[*[":"] * axis, f":{half}"])
    other = add("getitem", given.first, key=[*[":"] * axis, f"{half}:"])
    return add("mul", one, add("act", other, function="sigmoid"))


#: By the names of the functions.
OF_BLOCKS: Mapping[str, Writing] = {
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "group_norm": _group_norm,
    "normalize": _normalize,
    "glu": _glu,
}
