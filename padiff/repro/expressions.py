"""Recorded calls as code of their framework."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padiff.frameworks.catalog import ARGUMENTS, SPELLINGS, heard_name, number_text, parameters_of
from padiff.frameworks.losses import LOSS_SETTINGS
from padiff.model import equivalents
from padiff.records import Layer, TracedCall
from padiff.records.sources import DTYPES
from padiff.repro.languages import LANGUAGES, OPERATORS, CannotWriteError, Language
from padiff.system.code import literal, refused

_POOL = ("kernel_size", "stride", "padding", "ceil_mode")
_CONV = ("stride", "padding", "dilation", "groups")
_STATISTICS = ("running_mean", "running_var")
# Elementwise functions without settings.
_SAME = "relu relu6 selu mish tanh sigmoid hardswish hardsigmoid softsign tanhshrink logsigmoid"
# Common kind of layer -> function, slots of the layer's tensors, and settings that are arguments.
_LAYERS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "linear": ("linear", ("weight", "bias"), ()),
    **{f"conv{n}d": (f"conv{n}d", ("weight", "bias"), _CONV) for n in (1, 2, 3)},
    **{f"convtranspose{n}d": (f"convtranspose{n}d", ("weight", "bias"), _CONV) for n in (1, 2, 3)},
    "embedding": ("embedding", ("weight",), ("padding_idx",)),
    "layernorm": ("layer_norm", ("weight", "bias"), ("normalized_shape", "eps")),
    "rmsnorm": ("rmsnorm", ("weight",), ("normalized_shape", "eps")),
    "groupnorm": ("group_norm", ("weight", "bias"), ("num_groups", "eps")),
    **{f"batchnorm{n}d": ("batch_norm", (*_STATISTICS, "weight", "bias"), ("training", "momentum", "eps"))
       for n in (1, 2, 3)},
    **{f"instancenorm{n}d": ("instance_norm", ("weight", "bias"), ("eps",)) for n in (1, 2, 3)},
    **{f"maxpool{n}d": (f"max_pool{n}d", (), _POOL) for n in (1, 2, 3)},
    **{f"avgpool{n}d": (f"avg_pool{n}d", (), (*_POOL, "count_include_pad")) for n in (1, 2, 3)},
    **{f"adaptive{how}pool{n}d": (f"adaptive_{how}_pool{n}d", (), ("output_size",)) for n in (1, 2, 3)
       for how in ("avg", "max")},
    **{name: (name, (), ()) for name in _SAME.split()},
    "swish": ("silu", (), ()),
    "gelu": ("gelu", (), ("approximate",)),
    "leakyrelu": ("leaky_relu", (), ("slope",)),
    "elu": ("elu", (), ("alpha",)),
    "celu": ("celu", (), ("alpha",)),
    "softplus": ("softplus", (), ("beta",)),
    "prelu": ("prelu", ("weight",), ()),
    "softmax": ("softmax", (), ("axis",)),
    "logsoftmax": ("log_softmax", (), ("axis",)),
}  # fmt: skip
#: Functions that layers are written as, and the arguments of these functions.
LAYER_FUNCTIONS = frozenset(function for function, _, _ in _LAYERS.values())
LAYER_ARGUMENTS = frozenset(name for _, slots, names in _LAYERS.values() for name in (*slots, *names)) | {"dim", "axis"}
# Layers that return their input, if they are not in training mode.
_QUIET = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout", "identity"})
_DROPS = frozenset({"dropout", "dropout2d", "dropout3d", "alpha_dropout"})


def language_of(framework: str) -> Language:
    """Return the language of a framework.

    Raises:
        CannotWriteError: scripts of the framework are not supported.
    """
    language = LANGUAGES.get(framework)
    if language is None:
        raise CannotWriteError(f"scripts are written for {' and '.join(LANGUAGES)}; the run is one of {framework}")
    return language


def is_writable(layer: Layer) -> bool:
    """Return True if a layer is one of the framework's own, and can be written as a function call."""
    kind = equivalents.kind(layer)
    return (
        not layer.children
        and layer.type.lower() == layer.kind
        and (kind in _LAYERS or kind in _QUIET or kind == "flatten")
    )


def owned(layer: Layer) -> tuple[str, ...]:
    """Return the common names of the layer's tensors that its function takes."""
    return _LAYERS.get(equivalents.kind(layer), ("", (), ()))[1]


