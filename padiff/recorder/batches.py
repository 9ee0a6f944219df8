"""Collection of a step's micro-batches: the inputs of the model, and the labels that the loss takes."""

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
# Largest item size, by numpy's kind, of arrays that a pack holds: no number is wider than float64.
_WIDEST = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
# Bits of the largest integer that readers other than Python can read from a pack.
_BITS = 63
_PLAIN = (bool, int, float, str, type(None))


@dataclass
class _Given:
    """A batch as declared by the user or by a host.

    Attributes:
        inputs: positional and named arguments of the model; None if not declared.
        labels: further inputs of the loss; None if not declared.
        whole: the complete batch as passed by a host.
        parts: weak references to the tensors of the complete batch, with their copies.
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
    """Collector of the micro-batches of one step.

    Args:
        copy: function that copies a tensor's values.
    """

    def __init__(self, framework: Framework, copy: Callable[[Any], np.ndarray]) -> None:
        self._tensors, self._copy = framework.tensors, copy
        self._given: list[_Given] = []
        #: Calls of the model; the key is True for training mode.
        self._calls: dict[bool, list[_Called]] = {True: [], False: []}
        #: Inputs without gradient of loss functions outside of the model, by (training mode, micro-batch).
        self._labels: dict[tuple[bool, int], list[Any]] = {}
        self._copies: dict[tuple[int, int], tuple[weakref.ref[Any], TensorSource]] = {}

    @property
    def number(self) -> int:
        """Return the index of the current micro-batch."""
        return max(len(self._given), len(self._called), 1) - 1

    @property
    def _called(self) -> list[_Called]:
        """Return the model's calls in training mode, or in evaluation mode if there are none."""
        return self._calls[True] or self._calls[False]

    def give(self, inputs: Any, labels: Any) -> None:
        """Add a batch declared by the user: the model's inputs, and the labels (None if not declared)."""
        args = (*inputs,) if isinstance(inputs, (tuple, list)) else () if isinstance(inputs, Mapping) else (inputs,)
        named = self._kept(inputs) if isinstance(inputs, Mapping) else {}
        several = labels if isinstance(labels, (tuple, list)) else (labels,)
        stored_labels = None if labels is None else tuple(map(self._kept, several))
        self._given.append(_Given((tuple(map(self._kept, args)), named), stored_labels))

    def give_whole(self, batch: Any) -> None:
        """Add a complete batch passed by a host."""
        entry = _Given(whole=self._kept(batch))
        entry.parts = [(weakref.ref(tensor), self._kept(tensor)) for tensor in self._tensors_of(batch)]
        self._given.append(entry)

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> None:
        """Add a call of the whole model."""
        self._calls[training].append(_Called(tuple(map(self._kept, args)), self._kept(dict(kwargs))))

    def loss(self, call: LossCall, inside: bool, training: bool) -> None:
        """Add the inputs without gradient of a loss function as labels.

        Args:
            inside: True if the call is made inside of the model, which then has the labels among its own inputs.
        """
        labels = self._labels.setdefault((training, self.number), [])
        if inside:
            return
        for tensor in call.inputs.values():
            if not self._tensors.trainable(tensor):
                source = self._part(tensor)
                if all(source is not label for label in labels):
                    labels.append(source)

    def finish(self) -> tuple[Batch, ...]:
        """Return the batches of the step."""
        called = self._called
        if self._given and len(self._given) != len(called):
            called = []  # calls can't be assigned to batches: the model is called several times per batch
        number = max(len(self._given), len(called))
        return tuple(
            self._batch(k, self._given[k] if self._given else _Given(), called[k] if called else None)
            for k in range(number)
        )

    def _batch(self, number: int, entry: _Given, called: _Called | None) -> Batch:
        labels = entry.labels
        if labels is None:
            trains = any(training for training, _ in self._labels)
            loss_inputs = self._labels.get((trains, number))
            labels = None if loss_inputs is None else tuple(loss_inputs)
        if entry.inputs is not None:
            inputs = entry.inputs
        elif called is not None:
            inputs = called.args, called.kwargs
        elif entry.whole is not None and labels is not None:
            inputs = _without(entry.whole, labels)
        else:
            return Batch(labels=labels, whole=entry.whole, seen=False)
        return Batch(*inputs, labels, entry.whole)

    def _part(self, tensor: Any) -> TensorSource:
        """Return the copy of a tensor, or the copy of the batch's tensor with the same values in another shape."""
        for alive, source in self._given[-1].parts if self._given else ():
            part = alive()
            if part is not None and (part is tensor or self._tensors.same_values(part, tensor)):
                return source
        copy = self._kept(tensor)
        assert isinstance(copy, TensorSource)
        return copy

    def _kept(self, value: Any, depth: int = 0) -> Any:
        if self._tensors.is_tensor(value):
            key = id(value), self._tensors.version_of(value)
            entry = self._copies.get(key)
            if entry is None or entry[0]() is not value:
                entry = self._copies[key] = weakref.ref(value), InMemory(self._copy(value))
            return entry[1]
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


def _without(batch: Any, labels: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's positional and named arguments: a host's batch without the labels."""

    def is_input(value: Any) -> bool:
        return all(value is not label for label in labels)

    if isinstance(batch, Mapping):
        return (), {key: value for key, value in batch.items() if is_input(value)}
    if isinstance(batch, (tuple, list)):
        return tuple(value for value in batch if is_input(value)), {}
    return ((batch,) if is_input(batch) else ()), {}
