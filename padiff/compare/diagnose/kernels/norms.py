"""Normalisations, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def normalised(
    x: np.ndarray, axes: Sequence[int], eps: float, centred: bool = True, root: bool = True, unbiased: bool = False
) -> np.ndarray:
    """Return the values minus their mean, divided by the root of their variance plus epsilon, over the axes.

    Args:
        centred: False to leave the mean in.
        root: False to divide by the variance itself.
        unbiased: True for the unbiased variance.
    """
    axes = tuple(axes)
    mean = x.mean(axes, keepdims=True) if centred else 0.0
    count = math.prod(x.shape[axis] for axis in axes)
    square = np.mean(np.square(x - mean), axes, keepdims=True) * (count / (count - 1) if unbiased else 1.0)
    return np.asarray((x - mean) / (np.sqrt(square + eps) if root else square + eps))


def grouped(x: np.ndarray, groups: int, eps: float, centred: bool = True) -> np.ndarray:
    """Return the values normalised within each group of channels."""
    parts = x.reshape(len(x), groups, -1)
    return normalised(parts, (2,), eps, centred).reshape(x.shape)


def by_statistics(x: np.ndarray, mean: np.ndarray, variance: np.ndarray, eps: float, train: bool) -> np.ndarray:
    """Return the values normalised by channel, with the batch's statistics if ``train``, else with the given ones."""
    if train:
        return normalised(x, (0, *range(2, x.ndim)), eps)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return np.asarray((x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + eps))


def channelwise(x: np.ndarray, parameter: np.ndarray, how: str) -> np.ndarray:
    """Return the values multiplied by (``mul``) or added to a parameter of each channel, along the second axis."""
    shaped = parameter.reshape(1, -1, *[1] * (x.ndim - 2))
    return np.asarray(x * shaped if how == "mul" else x + shaped)
