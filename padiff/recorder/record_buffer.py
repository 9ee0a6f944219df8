"""Copies of tensors, written down as records in the order in which they come."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from padiff.frameworks.base import Framework, Tensors
from padiff.model.nested import slots_of
from padiff.model.selection import Node
from padiff.recorder.detail import FULL, SKETCH, SMALL
from padiff.recorder.left_out import Left, LeftOut
from padiff.records import LOOP, InMemory, Record, Sketched, TensorSource, TracedCall, TracedTensor
from padiff.records.alike import NO_SAMPLE, Alike, Pattern, Site, TracedSite, alike, sketched
from padiff.sketches.samples import Empty, Samples
from padiff.sketches.sketch import ELEMENTS, Cut, cut_of

# Sites that are kept in mind.
_MOST_SITES = 200_000

#: Elements up to which a tensor is small: a sketch looks at each, so that to keep them copies no more. Measured, of 107
#: faults in small nets: 97 are proven where the first step has such tensors whole, 45 where it has sketches.
SMALL_ELEMENTS = ELEMENTS
#: Bytes of small tensors that are kept of a step, those that come first. Chosen: some 2,000 of the largest (a ResNet-18
#: has 0.1 MB).
SMALL_BYTES = 32 << 20
#: And which share of what a run may become, where that has a limit: the first step stays for as long as the run does.
SMALL_SHARE = 1 / 8


class LevelOf(Protocol):
    """How much is kept of a layer's tensors, by its path and the stage."""

    def __getitem__(self, key: tuple[str, str], /) -> str: ...


class _Everything:
    def __getitem__(self, key: tuple[str, str], /) -> str:
        return FULL


#: Full tensors everywhere.
EVERYTHING: LevelOf = _Everything()


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
        return sketched(self.samples, number, self.dtype, self.shape, self.transposed)


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


