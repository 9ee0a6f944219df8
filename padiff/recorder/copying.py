"""Copying of tensors at a level of detail: all values, or a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from padiff.frameworks.base import Framework, Tensors, UncopiedError
from padiff.recorder.options import FULL, SKETCH, SMALL, WITHIN
from padiff.recorder.tensor_copy import (
    PendingCopy,
    PendingValues,
    Sampled,
    SkippedTensor,
    TensorCopy,
    Transfer,
    Whole,
)
from padiff.records.recorded import PARTIAL, Part
from padiff.sketches.samples import Layout, Samples
from padiff.sketches.sketch import ELEMENTS, Cut, cut_of, own_of
from padiff.system.guard import reraise_from_signal_handler

#: Largest number of elements of a small tensor. A sketch reads each of these, so a full copy costs no more. Measured on
#: 107 faults in small nets: 97 are proven if the first step has such tensors in full, 45 if the step has sketches.
SMALL_ELEMENTS = ELEMENTS
#: Bytes of small tensors kept in full per step, in the order in which they come. Chosen: some 2,000 small tensors of
#: the largest size (a ResNet-18 has 0.1 MB of small tensors).
SMALL_BYTES = 32 << 20
#: Share of a run's size limit that these small tensors may take: the first step is kept as long as the run.
SMALL_SHARE = 1 / 8


class LevelOf(Protocol):
    """Level of detail by layer path and stage."""

    def __getitem__(self, key: tuple[str, str], /) -> str: ...


class _Everything:
    def __getitem__(self, key: tuple[str, str], /) -> str:
        return FULL


#: Full tensors everywhere.
EVERYTHING: LevelOf = _Everything()


class _Copying:
    """Flag: True while any recorder copies a tensor, as functions called then are not the model's."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = False


# Not a class attribute: setting one invalidates Python's attribute caches for the class.
COPYING = _Copying()


@contextmanager
def own_calls() -> Iterator[None]:
    """Mark functions called inside of a ``with`` block as padiff's own, not the model's."""
    before, COPYING.now = COPYING.now, True
    try:
        yield
    finally:
        COPYING.now = before


