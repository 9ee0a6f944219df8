"""Joint copying of the samples of several tensors, from CPU memory or on another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from padiff.frameworks.values import Tensors
from padiff.recorder.copying import Copier
from padiff.sketches.cuts import Cut
from padiff.sketches.rows import Layout
from padiff.sketches.sketch import ELEMENTS


class Pieces(NamedTuple):
    """Location of the sample of a tensor on another device.

    Attributes:
        dtype, shape, itemsize: dtype, shape and bytes per element of the tensor.
        views: views of the tensor whose concatenation is the sample; empty if the sample has to be gathered separately.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    views: Sequence[Any]


#: Location of a sample in memory that stays in place.
Lies = Cut | Pieces


#: Dtypes and shapes of several tensors.
Kinds = tuple[list[str], list[tuple[int, ...]]]


def _kinds(lies: Sequence[Lies]) -> Kinds:
    return [each.dtype for each in lies], [each.shape for each in lies]


class Gather(Protocol):
    """Locations of the samples of several tensors."""

    @property
    def lies(self) -> Sequence[Lies]:
        """Return the location of each sample."""

    @property
    def kinds(self) -> Kinds:
        """Return the dtypes and shapes of the tensors."""

    def copy(self, copier: Copier) -> list[int] | None:
        """Copy the samples; return their numbers, or None if the samples can't be copied together."""

    def take_like(self, copier: Copier, tensors: Sequence[Any]) -> list[int] | None:
        """Copy the samples of other tensors with the same dtypes and shapes.

        Returns:
            The numbers of the samples, or None if a dtype, a shape or a device differs or the samples can't be copied
            together.
        """


class HostGather:
    """Samples in plain CPU memory (see `Gather`)."""

    def __init__(self, cuts: Sequence[Cut], tensors: Tensors, transposed: Sequence[bool]) -> None:
        self.lies, self.kinds = cuts, _kinds(cuts)
        self._tensors, self._transposed = tensors, transposed
        self._layout, self._addresses = Layout(cuts), np.array([cut.address for cut in cuts], np.int64)
        self._locate = tensors.locator(self._layout.forms)

    def copy(self, copier: Copier) -> list[int] | None:
        return copier.sample(self._layout, self.lies, self._addresses)

    def take_like(self, copier: Copier, tensors: Sequence[Any]) -> list[int] | None:
        layout, cuts = self._layout, self.lies
        starts = self._locate([tensors[k] for k in layout.plain])
        if starts is None:
            return None
        addresses = np.zeros(len(cuts), np.int64)
        addresses[layout.plain] = starts
        cuts = list(cuts)
        for k in layout.others:
            cut = self._tensors.cut(tensors[k], self._transposed[k])
            if cut is None or cut.shape != cuts[k].shape or cut.dtype != cuts[k].dtype:
                return None
            cuts[k] = cut
        return copier.sample(layout, cuts, addresses)


class DeviceGather:
    """Samples on another device, which are concatenated there before the transfer (see `Gather`).

    Args:
        lies: locations of the samples.
        tensors: tensor operations of the framework.
        transposed: for each tensor, True to sample the transposed tensor.
        given: the tensors.
    """

    def __init__(
        self, lies: Sequence[Pieces], tensors: Tensors, transposed: Sequence[bool], given: Sequence[Any]
    ) -> None:
        self.lies, self.kinds = lies, _kinds(lies)
        self._tensors, self._transposed, self._given = tensors, transposed, given

    def copy(self, copier: Copier) -> list[int] | None:
        sample, transposed, sources = self._tensors.sample, self._transposed, self._given
        return copier.join(
            lambda: [lies.views or [sample(sources[k], transposed[k])] for k, lies in enumerate(self.lies)]
        )

    def take_like(self, copier: Copier, tensors: Sequence[Any]) -> list[int] | None:
        ops = self._tensors
        for tensor, lies in zip(tensors, self.lies):
            if ops.dtype(tensor) != lies.dtype or ops.shape(tensor) != lies.shape or ops.device(tensor) == "cpu":
                return None

        def pieces(place: int) -> Sequence[Any]:
            # Gathering a large sample is faster than cutting the tensor into views.
            tensor, transposed = tensors[place], self._transposed[place]
            views = ops.pieces(tensor, transposed) if tensor.numel() <= ELEMENTS else ()
            return views or [ops.sample(tensor, transposed)]

        return copier.join(lambda: [pieces(place) for place in range(len(tensors))])


def gather_of(
    lies: Sequence[Lies | None], tensors: Tensors, transposed: Sequence[bool], given: Sequence[Any]
) -> Gather | None:
    """Return a joint copier of the samples of several tensors, or None if the samples can't be copied together.

    Samples can be copied together if all locations are known, and all are in CPU memory or all on another device.

    Args:
        lies: location of each sample; None if unknown.
        tensors: tensor operations of the framework.
        transposed: for each tensor, True to sample the transposed tensor.
        given: the tensors.
    """
    cuts = [each for each in lies if isinstance(each, Cut)]
    if len(cuts) == len(lies):
        return HostGather(cuts, tensors, transposed)
    pieces = [each for each in lies if isinstance(each, Pieces)]
    return DeviceGather(pieces, tensors, transposed, given) if len(pieces) == len(lies) else None
