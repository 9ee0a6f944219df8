"""Copies of tensors, complete or still in transfer, their memory, and what earlier steps know of them."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Protocol

import numpy as np

from padiff.frameworks.base import Framework, Tensors, UncopiedError
from padiff.model.nested import slots_of
from padiff.recorder.options import FULL, SKETCH
from padiff.records import InMemory, Sketched, Storable, StreamedArray, TensorSource
from padiff.records.recorded import Part
from padiff.records.step_schema import Site, StepSchema, TracedSite, sketched
from padiff.sketches.samples import Samples
from padiff.system.guard import reraise_from_signal_handler

# Bytes of a difference that are computed at a time: small enough to be in the CPU cache when they are written.
_PIECE = 1 << 18
# The difference of infinite weights is NaN, and the training may have told numpy to raise an error for that.
_UNSAID = partial(np.errstate, all="ignore")


@dataclass(frozen=True, slots=True)
class Difference(TensorSource):
    """Tensor source of ``after - before``, computed when it is read, on the writer's thread.

    Attributes:
        after, before: the two arrays.
    """

    after: np.ndarray
    before: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.after, self.before

    def read(self) -> np.ndarray:
        return difference(self.after, self.before)

    def to_store(self) -> Storable:
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


# Key of an output site: path, class of the layer, slot, number of the call, True for training mode.
_About = tuple[str, str, str, int, bool]

# Largest number of sites that are remembered.
_MOST_SITES = 200_000


class OutputSite:
    """The site at which one output of a layer and its gradient are recorded.

    Attributes:
        path, kind, slot, call, training: the attributes of `padiff.records.step_schema.Site`.
        alone: a tuple that holds only this site.
        forward, backward: the sites of the last recorded samples of the output and its gradient, which usually are
            those of the next step, too.
    """

    __slots__ = ("alone", "backward", "call", "forward", "kind", "path", "slot", "training")

    def __init__(self, path: str, kind: str, slot: str, call: int, training: bool) -> None:
        self.path, self.kind, self.slot, self.call, self.training = path, kind, slot, call, training
        self.alone: tuple[OutputSite, ...] = (self,)
        self.forward: Site | None = None
        self.backward: Site | None = None


@dataclass(slots=True)
class StepCache:
    """Cache of facts from earlier steps of a recording.

    Attributes:
        pattern: pattern of the last step, with the parts of its trace.
        steady: True if the last step had the same pattern as the step before, or was the first one.
        plan: the expected events of the next step, or None if unknown.
        sites: all recorded sites, so that equal sites are one object.
    """

    pattern: tuple[StepSchema, Sequence[object]] | None = None
    steady: bool = True
    plan: Any = None
    sites: dict[Site, Site] = field(default_factory=dict)
    #: By path of a layer, the functions by which its code chooses (`padiff.recorder.calls`), as traced steps showed;
    #: True for those that return places, and not only values.
    choosing: defaultdict[str, dict[str, bool]] = field(default_factory=lambda: defaultdict(dict))
    #: Function and number of the loop's calls that choose for the loss.
    loop_choices: set[tuple[str, int]] = field(default_factory=set)
    #: Sites of the inputs that the training computes (`padiff.recorder.step_observer`), as steps showed.
    computed_inputs: set[str] = field(default_factory=set)
    #: All output sites, so that equal ones are one object.
    _outputs: dict[_About, OutputSite] = field(default_factory=dict)
    #: Name of the first argument, by forward function.
    _slots: dict[Any, str] = field(default_factory=dict)

    def first_slot(self, forward: Any) -> str:
        """Return the slot of the first positional argument of a layer's ``forward``."""
        function = getattr(forward, "__func__", None)
        slot = self._slots.get(function)
        if slot is None:
            slot = next(iter(slots_of(forward, 1)))
            if function is not None:  # without ``__func__``, ``forward`` is set on the object itself
                self._slots[function] = slot
        return slot

    def site(self, site: Site) -> Site:
        """Return the cached object that equals a site; a new site is added."""
        canonical = self.sites.get(site)
        if canonical is None:
            if len(self.sites) >= _MOST_SITES:  # sequences whose length changes in each step
                self.sites.clear()
            canonical = self.sites[site] = site
        return canonical

    def output(self, path: str, kind: str, slot: str, call: int, training: bool) -> OutputSite:
        """Return the cached site of an output; a new site is added."""
        about = path, kind, slot, call, training
        output_site = self._outputs.get(about)
        if output_site is None:
            if len(self._outputs) >= _MOST_SITES:
                self._outputs.clear()
            output_site = self._outputs[about] = OutputSite(*about)
        return output_site


