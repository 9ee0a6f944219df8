"""The tensors that were seen in a step's forward, each known again for as long as it is unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from padiff.frameworks.base import Framework
from padiff.recorder.detail import FULL
from padiff.recorder.known import OutputSite
from padiff.recorder.left_out import Left
from padiff.recorder.taken import Taken

# How many of the last ones are looked at for one that a tensor is a view of.
_LAST = 16


class SeenTensor:
    """A tensor seen in forward: its copies, and every site at which it was seen unchanged.

    Attributes:
        alive: the tensor, as long as the training has it.
        version: how often it had been written in place.
        full, sketched: its values as they were copied as an output, by level.
        traced: its values as they were copied for the trace. No record of an output is made of them: what is written
            by ways that torch and paddle do not count (``x.data``) must not be missed there.
        sites: where its gradient is recorded.
        followed: whether a hook on its gradient was asked for.
        number: in the step's trace; -1: it is not in it.
    """

    # Defaults of the class: one is made for each tensor of each step, and most of them stay so.
    full: Taken | Left | None = None
    sketched: Taken | Left | None = None
    traced: Taken | Left | None = None
    sites: tuple[OutputSite, ...] = ()
    followed = False
    number = -1

    def __init__(self, alive: weakref.ref[Any], version: int) -> None:
        self.alive, self.version = alive, version

    @property
    def best(self) -> Taken | None:
        """The best copy that there is: what is kept in full, else what came first."""
        best: Taken | None = None
        for taken in (self.full, self.sketched, self.traced):
            if taken is not None and not isinstance(taken, Left):
                if taken.level == FULL:
                    return taken
                best = best or taken
        return best

    def copied(self, level: str) -> Taken | Left | None:
        """The copy of an output that was made at a level."""
        return self.full if level == FULL else self.sketched


class Shows(Protocol):
    """Knows of tensors what `SeenTensors` does not know yet."""

    def show(self, tensor: Any, last: int = 0) -> None:
        """Have it know what there is to know of a tensor, and of so many of the last ones."""


class SeenTensors:
    """Knows a tensor again; keeps none.

    Attributes:
        following: what follows a plan, and has to be asked first; `None`: nothing does.
    """

    def __init__(self, framework: Framework) -> None:
        self._version_of, self._same_values = framework.tensors.version_of, framework.tensors.same_values
        self._seen: dict[int, SeenTensor] = {}
        self.following: Shows | None = None

    def know(self, seen: SeenTensor) -> None:
        """What is known of a tensor was found out elsewhere."""
        tensor = seen.alive()
        if tensor is not None:
            self._seen.pop(id(tensor), None)
            self._seen[id(tensor)] = seen

    def of(self, tensor: Any) -> SeenTensor:
        """What is known of a tensor as it is now."""
        if self.following is not None:
            self.following.show(tensor)
        version = self._version_of(tensor)
        seen = self._seen.get(id(tensor))
        if seen is None or seen.alive() is not tensor or seen.version != version or version < 0:
            # The number may be that of a tensor that is gone: the new one comes last all the same.
            self._seen.pop(id(tensor), None)
            seen = self._seen[id(tensor)] = SeenTensor(weakref.ref(tensor), version)
        return seen

    def taken(self, tensor: Any, level: str) -> Taken | None:
        """What was copied of a tensor already, or of one of the last seen that it is another view of, of all of it.

        `None` where nothing was.
        """
        if self.following is not None:
            self.following.show(tensor, _LAST)
        version = self._version_of(tensor)
        for seen in self._that_hold(tensor):
            taken = seen.copied(level) if seen.version == version >= 0 else None
            if taken is not None:
                return None if isinstance(taken, Left) else taken
        return None

    def _that_hold(self, tensor: Any) -> Iterator[SeenTensor]:
        """The tensor itself first, then those that it is another view of: these are looked for only if need be."""
        own = self._seen.get(id(tensor))
        if own is not None and own.alive() is tensor:
            yield own
        for seen in islice(reversed(self._seen.values()), _LAST):
            other = seen.alive()
            if other is not None and other is not tensor and self._same_values(tensor, other):
                yield seen

    def clear(self) -> None:
        """Forget all."""
        self._seen.clear()
