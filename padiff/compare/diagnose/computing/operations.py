"""Operations of both frameworks on numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from padiff.compare.diagnose.kernels import (
    act,
    by_statistics,
    channelwise,
    conv,
    conv_transpose,
    einsum,
    elements_added,
    elements_reduced,
    erf,
    grouped,
    gru,
    huber,
    indexed,
    looked_up,
    lstm,
    normalised,
    of_classes,
    pad,
    picked,
    pool,
    pool_to,
    resized,
    rnn,
    rows,
    rows_added,
    rows_set,
    sampled,
    softmax,
    targets,
)


def getitem(x: np.ndarray, key: Any) -> np.ndarray:
    return np.asarray(x[index_of(key)])


def setitem(x: np.ndarray, value: np.ndarray, key: Any) -> np.ndarray:
    result = np.array(x)
    result[index_of(key)] = value
    return result


def index_of(key: Any) -> Any:
    """Return a numpy index from the form that a trace stores: numbers, ``"1:3"``, ``"..."``, `None`, lists of these."""
    parts: list[Any] = []
    for part in key if isinstance(key, list) else [key]:
        if part == "...":
            parts.append(Ellipsis)
        elif isinstance(part, str):
            parts.append(slice(*(int(each) if each else None for each in part.split(":"))))
        elif isinstance(part, list):
            parts.append(np.array(part))
        else:
            parts.append(part)
    return tuple(parts)


def causal(x: np.ndarray, diagonal: int = 1, value: float = -1e30) -> np.ndarray:
    """Return scores with later positions hidden.

    Args:
        diagonal: the first hidden diagonal above the main one.
        value: the score of hidden positions.
    """
    hidden = np.triu(np.ones(x.shape[-2:], bool), diagonal)
    return np.where(hidden, value, x)


def masked(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return masked scores: a boolean mask hides positions that are False, a mask of numbers is added."""
    return np.where(mask, x, -1e30) if mask.dtype == bool else _in_single(np.add)(x, mask)


#: Numbers of at least this size hide what is added to them.
_HUGE = 1e6


def _in_single(operation: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Return an operation that rounds the numbers of its result that stand for infinity to float32.

    In float32, adding such a number hides the other summand. Beside it, rounding would only blur slopes.
    """

    def made(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        result = np.asarray(operation(x, y))
        if result.dtype.kind != "f" or not result.size or np.abs(result).max() < _HUGE:
            return result
        return np.where(np.abs(result) < _HUGE, result, result.astype(np.float32))

    return made


def clamp(x: np.ndarray, low: float = -math.inf, high: float = math.inf) -> np.ndarray:
    clipped = np.clip(x, low, high)
    # Clipped labels stay integers.
    is_integer = x.dtype.kind in "iu" and all(math.isinf(limit) or limit == int(limit) for limit in (low, high))
    return np.asarray(clipped.astype(x.dtype) if is_integer else clipped)


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return values rounded to a dtype, stored in float64; bool or int64 for boolean and integer dtypes."""
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
    if dtype in kinds:
        return np.asarray(x.astype(np.float32).astype(kinds[dtype]).astype(np.float64))
    if dtype in ("bool", "bool_"):
        return x.astype(bool)
    if dtype.startswith(("int", "uint")):
        return x.astype(np.int64)
    return x.astype(np.float64)


_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each for each in (np.sum, np.mean, np.max, np.min, np.amax, np.amin, np.prod, np.any, np.all)
}


def reduced(x: np.ndarray, by: str, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> np.ndarray:
    """Return sum, mean, maximum, minimum, product, variance, standard deviation, norm or log-sum-exp over axes."""
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else axis
    if by in ("var", "std"):
        result = x.var(axes, keepdims=keepdims, ddof=ddof)
        return np.asarray(np.sqrt(result) if by == "std" else result)
    if by == "norm":
        return np.asarray(np.sqrt(np.sum(np.square(x), axes, keepdims=keepdims)))
    if by == "logsumexp":
        top = x.max(axes, keepdims=True)
        result = np.log(np.sum(np.exp(x - top), axes, keepdims=True)) + top
        return np.asarray(result if keepdims else np.squeeze(result, axes))
    if by not in _REDUCTIONS:
        raise ValueError(f"no known reduction: {by!r}")  # a run's word, which may be a stranger's
    return np.asarray(_REDUCTIONS[by](x, axis=axes, keepdims=keepdims))


def reshaped(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    # A 0 of paddle's stands for the extent of the tensor itself.
    return x.reshape([int(n) or (x.shape[k] if x.size else 0) for k, n in enumerate(shape)])


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
    # Scores of minus infinity hide places: no target is there, and none times infinity is no number.
    "log_softmax": lambda x, axis=-1: np.maximum(x - reduced(x, "logsumexp", axis, True), -1e300),
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
    "cumprod": lambda x, axis: np.cumprod(x, axis),
    "logcumsumexp": lambda x, axis: np.logaddexp.accumulate(x, axis),
    "kron": np.kron,
    "cholesky": np.linalg.cholesky,
    "solve": np.linalg.solve,
    "inv": np.linalg.inv,
    "det": np.linalg.det,
    "fmod": np.fmod,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.round,
    "expm1": np.expm1,
    "log1p": np.log1p,
    "tan": np.tan,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "sign": np.sign,
    "log10": np.log10,
    "log2": np.log2,
    "erf": erf,
    "erfc": lambda x: 1 - erf(x),
    "acos": np.arccos,
    "asin": np.arcsin,
    "acosh": np.arccosh,
    "asinh": np.arcsinh,
    "atanh": np.arctanh,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "logaddexp": np.logaddexp,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "nan_to_num": lambda x, nan=0.0: np.where(np.isnan(x), nan, x),
    "diagonal": lambda x, offset=0, first=0, second=1: np.diagonal(x, offset, first, second),
}  # fmt: skip
#: All operations, by name.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **_KNOWN,
    "act": act,
    "normalised": normalised,
    "grouped": grouped,
    "by_statistics": by_statistics,
    "channelwise": channelwise,
    "getitem": getitem,
    "setitem": setitem,
    "einsum": einsum,
    "indexed": indexed,
    "rows": rows,
    "rows_added": rows_added,
    "rows_set": rows_set,
    "elements_added": elements_added,
    "elements_reduced": elements_reduced,
    "lstm": lstm,
    "gru": gru,
    "rnn": rnn,
    "looked_up": looked_up,
    "causal": causal,
    "masked": masked,
    "cast": cast,
    "detach": lambda x: x,
    "dropped": np.multiply,
    "reduced": reduced,
    "reshape": reshaped,
    "conv": conv,
    "conv_transpose": conv_transpose,
    "pool": pool,
    "pool_to": pool_to,
    "pad": pad,
    "resized": resized,
    "sampled": sampled,
    "targets": targets,
    "picked": picked,
    "of_classes": of_classes,
    "huber": huber,
}
