"""The gradients that optimizers are about to step with, and copies of what layers own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from padiff.frameworks.base import Framework
from padiff.recorder.copying import LevelOf
from padiff.recorder.detail import NOTHING, SKETCH
from padiff.recorder.gathered import Kinds
from padiff.recorder.left_out import Left
from padiff.recorder.owned import Owned
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.several import Several
from padiff.recorder.taken import Sampled, Taken
from padiff.records.parts import Part


@dataclass(slots=True)
class Batch:
    """Samples of all that is owned, taken at once; by its places.

    Attributes:
        numbers: the samples.
        dtypes, shapes: of the tensors then.
        trains: which are parameters that an optimizer may change.
    """

    numbers: list[int]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    trains: list[bool]

    def kinds_at(self, places: Sequence[int]) -> Kinds:
        """Dtypes and shapes at some places."""
        dtypes, shapes = self.dtypes, self.shapes
        return [dtypes[k] for k in places], [shapes[k] for k in places]


class Copies:
    """Copies parameters and buffers, and tensors of their shapes."""

    def __init__(self, records: RecordBuffer, framework: Framework) -> None:
        self._records, self._spread = records, framework.spread

    def take(self, owned: Owned, key: int, level: str, tensor: Any = None) -> Taken | Left:
        """Copy a parameter, or a tensor of its shape; samples of matrices lie as (out, in) in both frameworks."""
        records, place = self._records, owned.index[key]
        parameter, part, transposed = owned.tensors[place], owned.parts[place], owned.transposed[place]
        given = parameter if tensor is None else tensor
        if part is not None:
            return self._take_part(given, part, level, transposed)
        if records.copier.resolved(parameter, level) != SKETCH:
            return records.copier.take(given, level)
        return records.copier.take(given, SKETCH, transposed)

    def _take_part(self, tensor: Any, part: Part, level: str, transposed: bool) -> Taken | Left:
        """Copy what this process holds of a parameter, or of a tensor like it."""
        if self._spread.is_spread(tensor):
            return self._records.copier.take(tensor, level, transposed)  # a gradient may be spread in another way
        return self._records.copier.take_part(tensor, part, level, transposed)


@dataclass(slots=True)
class Together:
    """Samples of gradients that lie as their parameters do, copied together.

    Attributes:
        several: the parameters.
        numbers: the samples.
        kinds: dtypes and shapes.
    """

    several: Several
    numbers: list[int]
    kinds: Kinds


class Gradients:
    """The gradients that optimizers are about to step with, by parameter, in the order in which they came; until what
    the steps did is recorded, too.

    Args:
        copies: how they are copied.
        levels: how much is kept of each.

    Attributes:
        together: all of them, where they were copied together; `None`: each has its own copy.
    """

    def __init__(self, records: RecordBuffer, copies: Copies, levels: LevelOf) -> None:
        self._records, self._copies, self._levels = records, copies, levels
        #: `None`: nothing is kept of it.
        self._taken: dict[int, Taken | Left | None] = {}
        self.together: Together | None = None

    def separated(self) -> list[int]:
        """Of which parameters there are gradients; from now on each has a copy of its own."""
        together, self.together = self.together, None
        if together is not None:
            samples, several = self._records.copier.samples, together.several
            for key, number, dtype, shape, transposed in zip(
                several.keys, together.numbers, *together.kinds, several.transposed
            ):
                self._taken[key] = Sampled(dtype, shape, samples, number, transposed)
        return list(self._taken)

    def keep(self, keys: Collection[int]) -> None:
        """Forget those of other parameters."""
        for key in self.separated():
            if key not in keys:
                del self._taken[key]

    def put(self, key: int, taken: Taken | Left | None) -> None:
        """Note what was copied of one already."""
        self._taken[key] = taken

    def pop(self, key: int) -> Taken | Left | None:
        """What was copied of one; it is forgotten."""
        return self._taken.pop(key)

    def consume(
        self, owned: Owned, parameters: Sequence[Any], gradients: Sequence[Any], batch: Batch | None
    ) -> set[int]:
        """Copy the gradients that an optimizer is about to step with.

        Args:
            parameters, gradients: its own; `None` where there is none.
            batch: samples of the parameters, where sketches are kept of all.

        Returns:
            The identities of parameters that are not known.
        """
        before = self.separated()
        keys, gradients = owned.apart(parameters, gradients)
        several = owned.several(keys)
        unknown: set[int] = set()
        if several is None:
            unknown = {*keys} - owned.index.keys()
            there = [key not in unknown for key in keys]
            keys, gradients = list(compress(keys, there)), list(compress(gradients, there))
            several = owned.several(keys)
        if several is not None and batch is not None:
            self.together = self._sample(several, gradients, batch)
        if self.together is not None:
            if before:
                self.separated()
            return unknown
        for key, gradient in zip(keys, gradients):
            level = SKETCH if batch is not None else self._levels[owned.owners[key].node.path, "grad"]
            self._taken[key] = self._copies.take(owned, key, level, gradient) if level != NOTHING else None
        return unknown

    def _sample(self, several: Several, gradients: Sequence[Any], batch: Batch) -> Together | None:
        """Samples of gradients that lie as their parameters do; `None` where one lies otherwise."""
        kinds, gathered = batch.kinds_at(several.places), several.gathered_before()
        if gathered is None or gathered.kinds != kinds:
            gathered = several.gathered()
        if gathered is None or gathered.kinds != kinds:
            return None
        numbers = gathered.take_like(self._records.copier, gradients)
        return None if numbers is None else Together(several, numbers, kinds)
