"""Operations on arrays, as both frameworks have them, in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from padiff.compare.diagnose.kernels.activations import act, softmax
from padiff.compare.diagnose.kernels.cells import gru, lstm, rnn
from padiff.compare.diagnose.kernels.losses import huber, of_classes, picked, targets
from padiff.compare.diagnose.kernels.norms import by_statistics, channelwise, grouped, normalised
from padiff.compare.diagnose.kernels.tables import looked_up
from padiff.compare.diagnose.kernels.windows import conv, conv_transpose, pad, pool, resized


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


def clamp(x: np.ndarray, low: float = -math.inf, high: float = math.inf) -> np.ndarray:
    found = np.clip(x, low, high)
    # Labels that are clipped are labels.
    whole = x.dtype.kind in "iu" and all(math.isinf(one) or one == int(one) for one in (low, high))
    return np.asarray(found.astype(x.dtype) if whole else found)


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
    "clamp": clamp,
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
    "targets": targets,
    "picked": picked,
    "of_classes": of_classes,
    "huber": huber,
}
