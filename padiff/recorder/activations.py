"""The outputs of layers' calls, and the gradients that reach them."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from padiff.frameworks.base import Framework, Handle
from padiff.model.selection import Node
from padiff.recorder.detail import NOTHING
from padiff.recorder.interrupts import Interrupts
from padiff.recorder.left_out import Left
from padiff.recorder.record_buffer import LevelOf, RecordBuffer, Taken

# How many of the last outputs are looked at for one that a tensor is a view of.
_LAST = 16


@dataclass(slots=True)
class Call:
    """A layer's call that is under way."""

    node: Node
    number: int
    training: bool
    recomputed: bool
    #: Whether it is made inside of a function transform: then nothing of it is recorded.
    transformed: bool = False


@dataclass(slots=True)
class _Tensor:
    """A tensor seen in forward: its copy, and every site at which it was seen unchanged."""

    alive: weakref.ref[Any]
    version: int
    #: Its values as they were copied, by level; empty where it came from a recomputation.
    sources: dict[str, Taken | Left] = field(default_factory=dict)
    sites: list[tuple[Node, str, int, bool]] = field(default_factory=list)


class Activations:
    """Records what calls give, and in backward the gradients of it.

    Args:
        records: where records go.
        levels: how much is kept of each.
        interrupts: keeps Ctrl-C in backward.
    """

    def __init__(self, records: RecordBuffer, framework: Framework, levels: LevelOf, interrupts: Interrupts) -> None:
        self._records = records
        self._version_of, self._on_gradient = framework.tensors.version_of, framework.hooks.on_gradient
        self._is_same = framework.tensors.same_values
        self._levels, self._interrupts = levels, interrupts
        self._seen: dict[int, _Tensor] = {}
        self._times: Counter[tuple[str, str, int, bool]] = Counter()
        self._leaf_handles: list[Handle] = []
        self._closed = False

    def see(self, call: Call, slot: str, tensor: Any) -> None:
        """Record a tensor that a call gave, and from now on its gradient."""
        path = call.node.path
        level = self._levels(path, "forward")
        backward = self._levels(path, "backward") != NOTHING
        if level == NOTHING and not backward:
            return
        try:
            version = self._version_of(tensor)
            seen = self._seen.get(id(tensor))
            if seen is None or seen.alive() is not tensor or seen.version != version or version < 0:
                seen = _Tensor(weakref.ref(tensor), version)
                # A tensor hook, not a module's backward hook: paddle has none, and torch's full backward hook breaks
                # before in-place layers. The hook goes with the graph, so it needs no handle - but for a leaf, a
                # parameter or an input that a layer hands on, which lives on.
                handle = self._on_gradient(tensor, partial(self._gradient, seen))
                if handle is not None and tensor.is_leaf:
                    self._leaf_handles.append(handle)
                self._seen[id(tensor)] = seen
        except Exception as error:
            self._records.write(call.node, "forward", slot, Left.because(error), call.number, call.training)
            return
        if backward:
            seen.sites.append((call.node, slot, call.number, call.training))
        if level == NOTHING or call.recomputed:
            return
        taken = seen.sources.get(level)
        if taken is None:
            taken = seen.sources[level] = self._records.take(tensor, level)
        self._records.write(call.node, "forward", slot, taken, call.number, call.training)

    def taken(self, tensor: Any, level: str) -> Taken | None:
        """What was copied of a tensor already, or of one of which it is another view of all: one of the last outputs.

        `None` where nothing was.
        """
        seen = self._seen.get(id(tensor))
        if seen is None or seen.alive() is not tensor:
            seen = self._same_memory(tensor)
        if seen is None or seen.version != self._version_of(tensor) or seen.version < 0:
            return None
        taken = seen.sources.get(level)
        return None if isinstance(taken, Left) else taken

    def _same_memory(self, tensor: Any) -> _Tensor | None:
        for seen in islice(reversed(self._seen.values()), _LAST):
            other = seen.alive()
            if other is not None and self._is_same(tensor, other):
                return seen
        return None

    def _gradient(self, seen: _Tensor, gradient: Any) -> None:
        try:
            self._see_gradient(seen, gradient)
        except KeyboardInterrupt:
            self._interrupts.keep()

    def _see_gradient(self, seen: _Tensor, gradient: Any) -> None:
        if self._closed or gradient is None:
            return
        copies: dict[str, Taken | Left] = {}
        for node, slot, call, training in seen.sites:
            level = self._levels(node.path, "backward")
            if level not in copies:
                copies[level] = self._records.take(gradient, level)
            taken = copies[level]
            again = self._times[node.path, slot, call, training]
            self._times[node.path, slot, call, training] += 1
            # A second backward through the same graph is a quantity of its own.
            name = f"{slot}@{again}" if again else slot
            self._records.write(node, "backward", name, taken, call, training)

    def detach(self) -> None:
        """Take the hooks off that would outlive the graph."""
        while self._leaf_handles:
            self._leaf_handles.pop().remove()

    def close(self) -> None:
        """The step is over: from now on nothing is recorded."""
        self.detach()
        self._closed = True
        self._seen.clear()
