"""Tensor sources: where a recorded tensor's values are, and what was kept of them."""

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

#: Gives so many bytes of memory that is there already, which may be used until it is asked again, given the place in a
#: file where they come from; `None`: it has not so many.
Room: TypeAlias = Callable[[int, int], np.ndarray | None]


@dataclass(frozen=True, slots=True)
class Unread:
    """A tensor that is worked out piece by piece while it is stored: never all of it is in memory.

    Attributes:
        dtype, shape: of the tensor.
        pieces: gives its elements in their order, in flat arrays that last until the next one is asked for.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


#: What can be written into a file.
Storable: TypeAlias = np.ndarray | Unread


class TensorSource(ABC):
    """Something that gives a tensor's values when asked: an array in memory, a file, or a part of another source."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> np.ndarray:
        """The values.

        Raises:
            SketchOnlyError: a sketch is all that was kept.
        """

    def read_into(self, room: Room) -> np.ndarray:
        """The values, in memory of the room where they would have to be fetched: they last until it is asked again.

        Raises:
            SketchOnlyError: a sketch is all that was kept.
        """
        return self.read()

    def to_store(self) -> Storable:
        """The values, or what works them out while they are stored.

        Raises:
            SketchOnlyError: a sketch is all that was kept.
        """
        return self.read()

    @property
    def sketch(self) -> Sketch | None:
        """The sketch, where that is all that was kept."""
        return None

    @property
    def sketched(self) -> bool:
        """Whether a sketch is all that was kept: of this tensor, or of one that it is a part of."""
        return False

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays in memory that hold the values, or what they are worked out from."""
        return ()

    @property
    def inside(self) -> Sequence[TensorSource]:
        """The sources that it is made of."""
        return ()

    def made_of(self, inside: Sequence[TensorSource]) -> TensorSource:
        """What is made of others likewise."""
        return self

    @property
    def refetchable(self) -> bool:
        """Whether reading its step from a folder again gives this tensor again, as it is."""
        return False

    @property
    def identity(self) -> Hashable:
        """Equal for two sources of one tensor of one step: it is kept once, however many layers gave it out."""
        return id(self)


@dataclass(frozen=True, slots=True)
class InMemory(TensorSource):
    """A tensor source whose values are in memory already."""

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
    """A tensor source of which a sketch is all that is kept.

    Args:
        row: the sketch, as `padiff.sketches.sketch.Sketch.row` gives it; or the step's samples, and the number of its
            own.
        size: how many numbers the tensor has; a complex one is two.
        transposed: whether the sketch is of the transposed matrix.
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
        """The sketch as it is stored."""
        if isinstance(self._row, tuple):
            samples, number = self._row
            return np.asarray(samples.table[number])
        return self._row

    @property
    def sketch(self) -> Sketch:
        return Sketch.of_row(self.row, self.size, self.transposed)

    @property
    def sample(self) -> tuple[Samples, int] | None:
        """The step's samples, and the number of the one that the sketch is of; `None` if it was read from a file."""
        return self._row if isinstance(self._row, tuple) else None

    def read(self) -> np.ndarray:
        raise SketchOnlyError(
            "of this tensor a sketch was recorded, not its values: record it with detail='full' to look at them"
        )
