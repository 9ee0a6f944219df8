"""Writes down what functions compute, as operations of a formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.given import Given
from padiff.compare.diagnose.computing.in_windows import IN_WINDOWS
from padiff.compare.diagnose.computing.of_blocks import OF_BLOCKS
from padiff.compare.diagnose.computing.of_losses import OF_LOSSES
from padiff.compare.diagnose.computing.rearranging import REARRANGING
from padiff.compare.diagnose.computing.writing import AXIS, CONSTANT, Add, Made, Writing, constant, swapped
from padiff.frameworks.known import known

_KEEP = ("keepdim", "keepdims")
_BINARY = frozenset({"add", "sub", "mul", "div", "pow", "matmul", "maximum", "minimum", "remainder", "eq", "ne", "lt",
                     "le", "gt", "ge", "logical_and", "logical_or", "outer", "dot"})  # fmt: skip
_REVERSED = {"rsub": "sub", "rdiv": "div", "rpow": "pow", "rmatmul": "matmul"}
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


def written(formula: Formula, given: Given, about: int, framework: str) -> Made:
    """The node of what a function gives; several where it gives several.

    Raises:
        UnknownError: it is not known what it computes.
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


def _adder(formula: Formula, about: int) -> Add:
    def add(operation: str, *nodes: int, **how: Any) -> int:
        return formula.add(operation, *nodes, about=about, **how)

    return add


def _binary(add: Add, formula: Formula, given: Given) -> int:
    name = _REVERSED.get(given.function, given.function)
    nodes = dict(given.nodes)
    for place, names in ((0, ("input", "x", "0")), (1, ("other", "y", "exponent", "factor", "1"))):
        if place not in nodes:
            number = given.argument(names, place, None)
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise UnknownError(given.function)
            nodes[place] = formula.leaf(constant(number), CONSTANT)
    first, second = nodes[0], nodes[1]
    if given.function in _REVERSED:
        first, second = second, first
    if name == "matmul":
        if given.argument(("transpose_x",), 2, False):
            first = add("transpose", first, order=swapped(formula, first))
        if given.argument(("transpose_y",), 3, False):
            second = add("transpose", second, order=swapped(formula, second))
    if name == "dot":
        name = "matmul"
    if name in ("add", "sub") and "alpha" in given.arguments and given.arguments["alpha"] != 1:
        raise UnknownError("alpha")
    if name == "div" and given.argument(("rounding_mode",), 2, None):
        raise UnknownError("rounding_mode")
    return add(name, first, second)


def _reduced(add: Add, formula: Formula, given: Given) -> int | list[int]:
    name = given.function
    axis = given.argument(AXIS, 1 if name != "norm" else 2, None)
    keep = bool(given.argument(_KEEP, 2, False))
    if name in ("max", "min") and 1 in given.nodes:
        return add("maximum" if name == "max" else "minimum", given.first, given.node(1))
    how: dict[str, Any] = {"by": name, "axis": axis, "keepdims": keep}
    if name in ("var", "std"):
        how["ddof"] = int(given.argument(("correction",), -1, 1 if given.argument(("unbiased",), -1, True) else 0))
    if name == "norm" and given.argument(("p", "ord"), 1, 2) not in (2, 2.0, "fro"):
        raise UnknownError("norm")
    return add("reduced", given.first, **how)


def _softmax(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add(given.function, given.first, axis=int(given.argument(AXIS, 1, -1)))


def _cast(add: Add, formula: Formula, given: Given, framework: str) -> int:
    dtype = given.argument(("dtype", "0", "1"), 1, "float32")
    return add("cast", given.first, dtype=str(dtype).rpartition(".")[2]) if isinstance(dtype, str) else given.first


def _where(add: Add, formula: Formula, given: Given, framework: str) -> int:
    nodes = dict(given.nodes)
    for place, names in ((1, ("input", "x")), (2, ("other", "y"))):
        if place not in nodes:
            nodes[place] = formula.leaf(constant(given.argument(names, place)), CONSTANT)
    return add("where", nodes[0], nodes[1], nodes[2])


def _masked_fill(add: Add, formula: Formula, given: Given, framework: str) -> int:
    value = given.argument(("value",), 2, None)
    if value is None:
        raise UnknownError("masked_fill")
    return add("where", given.node(1), formula.leaf(constant(float(value)), CONSTANT), given.first)


def _clamp(add: Add, formula: Formula, given: Given, framework: str) -> int:
    low, high = given.argument(("min",), 1, None), given.argument(("max",), 2, None)
    limits = {name: float(v) for name, v in (("low", low), ("high", high)) if v is not None}
    return add("clamp", given.first, **limits)


def _embedding(add: Add, formula: Formula, given: Given, framework: str) -> int:
    # torch's leaves the row's gradient out, paddle's gives zeros.
    zero = given.argument(("padding_idx",), 2, None) if known(framework).pads_with_zeros else None
    return add("looked_up", given.first, given.node(1), zero=zero)


def _triu(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add(given.function, given.first, diagonal=int(given.argument(("diagonal",), 1, 0)))


def _scale(add: Add, formula: Formula, given: Given, framework: str) -> int:
    factor, bias = given.argument(("scale",), 1, 1.0), given.argument(("bias",), 2, 0.0)
    found = add("mul", given.first, formula.leaf(constant(float(factor)), CONSTANT))
    return add("add", found, formula.leaf(constant(float(bias)), CONSTANT)) if bias else found


_FUNCTIONS: Mapping[str, Writing] = {
    **OF_BLOCKS,
    **OF_LOSSES,
    **REARRANGING,
    **IN_WINDOWS,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "cast": _cast,
    "to": _cast,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "embedding": _embedding,
    "triu": _triu,
    "tril": _triu,
    "scale": _scale,
}


def functions() -> Sequence[str]:
    """The functions that are known here."""
    return sorted({*_FUNCTIONS, *_BINARY, *_REVERSED, *_UNARY, *_SAME, *ACTIVATIONS, *_NUMBERED, *_REDUCING, "gelu"})
