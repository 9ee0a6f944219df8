"""Copies of parameters and buffers, and of the gradients that optimizers use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from padiff.frameworks.base import Framework
from padiff.recorder.copying import LevelOf
from padiff.recorder.detail import NOTHING, SKETCH
from padiff.recorder.gather import Kinds
from padiff.recorder.parameter_batch import ParameterBatch
from padiff.recorder.parameter_map import ParameterMap
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.skip_log import SkippedTensor
from padiff.recorder.tensor_copy import Sampled, TensorCopy
from padiff.records.parts import Part


@dataclass(slots=True)
class Batch:
    """Samples of all parameters and buffers, copied together. Each attribute has one item per tensor.

    Attributes:
        numbers: numbers of the samples.
        dtypes, shapes: dtypes and shapes of the tensors at the time of the copy.
        trains: True for parameters that an optimizer may change.
    """

    numbers: list[int]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    trains: list[bool]

    def kinds_at(self, places: Sequence[int]) -> Kinds:
        """Return the dtypes and shapes of the tensors at some places."""
        dtypes, shapes = self.dtypes, self.shapes
        return [dtypes[k] for k in places], [shapes[k] for k in places]


class Copies:
    """Copier of parameters and buffers, and of tensors with the same shapes, such as gradients."""

    def __init__(self, records: RecordBuffer, framework: Framework) -> None:
        self._records, self._spread = records, framework.spread

    def copy(self, owned: ParameterMap, key: int, level: str, tensor: Any = None) -> TensorCopy | SkippedTensor:
        """Copy a parameter, or a tensor of the same shape.

        Samples of matrices are in (out, in) order in both frameworks.

        Args:
            owned: the parameters and buffers.
            key: key of the parameter.
            level: level of detail of the copy.
            tensor: tensor to copy in place of the parameter.
        """
        records, place = self._records, owned.index[key]
        parameter, part, transposed = owned.tensors[place], owned.parts[place], owned.transposed[place]
        source = parameter if tensor is None else tensor
        if part is not None:
            return self._take_part(source, part, level, transposed)
        if records.copier.resolved(parameter, level) != SKETCH:
            return records.copier.copy_at_level(source, level)
        return records.copier.copy_at_level(source, SKETCH, transposed)

    def _take_part(self, tensor: Any, part: Part, level: str, transposed: bool) -> TensorCopy | SkippedTensor:
        """Copy this process's part of a parameter, or of a tensor with the same layout."""
        if self._spread.is_spread(tensor):
            return self._records.copier.copy_at_level(
                tensor, level, transposed
            )  # a gradient may be spread in another way
        return self._records.copier.take_part(tensor, part, level, transposed)


@dataclass(slots=True)
class Together:
    """Samples of gradients, copied together. Each gradient has the memory layout of its parameter.

    Attributes:
        several: the parameters.
        numbers: numbers of the samples.
        kinds: dtypes and shapes of the gradients.
    """

    several: ParameterBatch
    numbers: list[int]
    kinds: Kinds


class Gradients:
    """Copies of the gradients that optimizers use, by parameter, in the order of their arrival.

    The copies are held until the updates of the parameters are recorded, too.

    Args:
        records: buffer that holds the samples.
        copies: copier of the gradients.
        levels: level of detail by layer path and stage.

    Attributes:
        together: all gradients, if they were copied together; None if each has its own copy.
    """

    def __init__(self, records: RecordBuffer, copies: Copies, levels: LevelOf) -> None:
        self._records, self._copies, self._levels = records, copies, levels
        #: Copies by key of the parameter; None if the level is ``nothing``.
        self._taken: dict[int, TensorCopy | SkippedTensor | None] = {}
        self.together: Together | None = None

    def separated(self) -> list[int]:
        """Return the keys of the parameters that have gradients; split `together` into a copy for each."""
        together, self.together = self.together, None
        if together is not None:
            samples, several = self._records.copier.samples, together.several
            for key, number, dtype, shape, transposed in zip(
                several.keys, together.numbers, *together.kinds, several.transposed
            ):
                self._taken[key] = Sampled(dtype, shape, samples, number, transposed)
        return list(self._taken)

    def keep(self, keys: Collection[int]) -> None:
        """Drop the gradients of all other parameters."""
        for key in self.separated():
            if key not in keys:
                del self._taken[key]

    def add(self, key: int, taken: TensorCopy | SkippedTensor | None) -> None:
        """Add an existing copy of a gradient."""
        self._taken[key] = taken

    def pop(self, key: int) -> TensorCopy | SkippedTensor | None:
        """Remove and return the copy of a gradient."""
        return self._taken.pop(key)

    def consume(
        self, owned: ParameterMap, parameters: Sequence[Any], gradients: Sequence[Any], batch: Batch | None
    ) -> set[int]:
        """Copy the gradients that an optimizer is about to use.

        Args:
            owned: the parameters and buffers.
            parameters, gradients: parameters and gradients of the optimizer; a gradient may be None.
            batch: samples of the parameters, if all levels are ``sketch``.

        Returns:
            The identities of parameters that no layer owns.
        """
        before = self.separated()
        keys, gradients = owned.apart(parameters, gradients)
        several = owned.several(keys)
        unowned: set[int] = set()
        if several is None:
            unowned = {*keys} - owned.index.keys()
            is_owned = [key not in unowned for key in keys]
            keys, gradients = list(compress(keys, is_owned)), list(compress(gradients, is_owned))
            several = owned.several(keys)
        if several is not None and batch is not None:
            self.together = self._sample(several, gradients, batch)
        if self.together is not None:
            if before:
                self.separated()
            return unowned
        for key, gradient in zip(keys, gradients):
            level = SKETCH if batch is not None else self._levels[owned.owners[key].node.path, "grad"]
            self._taken[key] = self._copies.copy(owned, key, level, gradient) if level != NOTHING else None
        return unowned

    def _sample(self, several: ParameterBatch, gradients: Sequence[Any], batch: Batch) -> Together | None:
        """Copy the gradients together, or return None if the layout of a gradient differs from its parameter's."""
        kinds, gathered = batch.kinds_at(several.places), several.gathered_before()
        if gathered is None or gathered.kinds != kinds:
            gathered = several.gathered()
        if gathered is None or gathered.kinds != kinds:
            return None
        numbers = gathered.take_like(self._records.copier, gradients)
        return None if numbers is None else Together(several, numbers, kinds)
