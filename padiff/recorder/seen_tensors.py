"""The tensors that were seen in a step's forward, each known again for as long as it is unchanged."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model.selection import Node
from padiff.recorder.detail import FULL
from padiff.recorder.left_out import Left
from padiff.recorder.record_buffer import Taken


@dataclass(slots=True)
class SeenTensor:
    """A tensor seen in forward: its copies, and every site at which it was seen unchanged.

    Attributes:
        alive: the tensor, as long as the training has it.
        version: how often it had been written in place.
        sources: its values as they were copied as an output, by level.
        traced: its values as they were copied for the trace. No record of an output is made of them: what is written
            by ways that torch and paddle do not count (``x.data``) must not be missed there.
        sites: where its gradient is recorded.
        followed: whether a hook on its gradient was asked for.
        number: in the step's trace; -1: it is not in it.
    """

    alive: weakref.ref[Any]
    version: int
    sources: dict[str, Taken | Left] = field(default_factory=dict)
    traced: Taken | Left | None = None
    sites: list[tuple[Node, str, int, bool]] = field(default_factory=list)
    followed: bool = False
    number: int = -1

    @property
    def best(self) -> Taken | None:
        """The best copy that there is."""
        copies = [taken for taken in (*self.sources.values(), self.traced) if taken and not isinstance(taken, Left)]
        return next((taken for taken in copies if taken.level == FULL), copies[0] if copies else None)


class SeenTensors:
    """Knows a tensor again; keeps none."""

    def __init__(self, framework: Framework) -> None:
        self._version_of = framework.tensors.version_of
        self._seen: dict[int, SeenTensor] = {}

    def of(self, tensor: Any) -> SeenTensor:
        """What is known of a tensor as it is now."""
        version = self._version_of(tensor)
        seen = self._seen.get(id(tensor))
        if seen is None or seen.alive() is not tensor or seen.version != version or version < 0:
            seen = self._seen[id(tensor)] = SeenTensor(weakref.ref(tensor), version)
        return seen

    def clear(self) -> None:
        """Forget all."""
        self._seen.clear()
