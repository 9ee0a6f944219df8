"""What was copied of a tensor: all of it, or a sample; there already, or still on its way from a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from padiff.frameworks.values import Tensors
from padiff.recorder.detail import FULL, SKETCH
from padiff.records import InMemory, Sketched, Storable, TensorSource, Unread
from padiff.records.alike import sketched
from padiff.records.parts import Part
from padiff.sketches.samples import Samples

# Bytes of a difference that are worked out at a time: they are still in the cache when they are written.
_PIECE = 1 << 18
# Of infinite weights the difference is no number, and the training may have numpy make errors of that.
_UNSAID = partial(np.errstate, all="ignore")


@dataclass(frozen=True, slots=True)
class Difference(TensorSource):
    """A tensor source: one array less another, worked out when read, on the writer's thread.

    Attributes:
        written: what it is in the step's file, where it was written there at once.
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
        return Unread(after.dtype, after.shape, self._pieces)

    def _pieces(self) -> Iterator[np.ndarray]:
        after, before = self.after.reshape(-1), self.before.reshape(-1)
        length = _PIECE // after.itemsize
        room = np.empty(length, after.dtype)
        for start in range(0, after.size, length):
            some = after[start : start + length]
            with _UNSAID():
                piece = np.subtract(some, before[start : start + length], out=room[: some.size])
            yield piece


def difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """One array less another; in float32 at least."""
    if after.dtype.itemsize < 4 and after.dtype.kind not in "iub":
        # 16-bit weights: the difference of two neighbours would be rounded away.
        after, before = after.astype(np.float32), before.astype(np.float32)
    with _UNSAID():
        return np.asarray(after - before)


@dataclass(slots=True)
class Whole:
    """A copy of a tensor.

    Attributes:
        dtype, shape: of the tensor.
        values: its own.
        part: which part of a tensor it is, where processes hold parts.
    """

    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray
    _source: TensorSource | None = None
    part: Part | None = None

    level = FULL

    @property
    def source(self) -> TensorSource:
        """Where a record finds the values."""
        if self._source is None:
            self._source = InMemory(self.values)
        return self._source

    @property
    def zero(self) -> bool:
        """Whether all values are zero."""
        return not bool((self.values != 0).any())

    def less(self, before: Taken) -> Difference:
        """Where a record finds the values less those of another tensor of this shape."""
        assert isinstance(before, Whole)
        return Difference(self.values, before.values)

    def add(self, other: Taken) -> None:
        """Add the values of another tensor of this shape."""
        assert isinstance(other, Whole)
        self.values = self.values + other.values


@dataclass(slots=True)
class Sampled:
    """A sample of a tensor.

    Attributes:
        dtype, shape: of the tensor.
        samples, number: where the sample is.
        transposed: whether it is of the transposed matrix.
        part: which part of a tensor it is, where processes hold parts.
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
        """Where a record finds the sketch."""
        if self._source is None:
            self._source = self._sketched(self.number)
        return self._source

    @property
    def zero(self) -> bool:
        """Whether all of the sample is zero."""
        return self.samples.zero(self.number)

    def less(self, before: Taken) -> TensorSource:
        """Where a record finds the sketch of the values less those of another tensor of this shape."""
        assert isinstance(before, Sampled)
        return self._sketched(self.samples.difference(self.number, before.number))

    def add(self, other: Taken) -> None:
        """Add the sample of another tensor of this shape."""
        assert isinstance(other, Sampled)
        self.samples.add_to(self.number, other.number)

    def _sketched(self, number: int) -> Sketched:
        return sketched(self.samples, number, self.dtype, self.shape, self.transposed, self.part)


class Awaited(TensorSource):
    """A tensor source whose values are still on their way from a device; reading waits for them."""

    __slots__ = ("_array", "_batch", "shape", "tensor")

    def __init__(self, tensor: Any, shape: tuple[int, ...]) -> None:
        self.tensor, self.shape = tensor, shape
        self._array: np.ndarray | None = None
        self._batch: Transfer | None = None

    def arrive_with(self, batch: Transfer) -> None:
        """Come over together with others."""
        self._batch, self.tensor = batch, None

    def arrived(self, flat: np.ndarray) -> None:
        """These are the values."""
        self._array = flat.reshape(self.shape)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return () if self._array is None else (self._array,)

    def read(self) -> np.ndarray:
        if self._array is None:
            assert self._batch is not None, "read before the step was finished"
            self._batch.settle()
        assert self._array is not None
        return self._array


class Transfer:
    """Tensors that come over from their device together."""

    def __init__(self, members: Sequence[Awaited], tensors: Tensors) -> None:
        self._wait: Callable[[], list[np.ndarray]] | None = tensors.fetch([each.tensor for each in members])
        self._members: Sequence[Awaited] = members
        self._lock = threading.Lock()
        for each in members:
            each.arrive_with(self)

    def settle(self) -> None:
        """Wait until they are there."""
        with self._lock:
            wait, self._wait = self._wait, None
            for each, flat in zip(self._members, wait() if wait is not None else ()):
                each.arrived(flat)
            self._members = ()


@dataclass(slots=True)
class OnItsWay:
    """A copy of a tensor that is still on its device.

    Attributes:
        dtype, shape: of the tensor.
        source: where a record will find the values.
    """

    dtype: str
    shape: tuple[int, ...]
    source: Awaited


class Numbered:
    """A tensor of the trace that a plan knows.

    Attributes:
        place: which of the plan's tensors it is.
        dtype, shape, number: of the tensor, and of its sample.
    """

    __slots__ = ("dtype", "number", "place", "shape")
    transposed = False

    def __init__(self, place: int, dtype: str, shape: tuple[int, ...], number: int) -> None:
        self.place, self.dtype, self.shape, self.number = place, dtype, shape, number


#: What was copied of a tensor.
Taken = Whole | Sampled
