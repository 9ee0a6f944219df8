"""A buffer of the records of a step, in the order in which the tensors were copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from padiff.model.selection import Node
from padiff.recorder.copying import Copier
from padiff.recorder.tensor_copy import (
    OutputSite,
    PendingCopy,
    Sampled,
    SkipLog,
    SkippedTensor,
    StepCache,
    TemplateSlot,
    TensorCopy,
)
from padiff.records import LOOP, InMemory, Record, Sketched, TensorSource, TracedCall, TracedTensor
from padiff.records.recorded import Part
from padiff.records.step_schema import NO_SAMPLE, LazyRecords, Site, StepSchema, TracedSite, lazy_records, sketched


class Writes(Protocol):
    """Source of records that are not in the buffer yet."""

    def write(self) -> None:
        """Write the pending records to the buffer."""


class RecordBuffer:
    """Records of a step so far, each with the mode of the model (training or evaluation).

    Args:
        copier: copier of tensors.
        known: cache of facts from the previous steps.

    Attributes:
        copier: copier of tensors.
        known: cache of facts from the previous steps.
        left_out: log of the tensors that could not be copied.
        following: follower of a plan, whose pending records are written before any other; `None` if there is none.
    """

    def __init__(self, copier: Copier, known: StepCache | None = None) -> None:
        self.copier, self._samples = copier, copier.samples
        self.known = StepCache() if known is None else known
        #: Site and sample number of each record; if the number is `NO_SAMPLE`, the source is in `_sources` by index.
        self._sites: list[Site] = []
        self._numbers: list[int] = []
        self._sources: dict[int, TensorSource] = {}
        self.left_out = SkipLog()
        self.following: Writes | None = None

    def __len__(self) -> int:
        self._settle()
        return len(self._sites)

    def _settle(self) -> None:
        if self.following is not None:
            self.following.write()

    def since(self, first: int) -> tuple[list[Site], list[int]]:
        """Return the sites and sample numbers of the records from index ``first`` on."""
        return self._sites[first:], self._numbers[first:]

    def clear(self) -> None:
        """Remove all records."""
        # New lists, as the finished step still uses the old ones.
        self._sites, self._numbers, self._sources = [], [], {}

    def write(
        self, node: Node, stage: str, slot: str, taken: TensorCopy | SkippedTensor, call: int, training: bool = True
    ) -> None:
        """Add a record of a copied tensor, or note the tensor as left out if it could not be copied."""
        self.write_at(node.path, type(node.layer).__name__, stage, slot, taken, call, training)

    def write_at(
        self, path: str, kind: str, stage: str, slot: str, taken: TensorCopy | SkippedTensor, call: int, training: bool
    ) -> None:
        """Add a record as `write` does, for a layer given by path and class name."""
        self._settle()
        if isinstance(taken, Sampled):
            about = path, kind, stage, slot, taken.dtype, taken.shape, call, training, taken.transposed, taken.part
            self._sites.append(self.known.sites.get(about) or self.known.site(Site(*about)))  # type: ignore[call-overload]
            self._numbers.append(taken.number)
        elif isinstance(taken, SkippedTensor):
            self.left_out.add(path, taken.reason, training)
        else:
            site = Site(path, kind, stage, slot, taken.dtype, tuple(taken.shape), call, training, False, taken.part)
            self._put(site, taken.source)

    def write_sample(self, last: Site | None, at: OutputSite, stage: str, taken: Sampled) -> Site:
        """Add a record of a sample, and return its site.

        Args:
            last: site of the same record in the previous step, which is used again if it fits.
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
        """Add records of samples. The sites are objects that `StepCache.site` returned."""
        self._settle()
        self._sites += sites
        self._numbers += numbers

    def add(
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
        """Add a record of values that are copied already."""
        kind = type(node.layer).__name__
        self._put(Site(node.path, kind, stage, slot, dtype, tuple(shape), call, training, False, part), source)

    def scalar(self, stage: str, slot: str, value: float, call: int, dtype: str = "float64") -> None:
        """Add a record of a number that belongs to the whole step."""
        source = InMemory(np.asarray(value, dtype=np.float64))
        self._put(Site(LOOP, "", stage, slot, dtype, (), call, True, False), source)

    def loop(
        self,
        stage: str,
        slot: str,
        taken: TensorCopy | PendingCopy | SkippedTensor,
        call: int,
        training: bool = True,
        place: int | None = None,
    ) -> None:
        """Add a record of a tensor that belongs to the whole step, or note the tensor as left out.

        ``place`` is the index of the new record. Default: at the end.
        """
        if isinstance(taken, SkippedTensor):
            self.left_out.add(LOOP, taken.reason, training)
            return
        part = None if isinstance(taken, PendingCopy) else taken.part
        site = Site(LOOP, "", stage, slot, taken.dtype, tuple(taken.shape), call, training, False, part)
        self._put(site, taken.source, place)

    def _put(self, site: Site, source: TensorSource, place: int | None = None) -> None:
        end = len(self)
        if place is not None and place < end:
            self._sources = {at + (at >= place): stored for at, stored in self._sources.items()}
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
        """Return the records, in the order in which they were added.

        Args:
            training_only: True to leave out records of calls in evaluation mode.
            recomputed: paths of the layers whose forward was recomputed during backward.
        """
        rows = [
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
                    if stored is None
                    else stored,
                    site.dtype,
                    site.shape,
                    site.call,
                    order,
                    site.layer_type,
                    site.stage == "forward" and site.layer in recomputed,
                    site.part,
                )
                for order, (site, number, stored) in enumerate(rows)
            ]
        )

    def alike(
        self,
        traced: Sequence[TensorCopy | TemplateSlot | None],
        unknown: Mapping[int, TracedSite],
        calls: Sequence[object],
        made: Callable[[], Sequence[TracedCall]],
    ) -> tuple[LazyRecords[Record], LazyRecords[TracedTensor], Sequence[TracedCall]]:
        """Return the records of a step, and the tensors and calls of its trace.

        If the step has the same schema as the previous one, that schema is used again.

        Args:
            traced: copies of the traced tensors; `None` for a tensor without a copy.
            unknown: descriptions of the tensors without a copy, by index.
            calls: entries of the calls; they are compared with those of the previous step.
            made: function that returns the traced calls; only called if the schema is new.
        """
        before = self.known.pattern
        pattern = None if before is None else before[0]
        previous: Sequence[TracedSite] = () if pattern is None else pattern.traced
        same = len(previous) == len(traced)
        sites: list[TracedSite] = []
        numbers: list[int] = []
        others: dict[int, TensorSource] = {}
        for place, copy in enumerate(traced):
            if isinstance(copy, TemplateSlot) or (isinstance(copy, Sampled) and copy.samples is self._samples):
                dtype, shape, transposed = copy.dtype, copy.shape, copy.transposed
                numbers.append(copy.number)
            elif copy is None:
                dtype, shape, transposed = unknown[place]
                numbers.append(NO_SAMPLE)
            else:
                dtype, shape, transposed = copy.dtype, tuple(copy.shape), False
                numbers.append(NO_SAMPLE)
                others[place] = copy.source
            if same:
                # The old object if it is equal: new ones for a large model would keep the garbage collector busy.
                its_dtype, its_shape, its_transposed = site = previous[place]
                same = its_dtype == dtype and its_shape == shape and its_transposed == transposed
                sites.append(site if same else TracedSite(dtype, shape, transposed))
            else:
                sites.append(TracedSite(dtype, shape, transposed))
        same = same and before is not None and before[1] == calls
        if pattern is None or not same or not pattern.same_as(self._sites, self._numbers, numbers):
            pattern = StepSchema(self._sites, self._numbers, sites, numbers, made())
            self.known.steady = before is None
            self.known.pattern = pattern, calls
        else:
            self.known.steady = True
        return (*lazy_records(pattern, self._samples, self._sources, others), pattern.calls)
