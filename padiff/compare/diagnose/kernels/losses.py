"""Building blocks of losses: targets from labels, class weights, and functions of an error."""

from __future__ import annotations

import numpy as np


def targets(labels: np.ndarray, classes: int, smoothing: float = 0.0) -> np.ndarray:
    """Return a row of class probabilities for each label, smoothed; an ignored label has no true class."""
    hot = np.arange(classes) == labels[..., None].astype(np.int64)
    return np.asarray(hot * (1.0 - smoothing) + smoothing / classes)


def picked(x: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    return np.take_along_axis(x, index.astype(np.int64), axis)


def of_classes(weights: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the weight of each label's class."""
    return np.asarray(weights[np.clip(labels.astype(np.int64), 0, len(weights) - 1)])


def huber(error: np.ndarray, beta: float, divided: bool) -> np.ndarray:
    size = np.abs(error)
    inside = 0.5 * np.square(error) if not divided else 0.5 * np.square(error) / beta
    outside = size - 0.5 * beta if divided else beta * (size - 0.5 * beta)
    return np.asarray(np.where(size < beta, inside, outside))
