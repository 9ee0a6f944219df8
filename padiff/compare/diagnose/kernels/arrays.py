"""Kernels of writes and lookups by an index, and of products by an equation."""

from __future__ import annotations

from typing import Any

import numpy as np


def einsum(*operands: np.ndarray, equation: str) -> np.ndarray:
    return np.asarray(np.einsum(equation.replace(" ", ""), *operands))


def indexed(x: np.ndarray, *indices: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return the elements at indices of some axes; the axes in between are whole."""
    key: list[Any] = [slice(None)] * (max(axes) + 1)
    for axis, index in zip(axes, indices):
        key[axis] = index
    return np.asarray(x[tuple(key)])


def rows(x: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    return np.take(x, index.astype(np.int64), axis)


def rows_added(x: np.ndarray, index: np.ndarray, source: np.ndarray, axis: int) -> np.ndarray:
    """Return a tensor with the rows of another one added at the places of an index."""
    total = np.moveaxis(np.array(x), axis, 0)
    np.add.at(total, index.astype(np.int64), np.moveaxis(source, axis, 0))
    return np.moveaxis(total, 0, axis)


def rows_set(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return a tensor with zeros in the rows of an index."""
    cleared = np.array(x)
    cleared[index.astype(np.int64)] = 0.0
    return cleared


def elements_added(x: np.ndarray, index: np.ndarray, source: np.ndarray, axis: int) -> np.ndarray:
    """Return a tensor with the elements of another one added, each at its index along an axis."""
    total = np.array(x)
    places: list[Any] = list(np.indices(index.shape))
    places[axis] = index.astype(np.int64)
    np.add.at(total, tuple(places), source[tuple(map(slice, index.shape))])
    return total
