"""Operations on arrays, as both frameworks have them, in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from padiff.compare.diagnose.computing.windows import conv, conv_transpose, pad, pool, resized
from padiff.compare.diagnose.hypotheses.activations import FUNCTIONS, softmax

_NONE = "no activation"


def act(x: np.ndarray, function: str, number: float | None = None) -> np.ndarray:
    """A function of each element; a number is what it is set to."""
    if function == _NONE:
        return x
    if number is not None:
        return np.asarray(_WITH_NUMBER[function](x, number))
    return np.asarray(FUNCTIONS[function](x))


_WITH_NUMBER: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "leaky ReLU": lambda x, slope: np.where(x > 0, x, slope * x),
    "ELU": lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    "softplus": lambda x, beta: np.logaddexp(0, beta * x) / beta,
}
#: Functions that have a number, with the usual one.
WITH_NUMBER = {"leaky ReLU": 0.01, "ELU": 1.0, "softplus": 1.0}


def normalised(
    x: np.ndarray, axes: Sequence[int], eps: float, centred: bool = True, root: bool = True, unbiased: bool = False
) -> np.ndarray:
    """Values less their mean, over the root of their variance."""
    axes = tuple(axes)
    mean = x.mean(axes, keepdims=True) if centred else 0.0
    count = math.prod(x.shape[axis] for axis in axes)
    square = np.mean(np.square(x - mean), axes, keepdims=True) * (count / (count - 1) if unbiased else 1.0)
    return np.asarray((x - mean) / (np.sqrt(square + eps) if root else square + eps))


def grouped(x: np.ndarray, groups: int, eps: float, centred: bool = True) -> np.ndarray:
    """Normalised within each group of channels."""
    parts = x.reshape(len(x), groups, -1)
    return normalised(parts, (2,), eps, centred).reshape(x.shape)


def by_statistics(x: np.ndarray, mean: np.ndarray, variance: np.ndarray, eps: float, train: bool) -> np.ndarray:
    """Normalised by channel, with a batch's statistics or with given ones."""
    if train:
        return normalised(x, (0, *range(2, x.ndim)), eps)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return np.asarray((x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + eps))


def channelwise(x: np.ndarray, parameter: np.ndarray, how: str) -> np.ndarray:
    """A parameter for each channel, applied along the second axis."""
    shaped = parameter.reshape(1, -1, *[1] * (x.ndim - 2))
    return np.asarray(x * shaped if how == "mul" else x + shaped)


def getitem(x: np.ndarray, key: Any) -> np.ndarray:
    return np.asarray(x[index_of(key)])


def index_of(key: Any) -> Any:
    """An index as a trace writes it: numbers, ``"1:3"``, ``"..."``, `None`, lists of them."""
    parts: list[Any] = []
    for one in key if isinstance(key, list) else [key]:
        if one == "...":
            parts.append(Ellipsis)
        elif isinstance(one, str):
            parts.append(slice(*(int(each) if each else None for each in one.split(":"))))
        elif isinstance(one, list):
            parts.append(np.array(one))
        else:
            parts.append(one)
    return tuple(parts)


def lstm(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, order: Sequence[int] = (0, 1, 2, 3),
    backward: bool = False, inner: str = "tanh", outer: str = "tanh", gate: str = "sigmoid", forget: float = 0.0,
    time_first: bool = False,
) -> np.ndarray:  # fmt: skip
    """Hidden states of all steps; the gates are input, forget, cell, output, in an order."""
    x = np.swapaxes(x, 0, 1) if not time_first else x
    h = c = np.zeros((x.shape[1], u.shape[1]))
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        parts = np.split(x[t] @ w.T + h @ u.T + sum(biases, np.zeros(len(w))), 4, axis=-1)
        i, f, g, o = (parts[k] for k in order)
        c = act(f + forget, gate) * c + act(i, gate) * act(g, inner)
        h = act(o, gate) * act(c, outer)
        states.append(h)
    found = np.stack(states)
    return found if time_first else np.swapaxes(found, 0, 1)


def gru(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, order: Sequence[int] = (0, 1, 2),
    backward: bool = False, inner: str = "tanh", turned: bool = False, time_first: bool = False,
) -> np.ndarray:  # fmt: skip
    """Hidden states of all steps; the gates are reset, update, new, in an order."""
    x = np.swapaxes(x, 0, 1) if not time_first else x
    one, other = biases if biases else (np.zeros(len(w)), np.zeros(len(w)))
    h = np.zeros((x.shape[1], u.shape[1]))
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        given, kept = (np.split(part, 3, axis=-1) for part in (x[t] @ w.T + one, h @ u.T + other))
        (ri, zi, ni), (rh, zh, nh) = ([part[k] for k in order] for part in (given, kept))
        r, z = act(ri + rh, "sigmoid"), act(zi + zh, "sigmoid")
        n = act(ni + r * nh, inner)
        h = z * n + (1 - z) * h if turned else (1 - z) * n + z * h
        states.append(h)
    found = np.stack(states)
    return found if time_first else np.swapaxes(found, 0, 1)


