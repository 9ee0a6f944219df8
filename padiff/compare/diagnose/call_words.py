"""Calls in words, and whether two calls of one function were given the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from padiff.frameworks.api_names import LOOKING
from padiff.records import LOOP, Both, Trace, TracedCall
from padiff.system.naming import first_few

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
# Arguments, and calls, that a sentence names.
_ARGUMENTS, _CALLS = 4, 6

# What parameters are called here, by what the frameworks call them.
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
# What holds where a function is given nothing.
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
# What changes nothing of what is computed.
_IDLE = frozenset(
    {"inplace", "training", "dtype", "name", "fixed_seed_offset", "return_softmax", "device", "data_format"}
)


def called(call: TracedCall) -> str:
    """A call as code: ``softmax(dim=-1)``; of a layer, the layer."""
    given = [_given(name, value) for name, value in call.arguments.items() if name not in _IDLE]
    given += [operand.slot for operand in call.inputs[1:] if "mask" in operand.slot]
    text = ", ".join(given[:_ARGUMENTS]) + (", ..." if len(given) > _ARGUMENTS else "")
    return f"{call.function}({text})" if call.function else f"{call.layer_type}({text}) in `{call.layer}`"


def calls_text(calls: Iterable[TracedCall]) -> str:
    """Several calls, in their order."""
    texts = [called(call) for call in calls]
    return first_few(texts, _CALLS) or "nothing"


def place_of(call: TracedCall, trace: Trace) -> str:
    """Which call it is: the second add() in `blocks.0`."""
    if not call.function:
        return f"`{call.layer}`"
    alike = sum(
        (other.layer, other.call, other.function) == (call.layer, call.call, call.function) for other in trace.calls
    )
    ordinal = _ORDINALS[call.nth] if call.nth < len(_ORDINALS) else f"{call.nth + 1}th"
    which = f"the {ordinal} {call.function}()" if alike > 1 else f"{call.function}()"
    return f"{which} in {'the loop' if call.layer == LOOP else f'`{call.layer}`'}"


def is_looking(call: TracedCall) -> bool:
    """Whether a call only looks at its values in another way."""
    return call.function in LOOKING


def given_otherwise(calls: Both[TracedCall], axes: Both[int]) -> bool:
    """Whether two calls of one function were given other arguments.

    Args:
        axes: how many axes their first tensors have.
    """
    one, other = calls.zip(axes).map(lambda side: _canonical(*side))
    return any(name not in one or name not in other or not _equal(one[name], other[name]) for name in {*one, *other})


def given_in_common(calls: Both[TracedCall]) -> bool:
    """Whether two calls were given other values of an argument that both were given."""
    names = calls.map(lambda call: {_NAMES.get(name, name): value for name, value in call.arguments.items()})
    common = (names.reference.keys() & names.candidate.keys()) - _IDLE
    return any(not _equal(names.reference[name], names.candidate[name]) for name in common)


def _canonical(call: TracedCall, axes: int) -> dict[str, Any]:
    function = _common(call)
    found = dict(_DEFAULTS.get(function, {}))
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
        found[common] = value
    for name in _AXES & found.keys():
        found[name] = _axis(found[name], axes)
    if call.function == "div" and isinstance(found.get("other"), float | int) and found["other"]:
        found["other"] = 1 / found["other"]
    return found


def _axis(value: Any, axes: int) -> Any:
    """An axis, or several, counted from the first one."""
    if isinstance(value, list):
        return [_axis(each, axes) for each in value]
    return value % axes if isinstance(value, int) and axes else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list) and not isinstance(other, list):
        return len(one) == 1 and _equal(one[0], other)
    if isinstance(other, list) and not isinstance(one, list):
        return _equal(other, one)
    return bool(one == other)


def _given(name: str, value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if name.isdecimal() or name == "other" else f"{name}={text}"


def same_name(one: TracedCall, other: TracedCall) -> bool:
    """Whether two calls are of one function."""
    return _common(one) == _common(other)


def _common(call: TracedCall) -> str:
    if call.function == "div" and isinstance(call.arguments.get("other"), float | int):
        return "mul"  # by a number
    return call.function or _OF_LAYERS.get(call.layer_type.lower(), call.layer_type.lower())


# Functions that do what a layer does, by the layer's class.
_OF_LAYERS: Mapping[str, str] = {
    "silu": "swish",
    "logsoftmax": "log_softmax",
    "leakyrelu": "leaky_relu",
    "maxpool2d": "max_pool2d",
    "avgpool2d": "avg_pool2d",
    "layernorm": "layer_norm",
}