# Largest number of characters of an error's text, of named layers and of reasons: a step may skip thousands of tensors.
_LETTERS, _NAMED, _REASONS = 120, 3, 5


@dataclass(frozen=True, slots=True)
class SkippedTensor:
    """Placeholder for a copy that could not be made.

    Attributes:
        reason: text of the reason.
    """

    reason: str

    level: ClassVar[str] = ""
    zero: ClassVar[bool] = False

    @classmethod
    def because(cls, error: Exception) -> SkippedTensor:
        """Return the placeholder for a copy that failed with an error. Call this in the ``except`` block.

        Raises:
            MemoryError: the error is one; other errors are kept from the training.
        """
        reraise_from_signal_handler(error)
        if isinstance(error, MemoryError):
            raise error
        if isinstance(error, UncopiedError):
            return cls(str(error))
        text = " ".join(str(error).split())
        short = f"{text[:_LETTERS]} ..." if len(text) > _LETTERS else text.rstrip(".")
        return cls(f"copying failed with {type(error).__name__}: {short}")


class SkipLog:
    """Counter of the skipped tensors and calls of a step, by reason."""

    def __init__(self) -> None:
        #: Number of skips per layer path, by (kind, reason, True for training mode).
        self._counts: dict[tuple[str, str, bool], dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def __bool__(self) -> bool:
        """Return True if anything was skipped."""
        return bool(self._counts)

    def add(self, path: str, reason: str, training: bool, what: str = "tensor") -> None:
        """Count a skipped tensor, or call, of a layer."""
        self._counts[what, reason, training][path] += 1

    def notes(self, training_only: bool) -> tuple[str, ...]:
        """Return a sentence for each reason.

        Args:
            training_only: True to ignore calls in evaluation mode.
        """
        merged: dict[tuple[str, str], dict[str, int]] = {}
        for (what, reason, training), counts in self._counts.items():
            if training or not training_only:
                layer_counts = merged.setdefault((what, reason), {})
                for path, count in counts.items():
                    layer_counts[path] = layer_counts.get(path, 0) + count
        sentences = []
        for (what, reason), layer_counts in list(merged.items())[:_REASONS]:
            named = ", ".join(list(layer_counts)[:_NAMED]) + (", ..." if len(layer_counts) > _NAMED else "")
            count = sum(layer_counts.values())
            sentences.append(f"{count} {what}(s) of {len(layer_counts)} layer(s) are not recorded ({named}): {reason}")
        omitted = len(merged) - _REASONS
        return (*sentences, f"more is not recorded, for {omitted} other reason(s)") if omitted > 0 else tuple(sentences)


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
        skipped: dtype and shape in the trace, of a tensor that was not copied.
        maker: function call of the loop that gave it, if that call is not in the trace yet.
    """

    # Class attributes as defaults: an entry is made for each tensor of each step, and most values stay at the default.
    full: TensorCopy | SkippedTensor | None = None
    sketched: TensorCopy | SkippedTensor | None = None
    traced: TensorCopy | SkippedTensor | None = None
    sites: tuple[OutputSite, ...] = ()
    followed = False
    number = -1
    skipped: TracedSite | None = None
    maker: Any = None

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

    def known(self, alive: weakref.ref[Any], version: int) -> SeenTensor:
        """Return the entry of a version of a tensor, or a new one, which is not added."""
        entry = self._seen.get(id(alive()))
        return (
            entry
            if entry is not None and entry.alive() is alive() and entry.version == version
            else SeenTensor(alive, version)
        )

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

    def forget(self, tensor: Any) -> None:
        """Remove the entry of a tensor that was written to in a way that its version does not show."""
        self.lookup(tensor)
        self._seen.pop(id(tensor))

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