def rnn(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, inner: str = "tanh", backward: bool = False,
    time_first: bool = False,
) -> np.ndarray:  # fmt: skip
    """Hidden states of all steps."""
    x = np.swapaxes(x, 0, 1) if not time_first else x
    h = np.zeros((x.shape[1], u.shape[1]))
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        h = act(x[t] @ w.T + h @ u.T + sum(biases, np.zeros(len(w))), inner)
        states.append(h)
    found = np.stack(states)
    return found if time_first else np.swapaxes(found, 0, 1)


def looked_up(indices: np.ndarray, table: np.ndarray, zero: int | None = None) -> np.ndarray:
    """Rows of a table; those of one index may be zeros."""
    found = np.asarray(table[indices])
    return found if zero is None else np.where((indices == zero)[..., None], 0.0, found)


def causal(x: np.ndarray, diagonal: int = 1, value: float = -1e30) -> np.ndarray:
    """Scores of which those after a place are hidden."""
    hidden = np.triu(np.ones(x.shape[-2:], bool), diagonal)
    return np.where(hidden, value, x)


def masked(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Scores with a mask: of truths, what is false is hidden; of numbers, they are added."""
    return np.where(mask, x, -1e30) if mask.dtype == bool else _in_single(np.add)(x, mask)


#: From this size on, numbers leave nothing of what they are added to.
_HUGE = 1e6


def _in_single(operation: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Sums with numbers that stand for infinity, which float32 rounds to these."""

    def made(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        found = np.asarray(operation(x, y))
        if found.dtype.kind != "f" or not found.size or np.abs(found).max() < _HUGE:
            return found
        return np.asarray(found.astype(np.float32).astype(np.float64))

    return made


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Values as a type holds them."""
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
    if dtype in kinds:
        return np.asarray(x.astype(np.float32).astype(kinds[dtype]).astype(np.float64))
    if dtype in ("bool", "bool_"):
        return x.astype(bool)
    if dtype.startswith(("int", "uint")):
        return x.astype(np.int64)
    return x.astype(np.float64)


def reduced(x: np.ndarray, by: str, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> np.ndarray:
    """Sum, mean, largest, smallest, variance, deviation, norm, or product over axes."""
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else axis
    if by in ("var", "std"):
        found = x.var(axes, keepdims=keepdims, ddof=ddof)
        return np.asarray(np.sqrt(found) if by == "std" else found)
    if by == "norm":
        return np.asarray(np.sqrt(np.sum(np.square(x), axes, keepdims=keepdims)))
    if by == "logsumexp":
        top = x.max(axes, keepdims=True)
        found = np.log(np.sum(np.exp(x - top), axes, keepdims=True)) + top
        return np.asarray(found if keepdims else np.squeeze(found, axes))
    return np.asarray(getattr(np, by)(x, axis=axes, keepdims=keepdims))


def reshaped(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return x.reshape([int(n) for n in shape])


def _power(x: np.ndarray, y: Any) -> np.ndarray:
    return np.asarray(np.power(x, y, dtype=np.float64))


_KNOWN: dict[str, Callable[..., Any]] = {
    "add": _in_single(np.add),
    "sub": _in_single(np.subtract),
    "mul": np.multiply,
    "div": np.divide,
    "pow": _power,
    "matmul": np.matmul,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "remainder": np.remainder,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "square": np.square,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_not": np.logical_not,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "where": np.where,
    "softmax": lambda x, axis=-1: softmax(x, axis),
    "log_softmax": lambda x, axis=-1: x - reduced(x, "logsumexp", axis, True),
    "clamp": lambda x, low=-math.inf, high=math.inf: np.clip(x, low, high),
    "transpose": lambda x, order: np.transpose(x, order),
    "cat": lambda *parts, axis=0: np.concatenate(parts, axis),
    "stack": lambda *parts, axis=0: np.stack(parts, axis),
    "expand": lambda x, shape: np.broadcast_to(
        x, [own if n == -1 else n for n, own in zip(shape, [1] * (len(shape) - x.ndim) + list(x.shape))]
    ),
    "triu": lambda x, diagonal=0: np.triu(x, diagonal),
    "tril": lambda x, diagonal=0: np.tril(x, diagonal),
    "roll": lambda x, shift, axis: np.roll(x, shift, axis),
    "flip": lambda x, axis: np.flip(x, axis),
    "repeat": lambda x, count, axis: np.repeat(x, count, axis),
    "tile": lambda x, counts: np.tile(x, counts),
    "outer": np.outer,
    "cumsum": lambda x, axis: np.cumsum(x, axis),
}  # fmt: skip
#: All of them, by name.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **_KNOWN,
    "act": act,
    "normalised": normalised,
    "grouped": grouped,
    "by_statistics": by_statistics,
    "channelwise": channelwise,
    "getitem": getitem,
    "lstm": lstm,
    "gru": gru,
    "rnn": rnn,
    "looked_up": looked_up,
    "causal": causal,
    "masked": masked,
    "cast": cast,
    "reduced": reduced,
    "reshape": reshaped,
    "conv": conv,
    "conv_transpose": conv_transpose,
    "pool": pool,
    "pad": pad,
    "resized": resized,
}
