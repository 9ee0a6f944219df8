"""Weights, the gradients that the optimizer consumed, and what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from padiff.frameworks.base import Framework, Handle
from padiff.recorder.notes import Difference, Notes
from padiff.records import LOOP, InMemory
from padiff.selection import Node


class Parameters:
    """Records what the chosen layers own, over one step.

    Without an optimizer, gradients are what the parameters hold at the end of the step or, where they were cleared,
    what the backwards of the step added up to.

    Args:
        notes: where records go.
        nodes: all of the model's layers.
        chosen: paths of the layers whose parameters are recorded.
        optimizers: those whose gradients and updates are recorded.
    """

    def __init__(
        self,
        notes: Notes,
        framework: Framework,
        nodes: Sequence[Node],
        chosen: Collection[str],
        optimizers: Sequence[Any] = (),
    ) -> None:
        self._notes = notes
        self._framework = framework
        self._optimizers = optimizers
        self._before: dict[int, np.ndarray] = {}
        self._consumed: dict[int, tuple[np.ndarray, str]] = {}
        self._sums: dict[int, np.ndarray] = {}
        self._steps: Counter[int] = Counter()
        self._rates_seen: set[int] = set()
        self._snapped = self._closed = False
        # By identity: a tied parameter once, under the first path that reaches it.
        self._owners: dict[int, tuple[Node, str, Any, str]] = {}
        for node in nodes:
            for slot, tensor, role in framework.parameters(node.layer):
                if node.path in chosen:
                    self._owners.setdefault(id(tensor), (node, slot, tensor, role))

    def hook(self) -> list[Handle]:
        """Put hooks on the optimizers, or without one on the parameters."""
        handles: list[Handle] = []
        for optimizer in self._optimizers:
            consume, step = partial(self._consume, optimizer), partial(self._stepped, optimizer)
            handles += self._framework.hook_optimizer(optimizer, consume, step)
        if not self._optimizers:
            for key, tensor in self._trainable():
                handle = self._framework.hook_gradient(tensor, partial(self._add, key))
                handles += [handle] if handle is not None else []
        return handles

    def snapshot(self) -> None:
        """Record weights and buffers as they are, once a step."""
        if self._snapped:
            return
        self._snapped = True
        for key, (node, slot, tensor, role) in self._owners.items():
            array = self._notes.tensor(node, "weight", slot, tensor, 0)
            if role == "parameter":
                self._before[key] = array

    def finish(self, updates: bool = True) -> None:
        """Record what is not recorded yet; without ``updates`` no optimizer has stepped."""
        if not self._optimizers:
            self._take_what_is_there()
        if not updates:
            self._before.clear()
        self._record(self._consumed)
        self._before.clear()
        self._closed = True

    # -- hooks ---------------------------------------------------------------------------------------------

    def _add(self, key: int, gradient: Any) -> None:
        if not self._closed and gradient is not None:
            array = self._notes.copy(gradient)
            known = self._sums.get(key)
            self._sums[key] = array if known is None else known + array

    def _consume(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        for parameter, gradient in pairs:
            if id(parameter) in self._owners and gradient is not None:
                self._consumed[id(parameter)] = (self._notes.copy(gradient), self._framework.dtype(gradient))
        if id(optimizer) not in self._rates_seen:
            self._rates_seen.add(id(optimizer))
            for rate in self._framework.learning_rates(optimizer):
                known = sum(r.layer == LOOP and r.stage == "update" for r, _ in self._notes.taken)
                self._notes.scalar("update", f"learning_rate.{known}" if known else "learning_rate", rate, 0)

    def _stepped(self, optimizer: Any) -> None:
        mine = {id(parameter) for parameter in self._framework.optimized(optimizer)}
        self._record([key for key in self._consumed if key in mine])

    # -- records -------------------------------------------------------------------------------------------

    def _record(self, keys: Iterable[int]) -> None:
        """Turn consumed gradients, and what the step then did to the parameters, into records."""
        for key in list(keys):
            array, dtype = self._consumed.pop(key)
            node, slot, tensor, _ = self._owners[key]
            call = self._steps[key]
            self._steps[key] += 1
            self._notes.put(node, "grad", slot, InMemory(array), dtype, array.shape, call)
            before = self._before.get(key)
            if before is not None and before.shape == self._framework.shape(tensor):
                after = self._notes.copy(tensor)
                self._before[key] = after
                dtype = "float32" if after.dtype.itemsize < 4 else str(after.dtype)
                self._notes.put(node, "update", slot, Difference(after, before), dtype, after.shape, call)

    def _take_what_is_there(self) -> None:
        for key, tensor in self._trainable():
            gradient = self._framework.gradient(tensor)
            array = None if gradient is None else self._notes.copy(gradient)
            if array is None or not array.any():
                array = self._sums.get(key, array)  # cleared already
            if array is not None:
                self._consumed[key] = (array, str(array.dtype))
        self._sums.clear()

    def _trainable(self) -> list[tuple[int, Any]]:
        return [
            (key, tensor)
            for key, (_, _, tensor, role) in self._owners.items()
            if role == "parameter" and self._framework.trainable(tensor)
        ]
