"""The gradients that optimizers are about to step with, and copies of what layers own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.frameworks.base import Framework
from padiff.recorder.copying import LevelOf
from padiff.recorder.detail import NOTHING, SKETCH
from padiff.recorder.gathered import Kinds
from padiff.recorder.left_out import Left
from padiff.recorder.owned import Owned
from padiff.recorder.record_buffer import RecordBuffer
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
        if tensor is not None:
            return records.copier.take(tensor, SKETCH, transposed)
        gathered = owned.gathered([place])
        numbers = None if gathered is None else gathered.take(records.copier)
        if gathered is None or numbers is None:
            return records.copier.take(parameter, SKETCH, transposed)
        lies = gathered.lies[0]
        return Sampled(lies.dtype, lies.shape, records.copier.samples, numbers[0], transposed)

    def _take_part(self, tensor: Any, part: Part, level: str, transposed: bool) -> Taken | Left:
        """Copy what this process holds of a parameter, or of a tensor like it."""
        if self._spread.is_spread(tensor):
            return self._records.copier.take(tensor, level, transposed)  # a gradient may be spread in another way
        return self._records.copier.take_part(tensor, part, level, transposed)


class Gradients:
    """The gradients that optimizers are about to step with, by parameter, in the order in which they came; until what
    the steps did is recorded, too.

    Args:
        copies: how they are copied.
        levels: how much is kept of each.
    """

    def __init__(self, records: RecordBuffer, framework: Framework, copies: Copies, levels: LevelOf) -> None:
        self._records, self._tensors, self._copies, self._levels = records, framework.tensors, copies, levels
        #: A number is that of a sample of a gradient that has its parameter's dtype and shape, as the batch has them;
        #: `None`: nothing is kept of it.
        self._taken: dict[int, Taken | Left | int | None] = {}
        self._batch: Batch | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(self._taken)

    def keep(self, keys: Collection[int]) -> None:
        """Forget those of other parameters."""
        self._taken = {key: taken for key, taken in self._taken.items() if key in keys}

    def put(self, key: int, taken: Taken | Left | None) -> None:
        """Note what was copied of one already."""
        self._taken[key] = taken

    def forget(self, keys: Iterable[int]) -> None:
        """Forget these."""
        for key in keys:
            del self._taken[key]

    def pop(self, key: int, owned: Owned) -> Taken | Left | None:
        """What was copied of one; it is forgotten."""
        taken = self._taken.pop(key)
        if not isinstance(taken, int):
            return taken
        assert self._batch is not None
        place = owned.index[key]
        dtype, shape = self._batch.dtypes[place], self._batch.shapes[place]
        return Sampled(dtype, shape, self._records.copier.samples, taken, owned.transposed[place])

    def alike(self, keys: Iterable[int], batch: Batch) -> list[int] | None:
        """The samples of these, if all have their parameters' dtypes and shapes, as the batch has them."""
        if batch is not self._batch:
            return None
        taken = [self._taken[key] for key in keys]
        numbers = [number for number in taken if isinstance(number, int)]
        return numbers if len(numbers) == len(taken) else None

    def consume(self, owned: Owned, pairs: Iterable[tuple[Any, Any]], batch: Batch | None) -> set[int]:
        """Copy the gradients that an optimizer is about to step with.

        Args:
            pairs: its parameters with their gradients.
            batch: samples of the parameters, where sketches are kept of all.

        Returns:
            The identities of parameters that are not known.
        """
        if self._batch is not batch:
            self._taken = {key: self.pop(key, owned) for key in list(self._taken)}
            self._batch = batch
        index = owned.index
        given = [pair for pair in owned.apart(pairs) if pair[1] is not None]
        keys = [parameter if isinstance(parameter, int) else id(parameter) for parameter, _ in given]
        unknown = {*keys} - index.keys()
        if unknown:
            given = [pair for key, pair in zip(keys, given) if key in index]
            keys = [key for key in keys if key in index]
        gradients = [gradient for _, gradient in given]
        numbers = self._sample(owned, tuple([index[key] for key in keys]), gradients) if batch is not None else None
        if numbers is not None:
            self._taken.update(zip(keys, numbers))
            return unknown
        for key, gradient in zip(keys, gradients):
            level = SKETCH if batch is not None else self._levels[owned.owners[key].node.path, "grad"]
            self._taken[key] = self._copies.take(owned, key, level, gradient) if level != NOTHING else None
        return unknown

    def _sample(self, owned: Owned, places: tuple[int, ...], gradients: Sequence[Any]) -> list[int] | None:
        """Samples of gradients that lie as the parameters at these places do; `None` where one lies otherwise."""
        batch, gathered = self._batch, owned.gathered_before(places)
        if batch is None or gathered is None:
            return None
        if gathered.kinds != batch.kinds_at(places):
            return None
        return gathered.take_like(self._records.copier, gradients)
