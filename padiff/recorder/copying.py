"""Copies of tensors as they are now: all of a tensor, or a sample of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from padiff.dump.spool import LEAST
from padiff.frameworks.base import Framework
from padiff.frameworks.values import UncopiedError
from padiff.recorder.detail import FULL, SKETCH, SMALL, WITHIN
from padiff.recorder.left_out import Left
from padiff.recorder.taken import Awaited, Difference, OnItsWay, Sampled, Taken, Transfer, Whole
from padiff.records import Storable, TensorSource
from padiff.records.parts import PARTIAL, Part
from padiff.sketches.cuts import Cut, cut_of
from padiff.sketches.parts import own_of
from padiff.sketches.rows import Layout
from padiff.sketches.samples import Empty, Samples
from padiff.sketches.sketch import ELEMENTS
from padiff.system.guard import reraise_from_signal_handler

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


class _Copying:
    """Whether a tensor is being copied just now, by whichever recorder: what that calls is not the model's."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = False


# Not an attribute of a class: to set one has Python look up all attributes of its objects anew.
COPYING = _Copying()


@contextmanager
def own_calls() -> Iterator[None]:
    """What is called inside is padiff's own, and no call of the model's."""
    before, COPYING.now = COPYING.now, True
    try:
        yield
    finally:
        COPYING.now = before


