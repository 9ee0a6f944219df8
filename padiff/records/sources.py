"""Tensor sources: access to a recorded tensor's values or its sketch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from padiff.errors import SketchOnlyError
from padiff.sketches.samples import Samples
from padiff.sketches.sketch import Sketch

#: ``room(size, offset)``: a reusable buffer of `size` bytes, to be filled from an offset in a file; `None` if the room
#: has no buffer of that size. The buffer is valid until the next call.
OutputBuffer: TypeAlias = Callable[[int, int], np.ndarray | None]


@dataclass(frozen=True, slots=True)
class StreamedArray:
    """A tensor that is computed piece by piece while it is stored, so that it is never fully in memory.

    Attributes:
        dtype, shape: dtype and shape of the tensor.
        pieces: yields the elements in order, in flat arrays; each array is valid until the next one.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


#: A value that can be written into a file.
Storable: TypeAlias = np.ndarray | StreamedArray


class TensorSource(ABC):
    """Access to a tensor's values: in memory, in a file, or as a part of another source."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> np.ndarray:
        """Return the values.

        Raises:
            SketchOnlyError: only a sketch was recorded.
        """

    def read_into(self, room: OutputBuffer) -> np.ndarray:
        """Return the values; if they have to be fetched, in a buffer from `room` that is valid until its next use.

        Raises:
            SketchOnlyError: only a sketch was recorded.
        """
        return self.read()

    def to_store(self) -> Storable:
        """Return the values, or an object that computes them while they are stored.

        Raises:
            SketchOnlyError: only a sketch was recorded.
        """
        return self.read()

    @property
    def sketch(self) -> Sketch | None:
        """Return the sketch if only a sketch was recorded, else `None`."""
        return None

    @property
    def sketched(self) -> bool:
        """Return True if only a sketch was recorded, of this tensor or of the tensor that contains it."""
        return False

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays in memory that hold the values, or from which the values are computed."""
        return ()

    @property
    def inside(self) -> Sequence[TensorSource]:
        """Return the sources from which this one is derived."""
        return ()

    def made_of(self, inside: Sequence[TensorSource]) -> TensorSource:
        """Return the same kind of source, derived from other sources."""
        return self

    @property
    def refetchable(self) -> bool:
        """Return True if reading the step from its folder again yields the same tensor."""
        return False

    @property
    def identity(self) -> Hashable:
        """Return a value that is equal for two sources of one tensor of one step, which is then stored once."""
        return id(self)


@dataclass(frozen=True, slots=True)
class InMemory(TensorSource):
    """A tensor source whose values are in memory."""

    array: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.array,)

    @property
    def identity(self) -> Hashable:
        return id(self.array)

    def read(self) -> np.ndarray:
        return self.array


class Sketched(TensorSource):
    """A tensor source that has only a sketch.

    Args:
        row: the sketch as returned by `padiff.sketches.sketch.Sketch.row`; or the step's samples and the number of the
            tensor's sample.
        size: number of numbers in the tensor; a complex number counts as two.
        transposed: True if the sketch is of the transposed matrix.
    """

    __slots__ = ("_row", "size", "transposed")

    def __init__(self, row: np.ndarray | tuple[Samples, int], size: int, transposed: bool = False) -> None:
        self.size, self.transposed = size, transposed
        self._row = row

    @property
    def sketched(self) -> bool:
        return True

    @property
    def refetchable(self) -> bool:
        return not isinstance(self._row, tuple)

    @property
    def identity(self) -> Hashable:
        if isinstance(self._row, tuple):
            return id(self._row[0]), self._row[1]
        return self._row.ctypes.data

    @property
    def row(self) -> np.ndarray:
        """Return the sketch in its stored form."""
        if isinstance(self._row, tuple):
            samples, number = self._row
            return np.asarray(samples.table[number])
        return self._row

    @property
    def sketch(self) -> Sketch:
        return Sketch.of_row(self.row, self.size, self.transposed)

    @property
    def sample(self) -> tuple[Samples, int] | None:
        """Return the step's samples and the number of the tensor's sample; `None` if the sketch was read from a
        file.
        """
        return self._row if isinstance(self._row, tuple) else None

    def read(self) -> np.ndarray:
        raise SketchOnlyError(
            "of this tensor a sketch was recorded, not its values: record it with detail='full' to look at them"
        )
