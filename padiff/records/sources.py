"""Tensor sources: access to a recorded tensor's values or its sketch, and layouts that convert them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Any, Literal, TypeAlias

import numpy as np

from padiff.errors import SketchOnlyError
from padiff.sketches.samples import Samples
from padiff.sketches.sketch import Sketch


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


#: All dtypes of torch and paddle, without the framework's prefix.
DTYPES = frozenset((
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in
    range(1, 8)),
))  # fmt: skip


def known_dtype(value: object, what: str = "a tensor") -> str:
    """Return the name of a dtype, interned.

    Raises:
        ValueError: no framework has such a dtype.
    """
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"unknown dtype {ascii(value)[:80]} of {ascii(what)[:80]}")
    return intern(value)


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwappedRows:
    """Conversion of rows with the batch outside (all of one sample, then the next) to rows with the sequence outside.

    Args:
        batch: number of samples.
        length: length of the sequence.
    """

    batch: int
    length: int

    def axes_in(self, shape: Shape) -> int:
        """Return the number of leading axes that hold the rows: 1 if they are flat, else 2; 0 if none do."""
        rows = self.batch * self.length
        return 1 if shape[:1] == (rows,) else 2 if shape[:2] == (self.batch, self.length) else 0

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the array with flat rows in the new order."""
        rest = array.shape[self.axes_in(array.shape) :]
        return array.reshape(self.batch, self.length, *rest).swapaxes(0, 1).reshape(-1, *rest)

    @property
    def inverse(self) -> SwappedRows:
        return SwappedRows(self.length, self.batch)

    def __str__(self) -> str:
        return f"rows {self.batch} by {self.length}"


#: One conversion: `numpy.transpose` with these axes, the transpose of a matrix, a reshape, a broadcast (one side has
#: a single copy of values that the other side has for every sample), rows with the sequence outside for the batch, or
#: rows in another order (already exchanged in the records).
LayoutStep = Shape | SwappedRows | Literal["transpose", "reshape", "broadcast", "rows"]

# The usual meaning of a permutation of axes.
_MEANINGS: dict[LayoutStep, str] = {
    (0, 2, 1): "channels last against first",
    (1, 0, 2): "sequence first against batch first",
    (0, 3, 1, 2): "channels last against first",
    (0, 2, 3, 1): "channels first against last",
    (0, 2, 1, 3): "heads before the sequence against after it",
    (0, 4, 1, 2, 3): "channels last against first",
    (0, 2, 3, 4, 1): "channels first against last",
    "rows": "rows in another order",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Conversion of a candidate's tensor to the reference's layout; false if both sides have the same layout.

    `str` returns the steps as text, the form used in reports: ``axes 0,2,3,1 then reshape``.

    Args:
        steps: the conversions of the candidate's tensor, in order.
    """

    steps: tuple[LayoutStep, ...] = ()

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Return the layout from its text (`str`)."""
        parts = text.split(" then ") if text else []
        return cls(tuple(map(_step_from, parts)))

    @property
    def transposes(self) -> bool:
        """Return True if the layout transposes a matrix."""
        return self.steps.count("transpose") % 2 == 1

    @property
    def in_order(self) -> bool:
        """Return True if the layout only reshapes or transposes a matrix, so that no other axes are permuted."""
        return all(step in ("transpose", "reshape") for step in self.steps)

    def apply(self, candidate: np.ndarray, reference: Shape) -> np.ndarray:
        """Return a candidate's tensor in the reference's layout.

        Args:
            reference: the shape of the reference's tensor.
        """
        for step in self.steps:
            if isinstance(step, tuple):
                candidate = candidate.transpose(step)
            elif isinstance(step, SwappedRows):
                candidate = step.apply(candidate)
            elif step == "transpose":
                candidate = candidate.T
            elif step == "reshape" and candidate.size == math.prod(reference):
                candidate = candidate.reshape(reference)
        return candidate

    def undo(self, reference: np.ndarray, candidate: Shape) -> np.ndarray:
        """Return a reference's tensor in the candidate's layout: the inverse of `apply`.

        Args:
            candidate: the shape of the candidate's tensor.
        """
        shapes = [candidate]
        for step in self.steps:
            shapes.append(Layout((step,)).shape(shapes[-1], reference.shape))
        for step, before in zip(reversed(self.steps), reversed(shapes[:-1])):
            if isinstance(step, tuple):
                reference = reference.transpose(np.argsort(step))
            elif isinstance(step, SwappedRows):
                reference = step.inverse.apply(reference).reshape(before)
            elif step == "transpose":
                reference = reference.T
            elif step == "reshape":
                reference = reference.reshape(before)
        return reference

    def shape(self, candidate: Shape, reference: Shape) -> Shape:
        """Return the shape of the result of `apply` for a candidate's shape and a reference's shape."""
        return self.apply(np.broadcast_to(np.zeros(()), candidate), reference).shape if self.steps else candidate

    def describe(self) -> str:
        """Return the layout in words."""
        return ", ".join(
            _MEANINGS.get((1, 0, 2) if isinstance(step, SwappedRows) else step) or _text(step) for step in self.steps
        )

    def __str__(self) -> str:
        return " then ".join(map(_text, self.steps))

    def __bool__(self) -> bool:
        return bool(self.steps)


def _text(step: LayoutStep) -> str:
    return f"axes {','.join(map(str, step))}" if isinstance(step, tuple) else str(step)


def _step_from(text: str) -> LayoutStep:
    if text.startswith("axes "):
        return tuple(map(int, text[5:].split(",")))
    if text.startswith("rows "):
        return SwappedRows(*map(int, text[5:].split(" by ")))
    return text  # type: ignore[return-value]


#: The same layout on both sides, a transposed matrix, the same elements in another shape.
SAME, TRANSPOSED, RESHAPED = Layout(), Layout(("transpose",)), Layout(("reshape",))
#: One side lacks the batch axis, or has length 1 there: position embeddings.
BROADCAST = Layout(("broadcast",))
