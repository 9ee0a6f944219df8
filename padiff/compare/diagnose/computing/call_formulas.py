"""Formulas of function calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.in_windows import IN_WINDOWS
from padiff.compare.diagnose.computing.known_inputs import KnownInputs
from padiff.compare.diagnose.computing.of_arrays import OF_ARRAYS
from padiff.compare.diagnose.computing.of_blocks import OF_BLOCKS
from padiff.compare.diagnose.computing.of_losses import OF_LOSSES
from padiff.compare.diagnose.computing.rearranging import REARRANGING
from padiff.compare.diagnose.computing.writing import AXIS, CONSTANT, Add, Made, Writing, constant, swapped
from padiff.frameworks.conventions import conventions_of

_KEEP = ("keepdim", "keepdims")
_BINARY = frozenset({"add", "sub", "mul", "div", "pow", "matmul", "maximum", "minimum", "remainder", "eq", "ne", "lt",
                     "le", "gt", "ge", "logical_and", "logical_or", "outer", "dot", "atan2", "hypot",
                     "logaddexp"})  # fmt: skip
_REVERSED = {"rsub": "sub", "rdiv": "div", "rpow": "pow", "rmatmul": "matmul"}
_UNARY = frozenset({"neg", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "abs", "square", "reciprocal", "logical_not",
                    "expm1", "log1p", "tan", "atan", "sinh", "cosh", "sign", "log10", "log2", "erf",
                    "erfc", "acos", "asin", "acosh", "asinh", "atanh", "isnan", "isinf", "isfinite"})  # fmt: skip
_SAME = frozenset({"contiguous", "clone", "assign", "dropout", "dropout2d", "dropout3d", "alpha_dropout", "identity"})
#: Elementwise functions, by their common names.
ACTIVATIONS = {
    "relu": "ReLU", "sigmoid": "sigmoid", "tanh": "tanh", "swish": "SiLU", "silu": "SiLU", "relu6": "ReLU6",
    "selu": "SELU", "mish": "Mish", "hardswish": "Hardswish", "hardsigmoid": "Hardsigmoid", "logsigmoid": "",
}  # fmt: skip
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
    if name in ("add", "sub") and "alpha" in inputs.arguments and inputs.arguments["alpha"] != 1:
        raise UnknownError("alpha")
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
    if name == "norm" and inputs.argument(("p", "ord"), 1, 2) not in (2, 2.0, "fro"):
        raise UnknownError("norm")
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
}


def functions() -> Sequence[str]:
    """Return the names of the supported functions."""
    return sorted(
        {*_FUNCTIONS, *_BINARY, *_REVERSED, *_UNARY, *_SAME, "detach", *ACTIVATIONS, *_NUMBERED, *_REDUCING, "gelu"}
    )
