"""Copies of tensors, written down as records in the order in which they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from padiff.detail import FULL, NOTHING
from padiff.frameworks.base import Empty, Framework
from padiff.records import LOOP, InMemory, Record, Sketched, TensorSource
from padiff.selection import Node
from padiff.sketch import sample

#: ``levels(path, stage)``: how much is kept of a layer's tensors.
LevelOf = Callable[[str, str], str]


def everything(path: str, stage: str) -> str:
    """Full tensors everywhere."""
    return FULL


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor source: one array less another, worked out when read (on the writer's thread)."""

    after: np.ndarray
    before: np.ndarray

    def read(self) -> np.ndarray:
        return difference(self.after, self.before)


def difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """One array less another; in float32 at least."""
    if after.dtype.itemsize < 4 and after.dtype.kind not in "iub":
        # 16-bit weights: the difference of two neighbours would be rounded away.
        return np.asarray(after.astype(np.float32) - before.astype(np.float32))
    return np.asarray(after - before)


@dataclass(slots=True)
class Taken:
    """What was copied of a tensor: its values, or those of a sample.

    Attributes:
        values: the tensor, or a flat sample of it; from another device than the CPU, a sample may still be there.
        shape, dtype: of the tensor.
        sampled: whether it is a sample.
        turned: whether the sample is of the transposed matrix.
    """

    values: Any
    shape: tuple[int, ...]
    dtype: str
    sampled: bool
    turned: bool = False
    _source: TensorSource | None = None

    @property
    def source(self) -> TensorSource:
        """Where a record finds the values."""
        if self._source is None:
            sketched = self.sampled
            self._source = (
                Sketched.of_sample(self.values, self._numbers, self.turned) if sketched else InMemory(self.values)
            )
        return self._source

    def less(self, before: Taken) -> TensorSource:
        """Where a record finds the values less those of another tensor of this shape."""
        if self.sampled:
            return Sketched.of_sample(self.values, self._numbers, self.turned, before.values)
        return Difference(self.values, before.values)

    @property
    def _numbers(self) -> tuple[int, ...]:
        """The shape with real and imaginary parts as numbers of their own, as a sample has them."""
        return (*self.shape, 2) if self.dtype.startswith("complex") else self.shape

    @property
    def zero(self) -> bool:
        """Whether all values are zero."""
        return not bool((self.values != 0).any())


@dataclass(frozen=True, slots=True)
class _Coming:
    """An array that is on its way from another device: numpy asks for it when it is needed."""

    wait: Callable[[], list[np.ndarray]]
    index: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.wait()[self.index], dtype)


class _Note(NamedTuple):
    """A record to be, without its place in the order."""

    node: Node | None
    stage: str
    slot: str
    source: TensorSource
    dtype: str
    shape: tuple[int, ...]
    call: int
    training: bool


class Notes:
    """The records of a step so far, each with whether the model was in training mode.

    Attributes:
        copying: whether a tensor is being copied just now: what that calls is not the model's.
    """

    def __init__(self, framework: Framework, empty: Empty = np.empty) -> None:
        self._framework = framework
        self._empty = empty
        self._notes: list[_Note] = []
        self.copying = False

    def __len__(self) -> int:
        return len(self._notes)

    def clear(self) -> None:
        """Forget everything."""
        self._notes.clear()

    def copy(self, tensor: Any) -> np.ndarray:
        """The tensor's values as they are now."""
        self.copying = True
        try:
            return self._framework.to_numpy(tensor, self._empty)
        finally:
            self.copying = False

    def take(self, tensor: Any, level: str, turned: bool = False, live: np.ndarray | None = None) -> Taken:
        """The tensor's values as they are now, or a sample of them, as the level asks for.

        ``live`` is the tensor's own memory, where it is known.
        """
        dtype = self._framework.dtype(tensor)
        if level == FULL:
            array = self.copy(tensor)
            return Taken(array, array.shape, dtype, False)
        if live is not None:
            return Taken(sample(live, turned), live.shape, dtype, True, turned)
        self.copying = True
        try:
            values = self._framework.sample(tensor, turned)
        finally:
            self.copying = False
        return Taken(values, self._framework.shape(tensor), dtype, True, turned)

    def tensor(self, node: Node, stage: str, slot: str, tensor: Any, level: str, call: int, training: bool) -> None:
        """Copy a tensor and write it down."""
        if level != NOTHING:
            taken = self.take(tensor, level)
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
        self._notes.append(_Note(node, stage, slot, source, dtype, tuple(shape), call, training))

    def scalar(self, stage: str, slot: str, value: float, call: int, dtype: str = "float64") -> None:
        """Write down a number that belongs to the whole step."""
        source = InMemory(np.asarray(value, dtype=np.float64))
        self._notes.append(_Note(None, stage, slot, source, dtype, (), call, True))

    def count(self, path: str, stage: str) -> int:
        """How many records there are of a layer at a stage."""
        return sum(n.stage == stage and (n.node.path if n.node else LOOP) == path for n in self._notes)

    def fetch(self) -> None:
        """Begin to bring over the samples that are still on another device: all of them at once."""
        sources = [note.source for note in self._notes if isinstance(note.source, Sketched)]
        there = {id(v): v for s in sources for v in s.taken if not isinstance(v, (np.ndarray, type(None)))}
        if not there:
            return
        wait = lru_cache(maxsize=1)(self._framework.fetch(list(there.values())))
        coming = {key: _Coming(wait, index) for index, key in enumerate(there)}
        for source in sources:
            values, before = source.taken
            source.taken = coming.get(id(values), values), coming.get(id(before), before)

    def records(self, training_only: bool, recomputed: frozenset[str]) -> tuple[Record, ...]:
        """The records, in the order in which they came.

        Args:
            training_only: leave out those of calls in evaluation mode.
            recomputed: layers whose forward ran again inside of a backward.
        """
        kept = [note for note in self._notes if note.training] if training_only else self._notes
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
