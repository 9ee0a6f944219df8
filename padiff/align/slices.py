"""Parameters that hold the same, whole or by their rows, and what is not known of how they are stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from padiff.records import Both


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter, or some rows or columns of it.

    A matrix is seen as (out, in) here. Its rows lie in ``groups`` equal groups (1: all together; the number of heads
    where query, key and value alternate head by head); of each group the rows ``start`` to ``stop`` are meant.

    Attributes:
        layer, slot: whose parameter.
        shape: as the framework stores it.
        layout: ``in_out`` where the stored matrix is transposed.
        stop: `None` for all rows to the end.
        columns: of a matrix, the columns from and to; `None` for all of them.
        axes: the order of axes that makes it like the other side's, where it is another.
        label: what the rows are called (``key``), where both sides have them in one.
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

    @property
    def whole(self) -> bool:
        return self.stop is None and self.columns is None

    @property
    def site(self) -> str:
        return f"{self.layer}/{self.slot}" + ("" if self.whole else f"[{self.rows_text}]")

    @property
    def rows_text(self) -> str:
        rows = ":" if self.stop is None else f"{self.start}:{self.stop}"
        columns = f", {self.columns[0]}:{self.columns[1]}" if self.columns is not None else ""
        return rows + (f" of each of {self.groups}" if self.groups > 1 else "") + columns

    def take(self, stored: np.ndarray) -> np.ndarray:
        """What is meant of a stored parameter, as (out, in)."""
        matrix = self._as_out_in(stored)
        if self.stop is not None:
            matrix = matrix[self.rows(len(matrix))]
        return matrix if self.columns is None else matrix[:, self.columns[0] : self.columns[1]]

    def put(self, stored: np.ndarray, values: np.ndarray) -> None:
        """Write what is meant, given as (out, in), into an array of the stored shape."""
        matrix = self._as_out_in(stored)
        if self.columns is not None:
            matrix = matrix[:, self.columns[0] : self.columns[1]]
        if self.stop is None:
            matrix[...] = values.reshape(matrix.shape)
        else:
            rows = self.rows(len(matrix))
            matrix[rows] = values.reshape(len(rows), *matrix.shape[1:])

    def rows(self, count: int) -> np.ndarray:
        """Indices of the meant rows among so many."""
        found: np.ndarray = np.arange(count).reshape(self.groups, -1)[:, self.start : self.stop].reshape(-1)
        return found

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of what `take` gives."""
        shape = tuple(self.shape[axis] for axis in self.axes) or self.shape
        if self.layout == "in_out" and len(shape) == 2:
            shape = shape[::-1]
        if self.stop is not None and shape:
            shape = (self.groups * (self.stop - self.start), *shape[1:])
        return shape if self.columns is None else (shape[0], self.columns[1] - self.columns[0], *shape[2:])

    def _as_out_in(self, stored: np.ndarray) -> np.ndarray:
        if self.axes:
            return stored.transpose(self.axes)
        return stored.T if self.layout == "in_out" and stored.ndim == 2 else stored


@dataclass(frozen=True, slots=True)
class ParameterPair(Both[tuple[Slice, ...]]):
    """Parameters, or rows of them, that hold the same. Several on a side are added up (two biases of an LSTM)."""


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """How something is stored that neither names nor shapes tell; the same choice holds for all layers of a class.

    Attributes:
        about: what it is about, e.g. ``order of rows in GPTAttention.qkv_proj of the candidate``.
        options: the possible answers; the first one was taken unless there is an answer.
        answer: the one that values or outputs gave.
    """

    about: str
    options: tuple[str, ...]
    answer: str = ""
