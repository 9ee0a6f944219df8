"""Copies of tensors, written down as records in the order in which they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from padiff.frameworks.base import Framework
from padiff.frameworks.values import UncopiedError
from padiff.model.selection import Node
from padiff.recorder.detail import FULL, SKETCH, SMALL, WITHIN
from padiff.recorder.known import Known
from padiff.recorder.left_out import Left, LeftOut
from padiff.recorder.taken import Awaited, OnItsWay, Sampled, Taken, Transfer, Whole
from padiff.records import LOOP, InMemory, Record, Sketched, TensorSource, TracedCall, TracedTensor
from padiff.records.alike import NO_SAMPLE, Alike, Pattern, Site, TracedSite, alike, sketched
from padiff.records.parts import PARTIAL, Part
from padiff.sketches.parts import own_of
from padiff.sketches.samples import Empty, Samples
from padiff.sketches.sketch import ELEMENTS, Cut, cut_of

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


class RecordBuffer:
    """The records of a step so far, each with whether the model was in training mode.

    Args:
        framework: whose tensors they are.
        empty: where memory for copies comes from.
        samples: what keeps the samples that sketches are made of.
        room: bytes of small tensors that are kept where sketches are kept of others.

    Attributes:
        within: bytes that are still kept in full of tensors of the level `WITHIN`.
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
        self._tensors, self._spread = framework.tensors, framework.spread
        self._empty, self._room, self.within = empty, room, math.inf
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

    def _fits(self, tensor: Any) -> bool:
        """Whether there is room for all of a tensor."""
        try:
            return math.prod(self._tensors.shape(tensor)) * int(tensor.element_size()) <= self.within
        except Exception:  # of a kind that has no shape; copying it says what to make of it
            return True

    def take(self, tensor: Any, level: str, transposed: bool = False) -> Taken | Left:
        """The tensor's values as they are now, or a sample of them (of the transposed), as the level asks for."""
        tensors, samples = self._tensors, self.samples
        RecordBuffer.copying = True
        try:
            if self._spread.is_spread(tensor):
                tensor, part = self._spread.local(tensor)
                if part is not None:
                    return self._take_part(tensor, part, level, transposed)
            if level == SMALL and self.resolved(tensor, level) == FULL:
                array = tensors.copy(tensor, self._empty)
                self._room -= array.nbytes
                return Whole(tensors.dtype(tensor), array.shape, array)
            if level == WITHIN:
                if self._fits(tensor):
                    array = tensors.copy(tensor, self._empty)
                    self.within -= array.nbytes
                    return Whole(tensors.dtype(tensor), array.shape, array)
                self.within = 0.0  # what comes later does not get what this one has not
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

    def take_part(self, tensor: Any, part: Part, level: str, transposed: bool = False) -> Taken | Left:
        """`take`, of a part of a tensor that is spread over processes; ``transposed`` is said of the whole."""
        RecordBuffer.copying = True
        try:
            return self._take_part(tensor, part, level, transposed)
        except Exception as error:
            return Left.because(error)
        finally:
            RecordBuffer.copying = False

    def _take_part(self, tensor: Any, part: Part, level: str, transposed: bool) -> Taken:
        tensors = self._tensors
        name, shape = tensors.dtype(tensor), tensors.shape(tensor)
        if not part.fits(shape):
            raise UncopiedError(f"a part {shape} at {part.offset} does not lie in a tensor {part.shape}")
        if level == SMALL:
            # By the whole's size: all processes have to keep the same of a tensor.
            level = FULL if part.size <= SMALL_ELEMENTS else SKETCH
        if level == WITHIN:
            fits = math.prod(shape) * int(tensor.element_size()) <= self.within
            level = FULL if fits else SKETCH
            self.within = self.within - math.prod(shape) * int(tensor.element_size()) if fits else 0.0
        # What is kept of terms beside their projections does not tell what that of their sum is.
        if level == FULL or part.kind == PARTIAL or name.startswith("complex"):
            array = tensors.copy(tensor, self._empty)
            return Whole(name, array.shape, array, part=part)
        own = own_of(part.shape, part.offset, shape, transposed)
        values = tensors.elements(tensor, own.elements)
        return Sampled(name, shape, self.samples, self.samples.add_part(values, own), transposed, part=part)

    def take_later(self, tensor: Any) -> Taken | OnItsWay | Left:
        """The tensor's values as they are now, all of them; from another device they come when the step is over."""
        if self._tensors.device(tensor) == "cpu" or self._spread.is_spread(tensor):
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
            about = path, kind, stage, slot, taken.dtype, taken.shape, call, training, taken.transposed, taken.part
            self._sites.append(self.known.sites.get(about) or self.known.site(Site(*about)))  # type: ignore[call-overload]
            self._numbers.append(taken.number)
        elif isinstance(taken, Left):
            self.left_out.add(path, taken.reason, training)
        else:
            site = Site(path, kind, stage, slot, taken.dtype, tuple(taken.shape), call, training, False, taken.part)
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
        part: Part | None = None,
    ) -> None:
        """Write down values that are copied already."""
        kind = type(node.layer).__name__
        self._put(Site(node.path, kind, stage, slot, dtype, tuple(shape), call, training, False, part), source)

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
        part = None if isinstance(taken, OnItsWay) else taken.part
        site = Site(LOOP, "", stage, slot, taken.dtype, tuple(taken.shape), call, training, False, part)
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
            Transfer(list(self._later), self._tensors)
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
                    sketched(self.samples, number, site.dtype, site.shape, site.transposed, site.part)
                    if other is None
                    else other,
                    site.dtype,
                    site.shape,
                    site.call,
                    order,
                    site.layer_type,
                    site.stage == "forward" and site.layer in recomputed,
                    site.part,
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
                dtype, shape, transposed = taken.dtype, taken.shape, taken.transposed
                numbers.append(taken.number)
            elif taken is None:
                dtype, shape, transposed = unknown[place]
                numbers.append(NO_SAMPLE)
            else:
                dtype, shape, transposed = taken.dtype, tuple(taken.shape), False
                numbers.append(NO_SAMPLE)
                others[place] = taken.source
            if same:
                # Kept where it is the same: a large model's would keep the collector busy.
                its_dtype, its_shape, its_transposed = site = known[place]
                same = its_dtype == dtype and its_shape == shape and its_transposed == transposed
                sites.append(site if same else TracedSite(dtype, shape, transposed))
            else:
                sites.append(TracedSite(dtype, shape, transposed))
        same = same and before is not None and before[1] == calls
        if pattern is None or not same or not pattern.same_as(self._sites, self._numbers, numbers):
            pattern = Pattern(self._sites, self._numbers, sites, numbers, made())
            self.known.pattern = pattern, calls
        return (*alike(pattern, self.samples, self._sources, others), pattern.calls)