def layer_text(
    framework: str,
    layer: Layer,
    given: str,
    tensors: Mapping[str, str],
    training: bool | None,
    output: tuple[int, ...],
    axis: int | None = None,
) -> str:
    """Return the call of a layer as a call of its framework's function.

    Args:
        framework: the framework.
        layer: the layer.
        given: variable of the input.
        tensors: variables of the layer's tensors, by common slot.
        training: training mode of the layer; `None`: unknown.
        output: shape of the output.
        axis: axis of a softmax, which is not in the layer's settings.

    Raises:
        CannotWriteError: the layer can't be written as a call, or a setting was not recorded.
    """
    kind, settings = equivalents.kind(layer), dict(layer.settings)
    if kind in _QUIET:
        if kind != "identity" and training is not False and settings.get("p") != 0:
            raise CannotWriteError(
                f"`{layer.path}` ({layer.type}) uses dropout, and the run has no masks. Record with "
                "replay_every_n_steps, and do the step again with `padiff replay`, which gives it the same masks"
            )
        return given
    if kind == "flatten":
        return f"{given}.reshape({literal(list(output))})"
    if kind not in _LAYERS:
        raise CannotWriteError(f"`{layer.path}` is a {layer.type}, which is not known here as a function's call")
    language, spelling = language_of(framework), SPELLINGS[framework]
    function, slots, names = _LAYERS[kind]
    if settings.get("padding_mode", "zeros") != "zeros":
        raise CannotWriteError(f"`{layer.path}` pads with padding_mode={settings['padding_mode']!r}: not known here")
    matrix = next((p for p in layer.parameters if equivalents.slot(p.slot) == "weight"), None)
    if kind.startswith("batchnorm"):
        if training is None:
            raise CannotWriteError(f"it is not recorded whether `{layer.path}` ({layer.type}) trains")
        settings["training"] = training
    if "normalized_shape" in names:
        shape: list[int] = []
        size = math.prod(matrix.shape) if matrix is not None else output[-1]
        for extent in reversed(output):
            if shape and math.prod(shape) >= size:
                break
            shape.insert(0, extent)
        settings["normalized_shape"] = shape
    if "output_size" in names:
        settings["output_size"] = list(output[2:])
    if axis is not None:
        settings["axis"] = axis
    arguments = [f"{slot}={tensors[slot]}" for slot in slots if slot in tensors]
    other = {"in_out", "out_in"} - {FUNCTIONAL_LAYOUT[framework]}
    if kind == "linear" and matrix is not None and matrix.layout in other:
        arguments[0] += ".T"
    for name in names:
        if name not in settings:
            if name in ("eps", "num_groups", "axis", "kernel_size"):
                raise CannotWriteError(f"`{layer.path}` ({layer.type}) was recorded without its {name}")
            continue
        value = settings[name]
        if name == "padding_idx" and value == "none":
            continue
        convert = spelling.converted.get(name)
        try:
            value = convert(value) if convert is not None else value
        except (TypeError, ValueError, OverflowError):
            raise CannotWriteError(f"`{layer.path}` ({layer.type}) was recorded with {name}={value!r}") from None
        argument = _AXIS[framework] if name == "axis" else spelling.arguments.get(name, name)
        argument = language.arguments.get(f"{function}.{name}", argument)
        arguments.append(f"{argument}={number_text(value)}")
    return f"{language.functional}.{language.layers.get(function, function)}({', '.join([given, *arguments])})"


#: Layout of the matrix in ``linear``.
FUNCTIONAL_LAYOUT = {"torch": "out_in", "paddle": "in_out"}
_AXIS = {"torch": "dim", "paddle": "axis"}


def softmax_axis(output: np.ndarray) -> int | None:
    """Return the axis (negative) along which an output adds up to 1; `None` if no axis does, or several do."""
    axes = [
        axis
        for axis in range(output.ndim)
        if output.shape[axis] > 1 and np.allclose(output.astype(np.float64).sum(axis), 1, atol=1e-3)
    ]
    return axes[0] - output.ndim if len(axes) == 1 else None


# -- functions ---------------------------------------------------------------------------------------------------------


