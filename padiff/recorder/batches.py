"""What the micro-batches of a step were: what the model was called with, and what went into the loss besides."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.frameworks.base import Framework
from padiff.frameworks.losses import LossCall
from padiff.records import InMemory, TensorSource
from padiff.records.pack import Batch, Unkept

_DEEPEST = 16
# Bytes of numbers of numpy's kinds that a pack holds: none is longer than float64.
_WIDEST = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
# Of the largest whole number that others than Python read from a pack.
_BITS = 63
_PLAIN = (bool, int, float, str, type(None))


@dataclass
class _Given:
    """What somebody said that a batch is.

    Attributes:
        inputs: what the model is called with, by position and by name; `None`: not said.
        labels: what the loss takes besides; `None`: not said.
        whole: the batch as its host has it.
        parts: its tensors, with their copies.
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    labels: tuple[Any, ...] | None = None
    whole: Any = None
    parts: list[tuple[weakref.ref[Any], TensorSource]] = field(default_factory=list)


@dataclass
class _Called:
    """A call of the whole model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Batches:
    """Collects the micro-batches of one step.

    Args:
        copy: copies a tensor's values.
    """

    def __init__(self, framework: Framework, copy: Callable[[Any], np.ndarray]) -> None:
        self._tensors, self._copy = framework.tensors, copy
        self._given: list[_Given] = []
        #: Calls of the model, by whether it was in training mode.
        self._calls: dict[bool, list[_Called]] = {True: [], False: []}
        #: By mode and micro-batch, what went into loss functions outside of the model besides what is learned.
        self._labels: dict[tuple[bool, int], list[Any]] = {}
        self._copies: dict[tuple[int, int], tuple[weakref.ref[Any], TensorSource]] = {}

    @property
    def number(self) -> int:
        """Which micro-batch is under way."""
        return max(len(self._given), len(self._called), 1) - 1

    @property
    def _called(self) -> list[_Called]:
        """The model's calls; those in evaluation mode count where there are no others."""
        return self._calls[True] or self._calls[False]

    def give(self, inputs: Any, labels: Any) -> None:
        """Somebody says what a batch is: the model's inputs, and labels (`None`: not said)."""
        args = (*inputs,) if isinstance(inputs, (tuple, list)) else () if isinstance(inputs, Mapping) else (inputs,)
        named = self._kept(inputs) if isinstance(inputs, Mapping) else {}
        several = labels if isinstance(labels, (tuple, list)) else (labels,)
        kept = None if labels is None else tuple(map(self._kept, several))
        self._given.append(_Given((tuple(map(self._kept, args)), named), kept))

    def give_whole(self, batch: Any) -> None:
        """A host hands over a batch."""
        given = _Given(whole=self._kept(batch))
        given.parts = [(weakref.ref(tensor), self._kept(tensor)) for tensor in self._tensors_of(batch)]
        self._given.append(given)

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> None:
        """The whole model is called."""
        self._calls[training].append(_Called(tuple(map(self._kept, args)), self._kept(dict(kwargs))))

    def loss(self, call: LossCall, inside: bool, training: bool) -> None:
        """A loss function was called; ``inside`` of the model, it has its labels from there."""
        found = self._labels.setdefault((training, self.number), [])
        if inside:
            return
        for tensor in call.inputs.values():
            if not self._tensors.trainable(tensor):
                kept = self._part(tensor)
                if all(kept is not other for other in found):
                    found.append(kept)

    def finish(self) -> tuple[Batch, ...]:
        """The batches."""
        called = self._called
        if self._given and len(self._given) != len(called):
            called = []  # a model that is called several times for a batch
        number = max(len(self._given), len(called))
        return tuple(
            self._batch(k, self._given[k] if self._given else _Given(), called[k] if called else None)
            for k in range(number)
        )

    def _batch(self, number: int, given: _Given, called: _Called | None) -> Batch:
        labels = given.labels
        if labels is None:
            trains = any(training for training, _ in self._labels)
            found = self._labels.get((trains, number))
            labels = None if found is None else tuple(found)
        if given.inputs is not None:
            inputs = given.inputs
        elif called is not None:
            inputs = called.args, called.kwargs
        elif given.whole is not None and labels is not None:
            inputs = _without(given.whole, labels)
        else:
            return Batch(labels=labels, whole=given.whole, seen=False)
        return Batch(*inputs, labels, given.whole)

    def _part(self, tensor: Any) -> TensorSource:
        """The copy of a tensor; of one that is a part of the batch in another shape, the batch's."""
        for alive, source in self._given[-1].parts if self._given else ():
            part = alive()
            if part is not None and (part is tensor or self._tensors.same_values(part, tensor)):
                return source
        kept = self._kept(tensor)
        assert isinstance(kept, TensorSource)
        return kept

    def _kept(self, value: Any, depth: int = 0) -> Any:
        if self._tensors.is_tensor(value):
            key = id(value), self._tensors.version_of(value)
            known = self._copies.get(key)
            if known is None or known[0]() is not value:
                known = self._copies[key] = weakref.ref(value), InMemory(self._copy(value))
            return known[1]
        if isinstance(value, _PLAIN) and not (isinstance(value, int) and value.bit_length() > _BITS):
            return value
        if isinstance(value, np.generic) and isinstance(value.item(), _PLAIN):
            return value.item()
        if isinstance(value, np.ndarray) and value.itemsize <= _WIDEST.get(value.dtype.kind, -1):
            return InMemory(np.array(value, value.dtype.newbyteorder("="), order="C"))
        if depth < _DEEPEST and isinstance(value, Mapping):
            return {str(key): self._kept(inner, depth + 1) for key, inner in value.items()}
        if depth < _DEEPEST and isinstance(value, (tuple, list)):
            kind = tuple if isinstance(value, tuple) else list
            return kind(self._kept(inner, depth + 1) for inner in value)
        return Unkept(f"{type(value).__module__}.{type(value).__qualname__}")

    def _tensors_of(self, value: Any, depth: int = 0) -> Iterator[Any]:
        if self._tensors.is_tensor(value):
            yield value
        elif depth < _DEEPEST and isinstance(value, (Mapping, tuple, list)):
            for inner in value.values() if isinstance(value, Mapping) else value:
                yield from self._tensors_of(inner, depth + 1)


def _without(whole: Any, labels: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What of a host's batch goes into the model: all but the labels."""

    def left(value: Any) -> bool:
        return all(value is not label for label in labels)

    if isinstance(whole, Mapping):
        return (), {key: value for key, value in whole.items() if left(value)}
    if isinstance(whole, (tuple, list)):
        return tuple(value for value in whole if left(value)), {}
    return ((whole,) if left(whole) else ()), {}
