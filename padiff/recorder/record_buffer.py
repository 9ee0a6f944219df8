"""Copies of tensors, written down as records in the order in which they come."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from padiff.frameworks.base import Framework, Tensors
from padiff.model.selection import Node
from padiff.recorder.detail import FULL, SKETCH, SMALL
from padiff.recorder.left_out import Left, LeftOut
from padiff.records import LOOP, InMemory, Record, Sketched, TensorSource
from padiff.sketches.samples import Empty, Samples
from padiff.sketches.sketch import ELEMENTS, Cut, cut_of

#: ``levels(path, stage)``: how much is kept of a layer's tensors.
LevelOf = Callable[[str, str], str]

#: Elements up to which a tensor is small: a sketch looks at each, so that to keep them copies no more. Measured, of 107
#: faults in small nets: 97 are proven where the first step has such tensors whole, 45 where it has sketches.
SMALL_ELEMENTS = ELEMENTS
#: Bytes of small tensors that are kept of a step, those that come first. Chosen: some 2,000 of the largest (a ResNet-18
#: has 0.1 MB).
SMALL_BYTES = 32 << 20
#: And which share of what a run may become, where that has a limit: the first step stays for as long as the run does.
SMALL_SHARE = 1 / 8


def everything(path: str, stage: str) -> str:
    """Full tensors everywhere."""
    return FULL


@dataclass(frozen=True, slots=True)
class Difference(TensorSource):
    """A tensor source: one array less another, worked out when read (on the writer's thread)."""

    after: np.ndarray
    before: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.after, self.before

    def read(self) -> np.ndarray:
        return difference(self.after, self.before)


def difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """One array less another; in float32 at least."""
    if after.dtype.itemsize < 4 and after.dtype.kind not in "iub":
        # 16-bit weights: the difference of two neighbours would be rounded away.
        return np.asarray(after.astype(np.float32) - before.astype(np.float32))
    return np.asarray(after - before)


@dataclass(slots=True)
class Whole:
    """A copy of a tensor.

    Attributes:
        dtype, shape: of the tensor.
        values: its own.
    """

    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray
    _source: TensorSource | None = None

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

    def less(self, before: Taken) -> TensorSource:
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
    """

    dtype: str
    shape: tuple[int, ...]
    samples: Samples
    number: int
    transposed: bool = False
    _source: TensorSource | None = None

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
        # Real and imaginary parts are numbers of their own.
        size = math.prod(self.shape) * (2 if self.dtype.startswith("complex") else 1)
        return Sketched((self.samples, number), size, self.transposed)


class Awaited(TensorSource):
    """A tensor source whose values are still on their way from a device; reading waits for them."""

    __slots__ = ("_array", "_batch", "shape", "tensor")

    def __init__(self, tensor: Any, shape: tuple[int, ...]) -> None:
        self.tensor, self.shape = tensor, shape
        self._array: np.ndarray | None = None
        self._batch: _Batch | None = None

    def arrive_with(self, batch: _Batch) -> None:
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


class _Batch:
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


#: What was copied of a tensor.
Taken = Whole | Sampled


class _Entry(NamedTuple):
    """A record to be, without its place in the order."""

    node: Node | None
    stage: str
    slot: str
    source: TensorSource
    dtype: str
    shape: tuple[int, ...]
    call: int
    training: bool


class RecordBuffer:
    """The records of a step so far, each with whether the model was in training mode.

    Args:
        framework: whose tensors they are.
        empty: where memory for copies comes from.
        samples: what keeps the samples that sketches are made of.
        room: bytes of small tensors that are kept where sketches are kept of others.

    Attributes:
        copying: whether a tensor is being copied just now, by whichever recorder: what that calls is not the model's.
        left_out: what could not be copied.
    """

    copying: ClassVar[bool] = False

    def __init__(
        self,
        framework: Framework,
        empty: Empty = np.empty,
        samples: Samples | None = None,
        room: float = SMALL_BYTES,
    ) -> None:
        self._tensors = framework.tensors
        self._empty, self._room = empty, room
        self._samples = Samples(bring=framework.tensors.fetch) if samples is None else samples
        self._entries: list[_Entry] = []
        self._later: list[Awaited] = []
        self.left_out = LeftOut()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._later.clear()

    def copy(self, tensor: Any) -> np.ndarray:
        """The tensor's values as they are now."""
        RecordBuffer.copying = True
        try:
            return self._tensors.copy(tensor, self._empty)
        finally:
            RecordBuffer.copying = False

    def resolved(self, tensor: Any, level: str) -> str:
        """`FULL` or `SKETCH` where that depends on the tensor's size, and on what was kept so far."""
        if level != SMALL:
            return level
        try:
            small = self._room > 0 and math.prod(self._tensors.shape(tensor)) <= SMALL_ELEMENTS
        except Exception:  # of a kind that has no shape; `take` says what to make of it
            small = False
        return FULL if small else SKETCH

    def take(self, tensor: Any, level: str, transposed: bool = False) -> Taken | Left:
        """The tensor's values as they are now, or a sample of them (of the transposed), as the level asks for."""
        tensors, samples = self._tensors, self._samples
        RecordBuffer.copying = True
        try:
            dtype = tensors.dtype(tensor)
            if level == SMALL and self.resolved(tensor, level) == FULL:
                level, array = FULL, tensors.copy(tensor, self._empty)
                self._room -= array.nbytes
                return Whole(dtype, array.shape, array)
            if level == FULL:
                array = tensors.copy(tensor, self._empty)
                return Whole(dtype, array.shape, array)
            live = tensors.live(tensor)
            if live is not None:
                return self.take_cut(dtype, live.shape, cut_of(live, transposed), transposed)
            values = tensors.sample(tensor, transposed)
            number = samples.add(cut_of(values)) if isinstance(values, np.ndarray) else samples.add_elsewhere(values)
            return Sampled(dtype, tensors.shape(tensor), samples, number, transposed)
        except Exception as error:
            # There are more kinds of tensors than anybody knows: whatever goes wrong, the training goes on.
            return Left.because(error)
        finally:
            RecordBuffer.copying = False

    def take_later(self, tensor: Any) -> Taken | OnItsWay | Left:
        """The tensor's values as they are now, all of them; from another device they come when the step is over."""
        if self._tensors.device(tensor) == "cpu":
            return self.take(tensor, FULL)
        RecordBuffer.copying = True
        try:
            shape = self._tensors.shape(tensor)
            with self._tensors.without_grad():
                source = Awaited(tensor.detach().reshape([-1]).clone(), shape)
            self._later.append(source)
            return OnItsWay(self._tensors.dtype(tensor), shape, source)
        except Exception as error:
            return Left.because(error)
        finally:
            RecordBuffer.copying = False

    def take_cut(self, dtype: str, shape: tuple[int, ...], cut: Cut, transposed: bool) -> Sampled:
        """A sample from where a tensor's memory is."""
        return Sampled(dtype, shape, self._samples, self._samples.add(cut), transposed)

    def write(self, node: Node, stage: str, slot: str, taken: Taken | Left, call: int, training: bool = True) -> None:
        """Write down what was copied, or that it was not."""
        if isinstance(taken, Left):
            self.left_out.add(node.path, taken.reason, training)
        else:
            self.put(node, stage, slot, taken.source, taken.dtype, taken.shape, call, training)

    def put(
        self,
        node: Node,
        stage: str,
        slot: str,
        source: TensorSource,
        dtype: str,
        shape: tuple[int, ...],
        call: int,
        training: bool = True,
    ) -> None:
        """Write down values that are copied already."""
        self._entries.append(_Entry(node, stage, slot, source, dtype, tuple(shape), call, training))

    def scalar(self, stage: str, slot: str, value: float, call: int, dtype: str = "float64") -> None:
        """Write down a number that belongs to the whole step."""
        source = InMemory(np.asarray(value, dtype=np.float64))
        self._entries.append(_Entry(None, stage, slot, source, dtype, (), call, True))

    def loop(
        self,
        stage: str,
        slot: str,
        taken: Taken | OnItsWay | Left,
        call: int,
        training: bool = True,
        place: int | None = None,
    ) -> None:
        """Write down a tensor of the step's own, or that it was not copied.

        ``place`` is where among the records it belongs. Default: at the end.
        """
        if isinstance(taken, Left):
            self.left_out.add(LOOP, taken.reason, training)
            return
        entry = _Entry(None, stage, slot, taken.source, taken.dtype, tuple(taken.shape), call, training)
        self._entries.insert(len(self._entries) if place is None else place, entry)

    def count(self, path: str, stage: str) -> int:
        """How many records there are of a layer at a stage."""
        return sum(n.stage == stage and (n.node.path if n.node else LOOP) == path for n in self._entries)

    def fetch(self) -> None:
        """Begin to bring over what is still on another device: all of it at once."""
        self._samples.fetch()
        if self._later:
            _Batch(list(self._later), self._tensors)
            self._later.clear()

    def records(self, training_only: bool, recomputed: frozenset[str]) -> tuple[Record, ...]:
        """The records, in the order in which they came.

        Args:
            training_only: leave out those of calls in evaluation mode.
            recomputed: layers whose forward ran again inside of a backward.
        """
        kept = [entry for entry in self._entries if entry.training] if training_only else self._entries
        return tuple(
            Record(LOOP, n.stage, n.slot, n.source, n.dtype, n.shape, n.call, order)
            if n.node is None
            else Record(
                n.node.path,
                n.stage,
                n.slot,
                n.source,
                n.dtype,
                n.shape,
                n.call,
                order,
                type(n.node.layer).__name__,
                n.stage == "forward" and n.node.path in recomputed,
            )
            for order, n in enumerate(kept)
        )
