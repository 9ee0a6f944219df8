"""Copies of tensors: in full or as a sample, complete or still in transfer from a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from padiff.frameworks.values import Tensors
from padiff.recorder.detail import FULL, SKETCH
from padiff.records import InMemory, Sketched, Storable, StreamedArray, TensorSource
from padiff.records.parts import Part
from padiff.records.step_schema import sketched
from padiff.sketches.samples import Samples

# Bytes of a difference that are computed at a time: small enough to be in the CPU cache when they are written.
_PIECE = 1 << 18
# The difference of infinite weights is NaN, and the training may have told numpy to raise an error for that.
_UNSAID = partial(np.errstate, all="ignore")


@dataclass(frozen=True, slots=True)
class Difference(TensorSource):
    """Tensor source of ``after - before``, computed when it is read, on the writer's thread.

    Attributes:
        after, before: the two arrays.
        written: the difference as an array in the step's file, if it was written there at once; else `None`.
    """

    after: np.ndarray
    before: np.ndarray
    written: np.ndarray | None = None

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.after, self.before

    def read(self) -> np.ndarray:
        return difference(self.after, self.before) if self.written is None else self.written

    def to_store(self) -> Storable:
        if self.written is not None:
            return self.written
        after, before = self.after, self.before
        if after.nbytes <= _PIECE or after.dtype != before.dtype or after.dtype not in (np.float32, np.float64):
            return self.read()
        return StreamedArray(after.dtype, after.shape, self._pieces)

    def _pieces(self) -> Iterator[np.ndarray]:
        after, before = self.after.reshape(-1), self.before.reshape(-1)
        length = _PIECE // after.itemsize
        room = np.empty(length, after.dtype)
        for start in range(0, after.size, length):
            chunk = after[start : start + length]
            with _UNSAID():
                piece = np.subtract(chunk, before[start : start + length], out=room[: chunk.size])
            yield piece


def difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return ``after - before``, in float32 or wider for floating-point arrays."""
    if after.dtype.itemsize < 4 and after.dtype.kind not in "iub":
        # 16-bit weights: the difference of two neighbours would be rounded away.
        after, before = after.astype(np.float32), before.astype(np.float32)
    with _UNSAID():
        return np.asarray(after - before)


@dataclass(slots=True)
class Whole:
    """A full copy of a tensor.

    Attributes:
        dtype, shape: dtype and shape of the tensor.
        values: the values as an array.
        part: part of a larger tensor that this process holds; `None`: the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray
    _source: TensorSource | None = None
    part: Part | None = None

    level = FULL

    @property
    def source(self) -> TensorSource:
        """Return the tensor source of the values, which is made once."""
        if self._source is None:
            self._source = InMemory(self.values)
        return self._source

    @property
    def zero(self) -> bool:
        """Return True if all values are zero."""
        return not bool((self.values != 0).any())

    def less(self, before: TensorCopy) -> Difference:
        """Return a tensor source of these values minus those of another tensor of the same shape."""
        assert isinstance(before, Whole)
        return Difference(self.values, before.values)

    def add(self, other: TensorCopy) -> None:
        """Add the values of another tensor of the same shape."""
        assert isinstance(other, Whole)
        self.values = self.values + other.values


@dataclass(slots=True)
class Sampled:
    """A sample of the values of a tensor, from which its sketch is made.

    Attributes:
        dtype, shape: dtype and shape of the tensor.
        samples, number: store that holds the sample, and the number of the sample there.
        transposed: True if it is a sample of the transposed matrix.
        part: part of a larger tensor that this process holds; `None`: the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    samples: Samples
    number: int
    transposed: bool = False
    _source: TensorSource | None = None
    part: Part | None = None

    level = SKETCH

    @property
    def source(self) -> TensorSource:
        """Return the tensor source of the sketch, which is made once."""
        if self._source is None:
            self._source = self._sketched(self.number)
        return self._source

    @property
    def zero(self) -> bool:
        """Return True if all values of the sample are zero."""
        return self.samples.zero(self.number)

    def less(self, before: TensorCopy) -> TensorSource:
        """Return a tensor source of the sketch of the difference to another tensor of the same shape."""
        assert isinstance(before, Sampled)
        return self._sketched(self.samples.difference(self.number, before.number))

    def add(self, other: TensorCopy) -> None:
        """Add the sample of another tensor of the same shape."""
        assert isinstance(other, Sampled)
        self.samples.add_to(self.number, other.number)

    def _sketched(self, number: int) -> Sketched:
        return sketched(self.samples, number, self.dtype, self.shape, self.transposed, self.part)


class PendingValues(TensorSource):
    """Tensor source whose values are still being copied from a device; `read` waits for the values.

    Args:
        copy: copies a tensor's values at once, for a read before the transfer.
    """

    __slots__ = ("_array", "_batch", "_copy", "shape", "tensor")

    def __init__(self, tensor: Any, shape: tuple[int, ...], copy: Callable[[Any], np.ndarray]) -> None:
        self.tensor, self.shape = tensor, shape
        self._copy: Callable[[Any], np.ndarray] | None = copy
        self._array: np.ndarray | None = None
        self._batch: Transfer | None = None

    def arrive_with(self, batch: Transfer) -> None:
        """Set the transfer that brings the values, and release the tensor."""
        self._batch, self.tensor, self._copy = batch, None, None

    def arrived(self, flat: np.ndarray) -> None:
        """Set the values."""
        self._array = flat.reshape(self.shape)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return () if self._array is None else (self._array,)

    def read(self) -> np.ndarray:
        if self._copy is not None:
            return self._copy(self.tensor).reshape(self.shape)
        if self._array is None and self._batch is not None:
            self._batch.settle()
        assert self._array is not None
        return self._array


class Transfer:
    """One transfer of several tensors from their device."""

    def __init__(self, members: Sequence[PendingValues], tensors: Tensors) -> None:
        self._wait: Callable[[], list[np.ndarray]] | None = tensors.fetch([each.tensor for each in members])
        self._members: Sequence[PendingValues] = members
        self._lock = threading.Lock()
        for each in members:
            each.arrive_with(self)

    def settle(self) -> None:
        """Wait until the values of all tensors have arrived; later calls do nothing."""
        with self._lock:
            wait, self._wait = self._wait, None
            for each, flat in zip(self._members, wait() if wait is not None else ()):
                each.arrived(flat)
            self._members = ()


@dataclass(slots=True)
class PendingCopy:
    """A copy of a tensor that is still on its device.

    Attributes:
        dtype, shape: dtype and shape of the tensor.
        source: tensor source of the values, which waits for the transfer.
    """

    dtype: str
    shape: tuple[int, ...]
    source: PendingValues


class TemplateSlot:
    """A traced tensor of a plan.

    Attributes:
        place: index of the tensor among those of the plan.
        dtype, shape: dtype and shape of the tensor.
        number: number of its sample.
    """

    __slots__ = ("dtype", "number", "place", "shape")
    transposed = False

    def __init__(self, place: int, dtype: str, shape: tuple[int, ...], number: int) -> None:
        self.place, self.dtype, self.shape, self.number = place, dtype, shape, number


#: A complete copy of a tensor.
TensorCopy = Whole | Sampled
