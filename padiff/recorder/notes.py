"""Copies of tensors, written down as records in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.frameworks.base import Empty, Framework
from padiff.records import LOOP, InMemory, Record, TensorSource
from padiff.selection import Node


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor source: one array less another, worked out when read (on the writer's thread)."""

    after: np.ndarray
    before: np.ndarray

    def read(self) -> np.ndarray:
        if self.after.dtype.itemsize < 4 and self.after.dtype.kind not in "iub":
            # 16-bit weights: the difference of two neighbours would be rounded away.
            return np.asarray(self.after.astype(np.float32) - self.before.astype(np.float32))
        return np.asarray(self.after - self.before)


class Notes:
    """The records of a step so far, each with whether the model was in training mode.

    Attributes:
        copying: whether a tensor is being copied just now: what that calls is not the model's.
    """

    def __init__(self, framework: Framework, empty: Empty = np.empty) -> None:
        self._framework = framework
        self._empty = empty
        self.taken: list[tuple[Record, bool]] = []
        self.copying = False

    def copy(self, tensor: Any) -> np.ndarray:
        """The tensor's values as they are now."""
        self.copying = True
        try:
            return self._framework.to_numpy(tensor, self._empty)
        finally:
            self.copying = False

    def tensor(self, node: Node, stage: str, slot: str, tensor: Any, call: int, training: bool = True) -> np.ndarray:
        """Copy a tensor and write it down; returns the copy."""
        array = self.copy(tensor)
        self.put(node, stage, slot, InMemory(array), self._framework.dtype(tensor), array.shape, call, training)
        return array

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
        layer_type = type(node.layer).__name__
        self.taken.append((Record(node.path, stage, slot, source, dtype, tuple(shape), call, 0, layer_type), training))

    def scalar(self, stage: str, slot: str, value: float, call: int, dtype: str = "float64") -> None:
        """Write down a number that belongs to the whole step."""
        source = InMemory(np.asarray(value, dtype=np.float64))
        self.taken.append((Record(LOOP, stage, slot, source, dtype, (), call), True))
