"""Texts that describe traced calls, and comparisons of the arguments of two calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from padiff.frameworks.api_names import LOOKING
from padiff.records import LOOP, Both, Trace, TracedCall
from padiff.system.naming import first_few

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
# The most arguments, and the most calls, that a sentence names.
_ARGUMENTS, _CALLS = 4, 6

# Common names of parameters, by the names that the frameworks use.
_NAMES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "y": "other",
    "x": "input",
    "perm": "dims",
    "start_axis": "start_dim",
    "stop_axis": "end_dim",
    "end_axis": "end_dim",
    "epsilon": "eps",
    "p": "p",
    "dropout_p": "p",
    "fill_value": "value",
    "negative_slope": "slope",
}
_AXES = frozenset({"dim", "dim0", "dim1", "start_dim", "end_dim", "dims"})
# Default values of arguments, by function.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gelu": {"approximate": False},
    "softmax": {"dim": -1},
    "log_softmax": {"dim": -1},
    "scaled_dot_product_attention": {"is_causal": False, "p": 0.0, "training": True},
    "leaky_relu": {"slope": 0.01},
    "elu": {"alpha": 1.0},
    "layer_norm": {"eps": 1e-5},
    "sum": {"keepdim": False},
    "mean": {"keepdim": False},
    "matmul": {"transpose_x": False, "transpose_y": False},
}
# Arguments without an effect on the computed values.
_IDLE = frozenset(
    {"inplace", "training", "dtype", "name", "fixed_seed_offset", "return_softmax", "device", "data_format"}
)


def called(call: TracedCall) -> str:
    """Return a call as code, e.g. ``softmax(dim=-1)``; the call of a layer is named by the layer's type and path."""
    arguments = [_given(name, value) for name, value in call.arguments.items() if name not in _IDLE]
    arguments += [operand.slot for operand in call.inputs[1:] if "mask" in operand.slot]
    text = ", ".join(arguments[:_ARGUMENTS]) + (", ..." if len(arguments) > _ARGUMENTS else "")
    return f"{call.function}({text})" if call.function else f"{call.layer_type}({text}) in `{call.layer}`"


def calls_text(calls: Iterable[TracedCall]) -> str:
    """Return several calls as one text, in their order."""
    texts = [called(call) for call in calls]
    return first_few(texts, _CALLS) or "nothing"


def place_of(call: TracedCall, trace: Trace) -> str:
    """Return the position of a call in its layer as text, e.g. ``the second add() in `blocks.0` ``."""
    if not call.function:
        return f"`{call.layer}`"
    same_function = sum(
        (sibling.layer, sibling.call, sibling.function) == (call.layer, call.call, call.function)
        for sibling in trace.calls
    )
    ordinal = _ORDINALS[call.nth] if call.nth < len(_ORDINALS) else f"{call.nth + 1}th"
    function = f"the {ordinal} {call.function}()" if same_function > 1 else f"{call.function}()"
    return f"{function} in {'the loop' if call.layer == LOOP else f'`{call.layer}`'}"


def is_looking(call: TracedCall) -> bool:
    """Return True if a call only rearranges, selects or hands on values of its input, such as a reshape."""
    return call.function in LOOKING


def given_otherwise(calls: Both[TracedCall], axes: Both[int]) -> bool:
    """Return True if two calls of one function have different arguments.

    Args:
        calls: the call of the reference and the call of the candidate.
        axes: the number of axes of the first tensor of each call, to count negative axes from the front.
    """
    reference, candidate = calls.zip(axes).map(lambda side: _canonical(*side))
    return any(
        name not in reference or name not in candidate or not _equal(reference[name], candidate[name])
        for name in {*reference, *candidate}
    )


def given_in_common(calls: Both[TracedCall]) -> bool:
    """Return True if an argument that both calls name has different values."""
    names = calls.map(lambda call: {_NAMES.get(name, name): value for name, value in call.arguments.items()})
    common = (names.reference.keys() & names.candidate.keys()) - _IDLE
    return any(not _equal(names.reference[name], names.candidate[name]) for name in common)


def _canonical(call: TracedCall, axes: int) -> dict[str, Any]:
    function = _common(call)
    arguments = dict(_DEFAULTS.get(function, {}))
    for name, value in call.arguments.items():
        if name in _IDLE:
            continue
        common = _NAMES.get(name, name)
        if common == "approximate":
            value = value in ("tanh", True)
        elif common in _AXES and axes:
            value = (
                [v % axes if isinstance(v, int) else v for v in value]
                if isinstance(value, list)
                else _axis(value, axes)
            )
        arguments[common] = value
    for name in _AXES & arguments.keys():
        arguments[name] = _axis(arguments[name], axes)
    if call.function == "div" and isinstance(arguments.get("other"), float | int) and arguments["other"]:
        arguments["other"] = 1 / arguments["other"]
    return arguments


def _axis(value: Any, axes: int) -> Any:
    """Return an axis, or a list of axes, counted from the front."""
    if isinstance(value, list):
        return [_axis(each, axes) for each in value]
    return value % axes if isinstance(value, int) and axes else value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return math.isclose(first, second, rel_tol=1e-6)
    if isinstance(first, list) and not isinstance(second, list):
        return len(first) == 1 and _equal(first[0], second)
    if isinstance(second, list) and not isinstance(first, list):
        return _equal(second, first)
    return bool(first == second)


def _given(name: str, value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if name.isdecimal() or name == "other" else f"{name}={text}"


def same_name(one: TracedCall, other: TracedCall) -> bool:
    """Return True if two calls are of the same function, whatever each framework calls the function."""
    return _common(one) == _common(other)


def _common(call: TracedCall) -> str:
    if call.function == "div" and isinstance(call.arguments.get("other"), float | int):
        return "mul"  # by a number
    return call.function or _OF_LAYERS.get(call.layer_type.lower(), call.layer_type.lower())


# Functions that compute the same as a layer, by the layer's class.
_OF_LAYERS: Mapping[str, str] = {
    "silu": "swish",
    "logsoftmax": "log_softmax",
    "leakyrelu": "leaky_relu",
    "maxpool2d": "max_pool2d",
    "avgpool2d": "avg_pool2d",
    "layernorm": "layer_norm",
}
