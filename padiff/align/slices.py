"""Pairs of parameters or of their rows, and ambiguities about their storage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from padiff.records import Both


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter, or some rows or columns of it.

    A matrix has the order (out, in) here. Its rows form ``groups`` equal groups (1: a single group; the number of heads
    if query, key and value alternate head by head); the slice contains the rows ``start`` to ``stop`` of each group.

    Attributes:
        layer, slot: the parameter.
        shape: the shape in which the framework stores it.
        layout: ``in_out`` if the stored matrix is transposed.
        stop: `None` for all rows to the end.
        columns: start and stop of a matrix's columns; `None` for all columns.
        axes: permutation that gives the parameter the other side's order of axes; empty for the same order.
        label: name of the rows (``key``), if both sides store them in one parameter.
        element: position in a stack of matrices along the first axis, to which all other fields then apply; `None` for
            a parameter that is no stack.
    """

    layer: str
    slot: str
    shape: tuple[int, ...]
    layout: str = ""
    groups: int = 1
    start: int = 0
    stop: int | None = None
    columns: tuple[int, int] | None = None
    axes: tuple[int, ...] = ()
    label: str = ""
    element: int | None = None

    @property
    def whole(self) -> bool:
        return self.stop is None and self.columns is None and self.element is None

    @property
    def site(self) -> str:
        return f"{self.layer}/{self.slot}" + ("" if self.whole else f"[{self.rows_text}]")

    @property
    def rows_text(self) -> str:
        rows = ":" if self.stop is None else f"{self.start}:{self.stop}"
        columns = f", {self.columns[0]}:{self.columns[1]}" if self.columns is not None else ""
        if self.element is not None:
            rows = f"{self.element}" if self.stop is None else f"{self.element}, {rows}"
        return rows + (f" of each of {self.groups}" if self.groups > 1 else "") + columns

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Return the slice of a stored parameter, as (out, in)."""
        matrix = self._as_out_in(stored)
        if self.stop is not None:
            matrix = matrix[self.rows(len(matrix))]
        return matrix if self.columns is None else matrix[:, self.columns[0] : self.columns[1]]

    def write(self, stored: np.ndarray, values: np.ndarray) -> None:
        """Write the slice's values, as (out, in), into an array of the stored shape."""
        matrix = self._as_out_in(stored)
        if self.columns is not None:
            matrix = matrix[:, self.columns[0] : self.columns[1]]
        if self.stop is None:
            matrix[...] = values.reshape(matrix.shape)
        else:
            rows = self.rows(len(matrix))
            matrix[rows] = values.reshape(len(rows), *matrix.shape[1:])

    def rows(self, count: int) -> np.ndarray:
        """Return the indices of the slice's rows.

        Args:
            count: number of the parameter's rows.
        """
        indices: np.ndarray = np.arange(count).reshape(self.groups, -1)[:, self.start : self.stop].reshape(-1)
        return indices

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Return the shape of the array that `take` returns."""
        shape = self.shape if self.element is None else self.shape[1:]
        shape = tuple(shape[axis] for axis in self.axes) or shape
        if self.layout == "in_out" and len(shape) == 2:
            shape = shape[::-1]
        if self.stop is not None and shape:
            shape = (self.groups * (self.stop - self.start), *shape[1:])
        return shape if self.columns is None else (shape[0], self.columns[1] - self.columns[0], *shape[2:])

    def _as_out_in(self, stored: np.ndarray) -> np.ndarray:
        if self.element is not None:
            stored = stored[self.element]
        if self.axes:
            return stored.transpose(self.axes)
        return stored.T if self.layout == "in_out" and stored.ndim == 2 else stored


@dataclass(frozen=True, slots=True)
class ParameterPair(Both[tuple[Slice, ...]]):
    """Parameters, or rows of them, with the same values. Several slices on a side are summed (two biases of an
    LSTM).
    """


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """A choice between forms of storage that names and shapes do not decide; it applies to all layers of a class.

    Attributes:
        about: subject of the choice, e.g. ``order of rows in GPTAttention.qkv_proj of the candidate``.
        options: the possible answers; the first one is the default.
        answer: the answer that values or outputs gave; empty if there is none.
    """

    about: str
    options: tuple[str, ...]
    answer: str = ""