def function_text(
    framework: str, call: TracedCall, operands: Mapping[str, str], parameters: Sequence[str], dtype: str
) -> str:
    """Return a function call inside a layer as one line of code.

    Args:
        framework: the framework.
        call: the recorded call.
        operands: variables of the inputs, by slot.
        parameters: variables of parameters, whose slots are not recorded.
        dtype: dtype of the output.

    Raises:
        CannotWriteError: the call can't be written.
        ForeignCodeError: the name of the function, of an argument or of the dtype is not in the catalog.
    """
    language, name = language_of(framework), call.function
    arguments = {key: value for key, value in call.arguments.items() if key not in ("inplace", "name", "out")}
    if heard_name(name) != name:
        raise refused("the function", name)
    if name in _DROPS:
        if operands and (arguments.get("p") == 0 or arguments.get("training") is False):
            return next(iter(operands.values()))
        raise CannotWriteError(f"the code of `{call.layer}` uses dropout, and the run has no masks")
    if name in ("cast", "to"):
        if dtype not in DTYPES:
            raise refused("the dtype", dtype)
        if not operands:
            raise CannotWriteError(f"the code of `{call.layer}` casts what is no tensor")
        return language.cast.format(next(iter(operands.values())), literal(dtype))
    if name == "getitem":
        key = next((value for slot, value in arguments.items() if slot in ("key", "item", "1")), None)
        if len(operands) != 1 or key is None:
            raise CannotWriteError(
                f"the code of `{call.layer}` takes parts of a tensor by another tensor: not known here"
            )
        return f"{next(iter(operands.values()))}[{_index(key)}]"
    tensors = _lists(operands)
    named = _named(call, tensors, arguments, parameters)
    if name in OPERATORS and len(named) == OPERATORS[name].count("{"):
        first, second = _in_order(call, named)
        return OPERATORS[name].format(_atom(first), _atom(second))
    if name in language.methods and (tensors or parameters):
        receiver, *others = _positional(named)
        return f"{_atom(receiver[1])}.{language.methods[name]}({', '.join(_argument(*pair) for pair in others)})"
    if name not in language.calls:
        raise CannotWriteError(
            f"the code of `{call.layer}` calls {name}(), which is not known here as a line of {framework}"
        )
    return f"{language.calls[name]}({', '.join(_argument(*pair) for pair in _positional(named))})"


def _lists(operands: Mapping[str, str]) -> dict[str, str]:
    """Return operands by parameter; the operands of a list become one list."""
    names_by_slot: dict[str, list[str]] = {}
    for slot, name in operands.items():
        names_by_slot.setdefault(slot if slot.isdigit() else slot.partition(".")[0], []).append(name)
    several = {slot.partition(".")[0] for slot in operands if "." in slot}
    return {slot: f"[{', '.join(names)}]" if slot in several else names[0] for slot, names in names_by_slot.items()}


def _named(
    call: TracedCall, tensors: Mapping[str, str], arguments: Mapping[str, Any], parameters: Sequence[str]
) -> dict[str, str]:
    """Return all arguments by parameter, in the order of the function's parameters as far as known."""
    named = {**tensors, **{name: _value(value) for name, value in arguments.items()}}
    parameter_names = list(parameters_of(call.function))
    if ({"x", "y"} & named.keys() and call.function in OPERATORS) or "x" in named:
        parameter_names = [{"input": "x", "other": "y"}.get(name, name) for name in parameter_names]
    elif "self" in named:
        parameter_names = ["self" if name == "input" else name for name in parameter_names]
    waiting = list(parameters)
    usual = [
        *parameter_names,
        *(name for name in ("weight", "bias") if name not in parameter_names),
        *map(str, range(8)),
    ]
    numbered = any(name.isdigit() for name in named) and not any(name in parameter_names for name in named)
    for name in map(str, range(8)) if numbered else usual:
        if waiting and name not in named:
            named[name] = waiting.pop(0)
    order = {name: place for place, name in enumerate(usual)}
    return dict(sorted(named.items(), key=lambda item: int(item[0]) if item[0].isdigit() else order.get(item[0], 99)))


def _in_order(call: TracedCall, named: Mapping[str, str]) -> tuple[str, str]:
    values = list(named.values())
    return values[0], values[-1]


def _positional(named: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the arguments with their keywords, which are empty for the first and for purely positional arguments."""
    return [("" if name.isdigit() or place == 0 else name, value) for place, (name, value) in enumerate(named.items())]


def _argument(name: str, value: str) -> str:
    return keyword_text(name, value) if name else value


def keyword_text(name: str, value: str) -> str:
    """Return a keyword argument as code.

    Raises:
        ForeignCodeError: no function in the catalog has this argument.
    """
    if name not in ARGUMENTS and name not in LOSS_SETTINGS:
        raise refused("the argument", name)
    return f"{name}={value}"


def _atom(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_]+|[0-9.]+", text) else f"({text})"


def _value(value: Any) -> str:
    if value in ("inf", "-inf", "nan"):
        return literal(float(value))
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    return literal(value)


def _index(key: Any) -> str:
    """Return a recorded index as the code in the brackets."""
    if isinstance(key, list):
        return ", ".join(_index(item) for item in key)
    if isinstance(key, str) and re.fullmatch(r"\.\.\.|-?\d*:-?\d*(:-?\d*)?", key, re.ASCII):
        return key
    if key is None or isinstance(key, (bool, int)):
        return literal(key)
    raise CannotWriteError(f"a part of a tensor is taken by {key!r}: not known here")
