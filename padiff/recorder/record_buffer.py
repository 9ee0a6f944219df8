"""Copies of tensors, written down as records in the order in which they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from padiff.model.selection import Node
from padiff.recorder.copying import Copier
from padiff.recorder.known import Known, OutputSite
from padiff.recorder.left_out import Left, LeftOut
from padiff.recorder.taken import Numbered, OnItsWay, Sampled, Taken
from padiff.records import LOOP, InMemory, Record, Sketched, TensorSource, TracedCall, TracedTensor
from padiff.records.alike import NO_SAMPLE, Alike, Pattern, Site, TracedSite, alike, sketched
from padiff.records.parts import Part


class Writes(Protocol):
    """Has records that are still to be written."""

    def write(self) -> None:
        """Write them."""


class RecordBuffer:
    """The records of a step so far, each with whether the model was in training mode.

    Args:
        copier: makes the copies.
        known: what is known from the steps before.

    Attributes:
        copier: likewise.
        left_out: what could not be copied.
        following: what follows a plan, whose records come before all that is written; `None`: nothing does.
    """

    def __init__(self, copier: Copier, known: Known | None = None) -> None:
        self.copier, self._samples = copier, copier.samples
        self.known = Known() if known is None else known
        #: Of each record so far: what it is; the number of its sample, and where that is `NO_SAMPLE`, its source.
        self._sites: list[Site] = []
        self._numbers: list[int] = []
        self._sources: dict[int, TensorSource] = {}
        self.left_out = LeftOut()
        self.following: Writes | None = None

    def __len__(self) -> int:
        self._settle()
        return len(self._sites)

    def _settle(self) -> None:
        if self.following is not None:
            self.following.write()

    def since(self, first: int) -> tuple[list[Site], list[int]]:
        """What the records are from one on, and their samples."""
        return self._sites[first:], self._numbers[first:]

    def clear(self) -> None:
        """Forget everything."""
        # Not cleared: the step that was made of them has them.
        self._sites, self._numbers, self._sources = [], [], {}

    def write(self, node: Node, stage: str, slot: str, taken: Taken | Left, call: int, training: bool = True) -> None:
        """Write down what was copied, or that it was not."""
        self.write_at(node.path, type(node.layer).__name__, stage, slot, taken, call, training)

    def write_at(
        self, path: str, kind: str, stage: str, slot: str, taken: Taken | Left, call: int, training: bool
    ) -> None:
        """`write`, given a layer's path and class."""
        self._settle()
        if isinstance(taken, Sampled):
            about = path, kind, stage, slot, taken.dtype, taken.shape, call, training, taken.transposed, taken.part
            self._sites.append(self.known.sites.get(about) or self.known.site(Site(*about)))  # type: ignore[call-overload]
            self._numbers.append(taken.number)
        elif isinstance(taken, Left):
            self.left_out.add(path, taken.reason, training)
        else:
            site = Site(path, kind, stage, slot, taken.dtype, tuple(taken.shape), call, training, False, taken.part)
            self._put(site, taken.source)

    def write_sample(self, last: Site | None, at: OutputSite, stage: str, taken: Sampled) -> Site:
        """Write down a sample, and return what it was recorded as.

        Args:
            last: what the one before it was recorded as, in the step before: the same, as a rule.
        """
        alike = last is not None and last.dtype == taken.dtype and last.shape == taken.shape
        if last is None or not alike or last.transposed is not taken.transposed or last.part != taken.part:
            site = Site(
                at.path,
                at.kind,
                stage,
                at.slot,
                taken.dtype,
                taken.shape,
                at.call,
                at.training,
                taken.transposed,
                taken.part,
            )
            last = self.known.site(site)
        self._settle()
        self._sites.append(last)
        self._numbers.append(taken.number)
        return last

    def write_all(self, sites: Iterable[Site], numbers: Iterable[int]) -> None:
        """Write down samples, given what they are: sites that `Known.site` gave."""
        self._settle()
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
        end = len(self)
        if place is not None and place < end:
            self._sources = {at + (at >= place): other for at, other in self._sources.items()}
            end = place
        number = NO_SAMPLE
        if isinstance(source, Sketched) and source.sample is not None and source.sample[0] is self._samples:
            number = source.sample[1]
            site = site._replace(transposed=source.transposed)
        else:
            self._sources[end] = source
        self._sites.insert(end, self.known.site(site))
        self._numbers.insert(end, number)

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
                    sketched(self._samples, number, site.dtype, site.shape, site.transposed, site.part)
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
        traced: Sequence[Taken | Numbered | None],
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
            if isinstance(taken, Numbered) or (isinstance(taken, Sampled) and taken.samples is self._samples):
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
            if pattern is not None and same and pattern.sites == self._sites:
                pattern = pattern.renumbered(self._numbers, numbers)
            else:
                pattern = Pattern(self._sites, self._numbers, sites, numbers, made())
            self.known.steady = before is None
            self.known.pattern = pattern, calls
        else:
            self.known.steady = True
        return (*alike(pattern, self._samples, self._sources, others), pattern.calls)