class Copier:
    """Copies the tensors of one step. Whatever can't be copied is said (`Left`): the training goes on.

    Args:
        framework: whose tensors they are.
        empty: where memory for copies comes from.
        samples: what keeps the samples that sketches are made of.
        room: bytes of small tensors that are kept where sketches are kept of others.
        keep: writes values into the step's file at once, and gives what was written; `None`: these not.

    Attributes:
        within: bytes that are still kept in full of tensors of the level `WITHIN`.
    """

    def __init__(
        self,
        framework: Framework,
        empty: Empty = np.empty,
        samples: Samples | None = None,
        room: float = SMALL_BYTES,
        keep: Callable[[Storable], np.ndarray | None] | None = None,
    ) -> None:
        self._tensors, self._spread = framework.tensors, framework.spread
        self._empty, self._room, self.within = empty, room, math.inf
        self._granted = room, math.inf
        self.samples = Samples(bring=framework.tensors.fetch) if samples is None else samples
        self._keep = keep
        #: What was written into the step's file, as long as it lives.
        self._kept: dict[int, weakref.ref[Any]] = {}
        self._later: list[Awaited] = []

    def grant(self, within: float) -> None:
        """Set the bytes that tensors of the level `WITHIN` may take."""
        self.within, self._granted = within, (self._room, within)

    def refund(self) -> None:
        """Give back what the step has spent so far: it is not kept."""
        self._room, self.within = self._granted

    def copy(self, tensor: Any) -> np.ndarray:
        """The tensor's values as they are now."""
        COPYING.now = True
        try:
            return self._tensors.copy(tensor, self._empty)
        finally:
            COPYING.now = False

    def resolved(self, tensor: Any, level: str) -> str:
        """`FULL` or `SKETCH` where that depends on the tensor's size, and on what was kept so far."""
        if level != SMALL:
            return level
        try:
            small = self._room > 0 and math.prod(self._tensors.shape(tensor)) <= SMALL_ELEMENTS
        except Exception as error:  # of a kind that has no shape; `take` says what to make of it
            reraise_from_signal_handler(error)
            small = False
        return FULL if small else SKETCH

    def _fits(self, tensor: Any) -> bool:
        """Whether there is room for all of a tensor."""
        try:
            return math.prod(self._tensors.shape(tensor)) * int(tensor.element_size()) <= self.within
        except Exception as error:  # of a kind that has no shape; copying it says what to make of it
            reraise_from_signal_handler(error)
            return True

    def take(self, tensor: Any, level: str, transposed: bool = False) -> Taken | Left:
        """The tensor's values as they are now, or a sample of them (of the transposed), as the level asks for."""
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
                array = self._whole(tensor)
                self._room -= array.nbytes
                return Whole(tensors.dtype(tensor), array.shape, array)
            if level == WITHIN:
                if self._fits(tensor):
                    array = self._whole(tensor)
                    self.within -= array.nbytes
                    return Whole(tensors.dtype(tensor), array.shape, array)
                self.within = 0.0  # what comes later does not get what this one has not
            if level == FULL:
                array = self._whole(tensor)
                return Whole(tensors.dtype(tensor), array.shape, array)
            return self._sampled(tensor, transposed)
        except Exception as error:
            # There are more kinds of tensors than anybody knows: whatever goes wrong, the training goes on.
            return Left.because(error)
        finally:
            COPYING.now = False

    def _whole(self, tensor: Any) -> np.ndarray:
        """A copy of all of a tensor, where `keep` has it if that takes it.

        Not what was copied in this step before: what an optimizer made of a parameter is looked at for what has
        changed, and is not stored itself.
        """
        tensors, keep = self._tensors, self._keep
        if keep is None or math.prod(tensors.shape(tensor)) * int(tensor.element_size()) < LEAST:
            return tensors.copy(tensor, self._empty)
        known = self._kept.get(id(tensor))
        values = None if known is not None and known() is tensor else tensors.live(tensor)
        kept = None if values is None else keep(values)
        if kept is None:
            return tensors.copy(tensor, self._empty)
        self._kept[id(tensor)] = weakref.ref(tensor)
        return kept

    def less(self, after: Taken, before: Taken) -> TensorSource:
        """Where a record finds the values of a tensor less those of another one; they go where `keep` has copies."""
        source = after.less(before)
        if self._keep is None or not isinstance(source, Difference) or source.after.nbytes < LEAST:
            return source
        return replace(source, written=self._keep(source.to_store()))

    def _sampled(self, tensor: Any, transposed: bool) -> Sampled:
        """A sample of a tensor that is here as a whole."""
        tensors, samples = self._tensors, self.samples
        cut = tensors.cut(tensor, transposed)
        if cut is not None:
            return Sampled(cut.dtype, cut.shape, samples, samples.add(cut), transposed)
        dtype, values = tensors.dtype(tensor), tensors.sample(tensor, transposed)
        number = samples.add(cut_of(values)) if isinstance(values, np.ndarray) else samples.add_elsewhere(values)
        return Sampled(dtype, tensors.shape(tensor), samples, number, transposed)

    def fill(self, number: int, tensor: Any, dtype: str, shape: tuple[int, ...]) -> bool:
        """Copy a sample that has a number already (`Samples.lay`), if the tensor is of this dtype and shape.

        Whether that was done.
        """
        tensors = self._tensors
        COPYING.now = True
        try:
            if self._spread.is_spread(tensor) or (tensors.dtype(tensor), tensors.shape(tensor)) != (dtype, shape):
                return False
            taken = tensors.cut(tensor)
            if taken is None:
                values = tensors.sample(tensor)
                taken = cut_of(values) if isinstance(values, np.ndarray) else values
            self.samples.fill(number, taken)
            return True
        except MemoryError:
            raise
        except Exception as error:  # copied without a number it is said what that means
            reraise_from_signal_handler(error)
            return False
        finally:
            COPYING.now = False

    def take_part(self, tensor: Any, part: Part, level: str, transposed: bool = False) -> Taken | Left:
        """`take`, of a part of a tensor that is spread over processes; ``transposed`` is said of the whole."""
        COPYING.now = True
        try:
            return self._take_part(tensor, part, level, transposed)
        except Exception as error:
            return Left.because(error)
        finally:
            COPYING.now = False

    def _take_part(self, tensor: Any, part: Part, level: str, transposed: bool) -> Taken:
        tensors = self._tensors
        name, shape = tensors.dtype(tensor), tensors.shape(tensor)
        if not part.fits(shape):
            raise UncopiedError(f"a part {shape} at {part.offset} does not lie in a tensor {part.shape}")
        if level == SMALL:
            # By the whole's size: all processes have to keep the same of a tensor.
            level = FULL if part.size <= SMALL_ELEMENTS else SKETCH
        if level == WITHIN:
            level = FULL if self._fits(tensor) else SKETCH
            self.within = self.within - math.prod(shape) * int(tensor.element_size()) if level == FULL else 0.0
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
        COPYING.now = True
        try:
            shape = self._tensors.shape(tensor)
            with self._tensors.without_grad():
                source = Awaited(tensor.detach().reshape([-1]).clone(), shape)
            self._later.append(source)
            return OnItsWay(self._tensors.dtype(tensor), shape, source)
        except Exception as error:
            return Left.because(error)
        finally:
            COPYING.now = False

    def sample(self, layout: Layout, cuts: Sequence[Cut | None], addresses: np.ndarray) -> list[int] | None:
        """Samples that follow a layout (`padiff.sketches.rows.Rows.put_all`): their numbers. `None` where that can't be
        done.
        """
        COPYING.now = True
        try:
            return self.samples.add_all(layout, cuts, addresses)
        except MemoryError:
            raise
        except Exception as error:  # one by one it is said which
            reraise_from_signal_handler(error)
            return None
        finally:
            COPYING.now = False

    def join(self, pieces: Callable[[], Sequence[Sequence[Any]]]) -> list[int] | None:
        """Samples of tensors on another device, each given by its pieces: their numbers. `None` where that can't be
        done.
        """
        COPYING.now = True
        try:
            with self._tensors.without_grad():
                return [self.samples.add_elsewhere(sample) for sample in self._tensors.join(pieces())]
        except Exception as error:  # one by one it is said which
            reraise_from_signal_handler(error)
            return None
        finally:
            COPYING.now = False

    def fetch(self) -> None:
        """Begin to bring over what is still on another device: all of it at once."""
        self.samples.fetch()
        if self._later:
            Transfer(list(self._later), self._tensors)
            self._later.clear()