@dataclass(slots=True)
class Known:
    """What is known from the steps before of what a step will be.

    Attributes:
        pattern: the last step's, with what its trace was made of.
        sites: every site that was recorded: one that is met again is the same object.
    """

    pattern: tuple[Pattern, Sequence[object]] | None = None
    sites: dict[Site, Site] = field(default_factory=dict)
    #: Likewise of gradients.
    gradients: dict[Any, Any] = field(default_factory=dict)
    #: By the function: what a layer's first argument is called.
    _slots: dict[Any, str] = field(default_factory=dict)

    def first_slot(self, forward: Any) -> str:
        """The slot of the first argument that a layer is called with, by position."""
        function = getattr(forward, "__func__", None)
        slot = self._slots.get(function)
        if slot is None:
            slot = next(iter(slots_of(forward, 1)))
            if function is not None:  # else it is set on the object itself
                self._slots[function] = slot
        return slot

    def site(self, site: Site) -> Site:
        """The one object for a site."""
        found = self.sites.get(site)
        if found is None:
            if len(self.sites) >= _MOST_SITES:  # sequences of ever other lengths
                self.sites.clear()
                self.gradients.clear()
            found = self.sites[site] = site
        return found


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
        known: Known | None = None,
        room: float = SMALL_BYTES,
    ) -> None:
        self._tensors = framework.tensors
        self._empty, self._room = empty, room
        self.samples = Samples(bring=framework.tensors.fetch) if samples is None else samples
        self.known = Known() if known is None else known
        #: Of each record so far: what it is; the number of its sample, and where that is `NO_SAMPLE`, its source.
        self._sites: list[Site] = []
        self._numbers: list[int] = []
        self._sources: dict[int, TensorSource] = {}
        self._later: list[Awaited] = []
        self.left_out = LeftOut()

    def __len__(self) -> int:
        return len(self._sites)

    def clear(self) -> None:
        """Forget everything."""
        # Not cleared: the step that was made of them has them.
        self._sites, self._numbers, self._sources = [], [], {}
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
        tensors, samples = self._tensors, self.samples
        RecordBuffer.copying = True
        try:
            if level == SMALL and self.resolved(tensor, level) == FULL:
                array = tensors.copy(tensor, self._empty)
                self._room -= array.nbytes
                return Whole(tensors.dtype(tensor), array.shape, array)
            if level == FULL:
                array = tensors.copy(tensor, self._empty)
                return Whole(tensors.dtype(tensor), array.shape, array)
            cut = tensors.cut(tensor, transposed)
            if cut is not None:
                return Sampled(cut.dtype, cut.shape, samples, samples.add_all((cut,)), transposed)
            dtype, values = tensors.dtype(tensor), tensors.sample(tensor, transposed)
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

    def sample(self, cuts: Sequence[Cut | None]) -> int | None:
        """Samples from where the memory of tensors is: the number of the first, which the others follow. `None` where
        that can't be done: one of them is none.
        """
        if not cuts or None in cuts:
            return None
        RecordBuffer.copying = True
        try:
            return self.samples.add_all(cuts)  # type: ignore[arg-type]
        except MemoryError:
            raise
        except Exception:  # one by one it is said which
            return None
        finally:
            RecordBuffer.copying = False

    def write(self, node: Node, stage: str, slot: str, taken: Taken | Left, call: int, training: bool = True) -> None:
        """Write down what was copied, or that it was not."""
        self.write_at(node.path, type(node.layer).__name__, stage, slot, taken, call, training)

    def write_at(
        self, path: str, kind: str, stage: str, slot: str, taken: Taken | Left, call: int, training: bool
    ) -> None:
        """`write`, given a layer's path and class."""
        if isinstance(taken, Sampled):
            about = path, kind, stage, slot, taken.dtype, taken.shape, call, training, taken.transposed
            self._sites.append(self.known.sites.get(about) or self.known.site(Site(*about)))  # type: ignore[call-overload]
            self._numbers.append(taken.number)
        elif isinstance(taken, Left):
            self.left_out.add(path, taken.reason, training)
        else:
            site = Site(path, kind, stage, slot, taken.dtype, tuple(taken.shape), call, training, False)
            self._put(site, taken.source)

    def write_all(self, sites: Iterable[Site], numbers: Iterable[int]) -> None:
        """Write down samples, given what they are: sites that `Known.site` gave."""
        self._sites += sites
        self._numbers += numbers

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
        kind = type(node.layer).__name__
        self._put(Site(node.path, kind, stage, slot, dtype, tuple(shape), call, training, False), source)

    def scalar(self, stage: str, slot: str, value: float, call: int, dtype: str = "float64") -> None:
        """Write down a number that belongs to the whole step."""
        source = InMemory(np.asarray(value, dtype=np.float64))
        self._put(Site(LOOP, "", stage, slot, dtype, (), call, True, False), source)

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
        site = Site(LOOP, "", stage, slot, taken.dtype, tuple(taken.shape), call, training, False)
        self._put(site, taken.source, place)

    def _put(self, site: Site, source: TensorSource, place: int | None = None) -> None:
        end = len(self._sites)
        if place is not None and place < end:
            self._sources = {at + (at >= place): other for at, other in self._sources.items()}
            end = place
        number = NO_SAMPLE
        if isinstance(source, Sketched) and source.sample is not None and source.sample[0] is self.samples:
            number = source.sample[1]
            site = site._replace(transposed=source.transposed)
        else:
            self._sources[end] = source
        self._sites.insert(end, self.known.site(site))
        self._numbers.insert(end, number)

    def fetch(self) -> None:
        """Begin to bring over what is still on another device: all of it at once."""
        self.samples.fetch()
        if self._later:
            _Batch(list(self._later), self._tensors)
            self._later.clear()

    def records(self, training_only: bool, recomputed: frozenset[str]) -> tuple[Record, ...]:
        """The records, in the order in which they came.

        Args:
            training_only: leave out those of calls in evaluation mode.
            recomputed: layers whose forward ran again inside of a backward.
        """
        kept = [
            (site, number, self._sources.get(place))
            for place, (site, number) in enumerate(zip(self._sites, self._numbers))
            if site.training or not training_only
        ]
        return tuple(
            [
                Record(
                    site.layer,
                    site.stage,
                    site.slot,
                    sketched(self.samples, number, site.dtype, site.shape, site.transposed) if other is None else other,
                    site.dtype,
                    site.shape,
                    site.call,
                    order,
                    site.layer_type,
                    site.stage == "forward" and site.layer in recomputed,
                )
                for order, (site, number, other) in enumerate(kept)
            ]
        )

    def alike(
        self,
        traced: Sequence[Taken | None],
        unknown: Mapping[int, TracedSite],
        calls: Sequence[object],
        made: Callable[[], Sequence[TracedCall]],
    ) -> tuple[Alike[Record], Alike[TracedTensor], Sequence[TracedCall]]:
        """The records of a whole step, and the tensors and calls of its trace: all that is known already as it is.

        Args:
            traced: what was copied of the trace's tensors.
            unknown: by their places, what those are of which nothing was.
            calls: what tells whether the calls are those of the step before.
            made: makes them.
        """
        before = self.known.pattern
        pattern = None if before is None else before[0]
        known: Sequence[TracedSite] = () if pattern is None else pattern.traced
        same = len(known) == len(traced)
        sites: list[TracedSite] = []
        numbers: list[int] = []
        others: dict[int, TensorSource] = {}
        for place, taken in enumerate(traced):
            if isinstance(taken, Sampled) and taken.samples is self.samples:
                dtype, shape, turned = taken.dtype, taken.shape, taken.transposed
                numbers.append(taken.number)
            elif taken is None:
                dtype, shape, turned = unknown[place]
                numbers.append(NO_SAMPLE)
            else:
                dtype, shape, turned = taken.dtype, tuple(taken.shape), False
                numbers.append(NO_SAMPLE)
                others[place] = taken.source
            if same:
                # Kept where it is the same: a large model's would keep the collector busy.
                its_dtype, its_shape, its_turned = site = known[place]
                same = its_dtype == dtype and its_shape == shape and its_turned == turned
                sites.append(site if same else TracedSite(dtype, shape, turned))
            else:
                sites.append(TracedSite(dtype, shape, turned))
        same = same and before is not None and before[1] == calls
        if pattern is None or not same or not pattern.same_as(self._sites, self._numbers, numbers):
            pattern = Pattern(self._sites, self._numbers, sites, numbers, made())
            self.known.pattern = pattern, calls
        return (*alike(pattern, self.samples, self._sources, others), pattern.calls)
