"""Activation functions of both frameworks in float64, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

Function = Callable[[np.ndarray], np.ndarray]


def erf(x: np.ndarray) -> np.ndarray:
    """Return the error function, exact to about 1e-13: a series near zero, a continued fraction beyond."""
    size = np.abs(x)
    near = np.minimum(size, 3.0)
    term = total = near.copy()
    for n in range(1, 60):
        term = -term * near * near / n
        total = total + term / (2 * n + 1)
    far = np.maximum(size, 2.5)
    fraction = np.zeros_like(far)
    for n in range(60, 0, -1):
        fraction = n / 2 / (far + fraction)
    with np.errstate(under="ignore"):
        beyond = 1 - np.exp(-far * far) / (math.sqrt(math.pi) * (far + fraction))
    return np.asarray(np.sign(x) * np.where(size < 2.75, 2 / math.sqrt(math.pi) * total, beyond))


def gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def leaky(slope: float) -> Function:
    return lambda x: np.where(x > 0, x, slope * x)


def _elu(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.where(x > 0, x, np.expm1(np.minimum(x, 0))))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.logaddexp(0, x))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    raised = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(raised / raised.sum(axis=axis, keepdims=True))


#: Functions by name, the usual ones first.
FUNCTIONS: Mapping[str, Function] = {
    "ReLU": lambda x: np.maximum(x, 0.0),
    "exact GELU": gelu,
    "tanh-form GELU": gelu_tanh,
    "SiLU": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "sigmoid-form GELU": lambda x: x * sigmoid(1.702 * x),
    "ELU": _elu,
    "softplus": _softplus,
    "ReLU6": lambda x: np.clip(x, 0.0, 6.0),
    "Hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0.0, 1.0),
    "Hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0.0, 1.0),
    "Mish": lambda x: x * np.tanh(_softplus(x)),
    "SELU": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0))),
    "squared ReLU": lambda x: np.square(np.maximum(x, 0.0)),
    **{f"leaky ReLU of slope {slope:g}": leaky(slope) for slope in (0.01, 0.1, 0.2, 0.3, 0.25, 0.05)},
}

_NONE = "no activation"


def act(x: np.ndarray, function: str, number: float | None = None) -> np.ndarray:
    """Return an activation of each element, with its parameter set to ``number`` if there is one."""
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
