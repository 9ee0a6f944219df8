"""Formulas of functions that consist of several operations: matrix products, attention, normalisations, gates."""

from __future__ import annotations

import math
from collections.abc import Mapping

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.known_inputs import KnownInputs
from padiff.compare.diagnose.computing.writing import AXIS, CONSTANT, Add, Writing, constant, swapped
from padiff.frameworks.conventions import conventions_of


def linear(add: Add, formula: Formula, x: int, weight: int, bias: int | None, transposed: bool) -> int:
    """Add a matrix product with an optional bias and return its node.

    Args:
        transposed: True if the matrix is stored as (out, in).
    """
    if transposed:
        weight = add("transpose", weight, order=[1, 0])
    product = add("matmul", x, weight)
    return product if bias is None else add("add", product, bias)


def _linear(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
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
    return _scaled(add, output, inputs, 1)


def _scaled(add: Add, output: int, inputs: KnownInputs, place: int) -> int:
    if place in inputs.nodes:
        output = add("mul", output, inputs.node(place))
    if place + 1 in inputs.nodes:
        output = add("add", output, inputs.node(place + 1))
    return output


def _group_norm(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
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
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "group_norm": _group_norm,
    "normalize": _normalize,
    "glu": _glu,
}
