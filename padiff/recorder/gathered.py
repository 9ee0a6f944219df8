"""Samples of several tensors that are copied together: from memory of the CPU, or on another device."""

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
    """Where the sample of a tensor on another device lies.

    Attributes:
        dtype, shape, itemsize: of the tensor.
        views: of it, which one after the other are its sample; without any it has to be gathered for itself.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    views: Sequence[Any]


#: Where a sample lies, as far as it stays there.
Lies = Cut | Pieces


#: Dtypes and shapes of several tensors.
Kinds = tuple[list[str], list[tuple[int, ...]]]


def _kinds(lies: Sequence[Lies]) -> Kinds:
    return [each.dtype for each in lies], [each.shape for each in lies]


class Gathered(Protocol):
    """Where the samples of several tensors lie."""

    @property
    def lies(self) -> Sequence[Lies]:
        """Where each lies."""

    @property
    def kinds(self) -> Kinds:
        """Their dtypes and shapes."""

    def take(self, copier: Copier) -> list[int] | None:
        """Copy them; returns their numbers. `None` where that can't be done."""

    def take_like(self, copier: Copier, tensors: Sequence[Any]) -> list[int] | None:
        """Copy those of other tensors, of the same dtypes and shapes. `None` where one of them is another."""


class Here:
    """Samples in plain memory of the CPU. See `Gathered`."""

    def __init__(self, cuts: Sequence[Cut], tensors: Tensors, transposed: Sequence[bool]) -> None:
        self.lies, self.kinds = cuts, _kinds(cuts)
        self._tensors, self._transposed = tensors, transposed
        self._layout, self._addresses = Layout(cuts), np.array([cut.address for cut in cuts], np.int64)
        self._locate = tensors.locator(self._layout.forms)

    def take(self, copier: Copier) -> list[int] | None:
        return copier.sample(self._layout, self.lies, self._addresses)

    def take_like(self, copier: Copier, tensors: Sequence[Any]) -> list[int] | None:
        layout, cuts = self._layout, self.lies
        found = self._locate([tensors[k] for k in layout.plain])
        if found is None:
            return None
        addresses = np.zeros(len(cuts), np.int64)
        addresses[layout.plain] = found
        cuts = list(cuts)
        for k in layout.others:
            cut = self._tensors.cut(tensors[k], self._transposed[k])
            if cut is None or cut.shape != cuts[k].shape or cut.dtype != cuts[k].dtype:
                return None
            cuts[k] = cut
        return copier.sample(layout, cuts, addresses)


class Elsewhere:
    """Samples on another device: of all small tensors, and of those that stay where they are, one copy is made there.

    Args:
        given: the tensors.
    """

    def __init__(
        self, lies: Sequence[Pieces], tensors: Tensors, transposed: Sequence[bool], given: Sequence[Any]
    ) -> None:
        self.lies, self.kinds = lies, _kinds(lies)
        self._tensors, self._transposed, self._given = tensors, transposed, given

    def take(self, copier: Copier) -> list[int] | None:
        sample, transposed, given = self._tensors.sample, self._transposed, self._given
        return copier.join(
            lambda: [lies.views or [sample(given[k], transposed[k])] for k, lies in enumerate(self.lies)]
        )

    def take_like(self, copier: Copier, tensors: Sequence[Any]) -> list[int] | None:
        own = self._tensors
        for tensor, lies in zip(tensors, self.lies):
            if own.dtype(tensor) != lies.dtype or own.shape(tensor) != lies.shape or own.device(tensor) == "cpu":
                return None

        def pieces(place: int) -> Sequence[Any]:
            # To cut a large one into views takes longer than to gather it.
            tensor, transposed = tensors[place], self._transposed[place]
            views = own.pieces(tensor, transposed) if tensor.numel() <= ELEMENTS else ()
            return views or [own.sample(tensor, transposed)]

        return copier.join(lambda: [pieces(place) for place in range(len(tensors))])


def gathered_of(
    lies: Sequence[Lies | None], tensors: Tensors, transposed: Sequence[bool], given: Sequence[Any]
) -> Gathered | None:
    """The samples of tensors that lie there; `None` where that is not known of one, or they are in several places.

    Args:
        transposed: whether each is looked at transposed.
        given: the tensors.
    """
    cuts = [each for each in lies if isinstance(each, Cut)]
    if len(cuts) == len(lies):
        return Here(cuts, tensors, transposed)
    pieces = [each for each in lies if isinstance(each, Pieces)]
    return Elsewhere(pieces, tensors, transposed, given) if len(pieces) == len(lies) else None