class Copier:
    """Copier of the tensors of one step. A tensor that can't be copied becomes a `SkippedTensor` and never stops the
    training.

    Args:
        framework: framework of the tensors.
        samples: store of the samples from which sketches are made.
        room: bytes of small tensors that are kept in full at the level `SMALL`.

    Attributes:
        within: bytes that tensors of the level `WITHIN` may still take in full.
    """

    def __init__(
        self,
        framework: Framework,
        samples: Samples | None = None,
        room: float = SMALL_BYTES,
    ) -> None:
        self._tensors, self._spread = framework.tensors, framework.spread
        self._room, self.within = room, math.inf
        self._granted = room, math.inf
        self.samples = Samples(bring=framework.tensors.fetch) if samples is None else samples
        self._later: list[PendingValues] = []

    def grant(self, within: float) -> None:
        """Set the number of bytes that tensors of the level `WITHIN` may take."""
        self.within, self._granted = within, (self._room, within)

    def refund(self) -> None:
        """Reset both byte budgets: the copies so far are not going to be kept."""
        self._room, self.within = self._granted

    def copy(self, tensor: Any) -> np.ndarray:
        """Return a copy of the tensor's values."""
        COPYING.now = True
        try:
            return self._tensors.copy(tensor)
        finally:
            COPYING.now = False

    def resolved(self, tensor: Any, level: str) -> str:
        """Return the level, with `SMALL` replaced by `FULL` or `SKETCH` according to size and remaining bytes."""
        if level != SMALL:
            return level
        try:
            small = self._room > 0 and math.prod(self._tensors.shape(tensor)) <= SMALL_ELEMENTS
        except Exception as error:  # a tensor without a shape; `take` handles the error
            reraise_from_signal_handler(error)
            small = False
        return FULL if small else SKETCH

    def _fits(self, tensor: Any) -> bool:
        """Return True if a tensor's bytes fit into what the level `WITHIN` may still take."""
        try:
            return math.prod(self._tensors.shape(tensor)) * int(tensor.element_size()) <= self.within
        except Exception as error:  # a tensor without a shape; copying the tensor reports the error
            reraise_from_signal_handler(error)
            return True

    def copy_at_level(self, tensor: Any, level: str, transposed: bool = False) -> TensorCopy | SkippedTensor:
        """Return a copy of the tensor's values, or a sample of these, according to the level.

        Args:
            transposed: True to sample the transposed tensor.
        """
        tensors = self._tensors
        COPYING.now = True
        try:
            if self._spread.is_spread(tensor):
                tensor, part = self._spread.local(tensor)
                if part is not None:
                    return self._take_part(tensor, part, level, transposed)
            if level == SKETCH:
                return self._sampled(tensor, transposed)
            if level == SMALL and self.resolved(tensor, level) == FULL:
                array = tensors.copy(tensor)
                self._room -= array.nbytes
                return Whole(tensors.dtype(tensor), array.shape, array)
            if level == WITHIN:
                if self._fits(tensor):
                    array = tensors.copy(tensor)
                    self.within -= array.nbytes
                    return Whole(tensors.dtype(tensor), array.shape, array)
                self.within = 0.0  # a later, smaller tensor must not be kept in full instead
            if level == FULL:
                array = tensors.copy(tensor)
                return Whole(tensors.dtype(tensor), array.shape, array)
            return self._sampled(tensor, transposed)
        except Exception as error:
            # There are unknown kinds of tensors: whatever goes wrong, the training goes on.
            return SkippedTensor.because(error)
        finally:
            COPYING.now = False

    def _sampled(self, tensor: Any, transposed: bool) -> Sampled:
        """Return a sample of a tensor that is not spread over processes."""
        tensors, samples = self._tensors, self.samples
        cut = tensors.cut(tensor, transposed)
        if cut is not None:
            return Sampled(cut.dtype, cut.shape, samples, samples.add(cut), transposed)
        dtype, values = tensors.dtype(tensor), tensors.sample(tensor, transposed)
        number = samples.add(cut_of(values)) if isinstance(values, np.ndarray) else samples.add_elsewhere(values)
        return Sampled(dtype, tensors.shape(tensor), samples, number, transposed)

    def fill(self, number: int, tensor: Any, dtype: str, shape: tuple[int, ...]) -> bool:
        """Copy a sample into the row reserved by `Samples.lay`.

        Returns:
            True if the sample was copied, False if the tensor has another dtype or shape or could not be copied.
        """
        tensors = self._tensors
        COPYING.now = True
        try:
            if self._spread.is_spread(tensor) or (tensors.dtype(tensor), tensors.shape(tensor)) != (dtype, shape):
                return False
            sample = tensors.cut(tensor)
            if sample is None:
                values = tensors.sample(tensor)
                sample = cut_of(values) if isinstance(values, np.ndarray) else values
            self.samples.fill(number, sample)
            return True
        except MemoryError:
            raise
        except Exception as error:  # `take` reports the error
            reraise_from_signal_handler(error)
            return False
        finally:
            COPYING.now = False

    def take_part(self, tensor: Any, part: Part, level: str, transposed: bool = False) -> TensorCopy | SkippedTensor:
        """Copy this process's part of a tensor that is spread over processes; see `take`.

        Args:
            part: position of the part in the whole tensor.
            transposed: True to sample the whole tensor transposed.
        """
        COPYING.now = True
        try:
            return self._take_part(tensor, part, level, transposed)
        except Exception as error:
            return SkippedTensor.because(error)
        finally:
            COPYING.now = False

    def _take_part(self, tensor: Any, part: Part, level: str, transposed: bool) -> TensorCopy:
        tensors = self._tensors
        name, shape = tensors.dtype(tensor), tensors.shape(tensor)
        if not part.fits(shape):
            raise UncopiedError(f"a part {shape} at {part.offset} does not lie in a tensor {part.shape}")
        if level == SMALL:
            # By the size of the whole tensor: all processes have to use the same level.
            level = FULL if part.size <= SMALL_ELEMENTS else SKETCH
        if level == WITHIN:
            level = FULL if self._fits(tensor) else SKETCH
            self.within = self.within - math.prod(shape) * int(tensor.element_size()) if level == FULL else 0.0
        # A sketch of a sum can't be computed from the sketches of its terms: only projections add up.
        if level == FULL or part.kind == PARTIAL or name.startswith("complex"):
            array = tensors.copy(tensor)
            return Whole(name, array.shape, array, part=part)
        share = own_of(part.shape, part.offset, shape, transposed)
        values = tensors.elements(tensor, share.elements)
        return Sampled(name, shape, self.samples, self.samples.add_part(values, share), transposed, part=part)

    def take_later(self, tensor: Any) -> TensorCopy | PendingCopy | SkippedTensor:
        """Return a full copy of a tensor; from another device the values are fetched at the end of the step."""
        if self._tensors.device(tensor) == "cpu" or self._spread.is_spread(tensor):
            return self.copy_at_level(tensor, FULL)
        COPYING.now = True
        try:
            shape = self._tensors.shape(tensor)
            with self._tensors.without_grad():
                source = PendingValues(tensor.detach().reshape([-1]).clone(), shape, self.copy)
            self._later.append(source)
            return PendingCopy(self._tensors.dtype(tensor), shape, source)
        except Exception as error:
            return SkippedTensor.because(error)
        finally:
            COPYING.now = False

    def sample(self, layout: Layout, cuts: Sequence[Cut | None], addresses: np.ndarray) -> list[int] | None:
        """Copy the samples of several tensors with one layout (`padiff.sketches.samples.Rows.put_all`).

        Returns:
            The numbers of the samples, or None if the samples can't be copied together.
        """
        COPYING.now = True
        try:
            return self.samples.add_all(layout, cuts, addresses)
        except MemoryError:
            raise
        except Exception as error:  # copying the tensors one by one reports which one fails
            reraise_from_signal_handler(error)
            return None
        finally:
            COPYING.now = False

    def join(self, pieces: Callable[[], Sequence[Sequence[Any]]]) -> list[int] | None:
        """Copy the samples of several tensors on another device, each the concatenation of its pieces.

        Returns:
            The numbers of the samples, or None if the samples can't be copied together.
        """
        COPYING.now = True
        try:
            with self._tensors.without_grad():
                return [self.samples.add_elsewhere(sample) for sample in self._tensors.join(pieces())]
        except Exception as error:  # copying the tensors one by one reports which one fails
            reraise_from_signal_handler(error)
            return None
        finally:
            COPYING.now = False

    def fetch(self) -> None:
        """Start one transfer of all copies that are still on another device."""
        self.samples.fetch()
        if self._later:
            Transfer(list(self._later), self._tensors)
            self._later.clear()


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
