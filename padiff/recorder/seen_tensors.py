"""A cache of the tensors seen in a step's forward; an entry is valid as long as its tensor is unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from padiff.frameworks.base import Framework
from padiff.recorder.detail import FULL
from padiff.recorder.skip_log import SkippedTensor
from padiff.recorder.step_cache import OutputSite
from padiff.recorder.tensor_copy import TensorCopy

# Number of recent tensors that are checked for sharing their values with a new one (views).
_LAST = 16


class SeenTensor:
    """Cache entry of a tensor seen in forward: its copies, and every output site at which it was seen unchanged.

    Attributes:
        alive: weak reference to the tensor.
        version: number of in-place writes to the tensor when it was seen; negative if the framework does not count.
        full, sketched: copies made for a record of an output, by level.
        traced: copy made for the trace. It is not used for records of outputs, where in-place writes that torch and
            paddle do not count (``x.data``) must not be missed.
        sites: output sites at which its gradient is recorded.
        followed: True if a hook on its gradient was requested.
        number: number in the trace of the step; -1 if it is not in the trace.
    """

    # Class attributes as defaults: an entry is made for each tensor of each step, and most values stay at the default.
    full: TensorCopy | SkippedTensor | None = None
    sketched: TensorCopy | SkippedTensor | None = None
    traced: TensorCopy | SkippedTensor | None = None
    sites: tuple[OutputSite, ...] = ()
    followed = False
    number = -1

    def __init__(self, alive: weakref.ref[Any], version: int) -> None:
        self.alive, self.version = alive, version

    @property
    def best(self) -> TensorCopy | None:
        """Return the best copy: one in full if there is one, else the first one; None without a copy."""
        best: TensorCopy | None = None
        for copy in (self.full, self.sketched, self.traced):
            if copy is not None and not isinstance(copy, SkippedTensor):
                if copy.level == FULL:
                    return copy
                best = best or copy
        return best

    def copied(self, level: str) -> TensorCopy | SkippedTensor | None:
        """Return the copy made for a record of an output at a level."""
        return self.full if level == FULL else self.sketched


class Shows(Protocol):
    """Source of cache entries that `SeenTensors` does not have yet."""

    def show(self, tensor: Any, last: int = 0) -> None:
        """Add the pending entries of a tensor and of the ``last`` most recent tensors to the cache."""


class SeenTensors:
    """Cache of the tensors of a step by identity, with weak references only.

    Attributes:
        following: follower of a plan, whose pending entries are added before each lookup; `None` if there is none.
    """

    def __init__(self, framework: Framework) -> None:
        self._version_of, self._same_values = framework.tensors.version_of, framework.tensors.same_values
        self._seen: dict[int, SeenTensor] = {}
        self.following: Shows | None = None

    def know(self, seen: SeenTensor) -> None:
        """Add an entry that was made elsewhere, if its tensor is still alive."""
        tensor = seen.alive()
        if tensor is not None:
            self._seen.pop(id(tensor), None)
            self._seen[id(tensor)] = seen

    def lookup(self, tensor: Any) -> SeenTensor:
        """Return the entry of a tensor in its current version; a new one if the tensor is new or was written to."""
        if self.following is not None:
            self.following.show(tensor)
        version = self._version_of(tensor)
        entry = self._seen.get(id(tensor))
        if entry is None or entry.alive() is not tensor or entry.version != version or version < 0:
            # The identity may be that of a deleted tensor: remove its entry, so that the new one comes last.
            self._seen.pop(id(tensor), None)
            entry = self._seen[id(tensor)] = SeenTensor(weakref.ref(tensor), version)
        return entry

    def taken(self, tensor: Any, level: str) -> TensorCopy | None:
        """Return an existing copy of the values of a tensor at a level, or None if there is none.

        The copy may be that of a recent tensor that holds the same values, i.e. another view of all of them.
        """
        if self.following is not None:
            self.following.show(tensor, _LAST)
        version = self._version_of(tensor)
        for entry in self._that_hold(tensor):
            copy = entry.copied(level) if entry.version == version >= 0 else None
            if copy is not None:
                return None if isinstance(copy, SkippedTensor) else copy
        return None

    def _that_hold(self, tensor: Any) -> Iterator[SeenTensor]:
        """Yield the entry of the tensor, then entries of recent tensors that are other views of the same values."""
        exact = self._seen.get(id(tensor))
        if exact is not None and exact.alive() is tensor:
            yield exact
        for entry in islice(reversed(self._seen.values()), _LAST):
            candidate = entry.alive()
            if candidate is not None and candidate is not tensor and self._same_values(tensor, candidate):
                yield entry

    def clear(self) -> None:
        """Remove all entries."""
        self._seen.clear()
