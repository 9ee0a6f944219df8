"""Packs: recorded steps with everything that is needed to repeat them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.records.parameter_states import OptimizerState
from padiff.records.sources import TensorSource


@dataclass(frozen=True, slots=True)
class Unkept:
    """Placeholder for an object in a batch that a pack cannot store.

    Attributes:
        kind: class of the object, in words.
    """

    kind: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one micro-batch.

    Values are nested: tuples, lists and dicts of tensor sources, of plain values, and of `Unkept`.

    Attributes:
        args, kwargs: positional and keyword arguments of the model's call.
        labels: inputs of the loss functions that do not come from the model, in order; `None`: not recorded.
        whole: the batch as the host passed it; `None` if there is no host.
        seen: True if the arguments of the model's call are known.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[Any, ...] | None = None
    whole: Any = None
    seen: bool = True

    @property
    def sources(self) -> Iterator[TensorSource]:
        """Yield all tensor sources, those of the arguments first."""
        for part in (self.args, self.kwargs, self.labels, self.whole):
            yield from leaves(part)


@dataclass(frozen=True, slots=True)
class Mask:
    """Mask of one call of a dropout function.

    Attributes:
        layer: the innermost layer whose code made the call.
        batch: number of the micro-batch, counted from 0.
        function: common name of the function.
        rate: share of elements that it drops.
        shape: shape of its input (for an attention, of the weights).
        bits: the mask, eight elements to a byte, as `numpy.packbits` returns it.
    """

    layer: str
    batch: int
    function: str
    rate: float
    shape: tuple[int, ...]
    bits: TensorSource

    def kept(self) -> np.ndarray:
        """Return a boolean array that is True for each element that dropout kept."""
        size = int(np.prod(self.shape, dtype=np.int64))
        return np.unpackbits(self.bits.read(), count=size).astype(bool).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random numbers that were drawn but not recorded, so that a replay cannot reproduce them.

    Attributes:
        layer: the innermost layer that drew the numbers.
        what: class of the layer, or name of the function.
    """

    layer: str
    what: str


@dataclass(frozen=True)
class Pack:
    """A recorded step with everything that is needed to repeat it elsewhere.

    Attributes:
        step: number of the step.
        framework, framework_version: the framework that recorded the step.
        weights: parameters and buffers before the step, by path of the layer and slot; a tied one under its first path.
        optimizers: state of each optimizer before the step, with the rates that the step used; empty: none was
            recorded.
        batches: the micro-batches, in order.
        masks: the masks of dropout, in order.
        loss_scale: factor by which the loss was scaled.
        unseen: random numbers that other functions drew and that were not recorded.
        seeds: states of the random generators before the step, by name (``python``, ``numpy``, ``torch.cpu``).
        rank: number of the process of a distributed run.
        notes: sentences about things that could not be stored.
    """

    step: int
    framework: str
    framework_version: str
    weights: Mapping[tuple[str, str], TensorSource]
    optimizers: tuple[OptimizerState, ...] = ()
    batches: tuple[Batch, ...] = ()
    masks: tuple[Mask, ...] = ()
    loss_scale: float = 1.0
    unseen: tuple[Drawn, ...] = ()
    seeds: Mapping[str, TensorSource] = field(default_factory=dict)
    rank: int = 0
    notes: tuple[str, ...] = ()

    @property
    def learning_rates(self) -> tuple[tuple[float, ...], ...]:
        """Return the different learning rates of each optimizer."""
        return tuple(tuple(rate.value for rate in optimizer.rates) for optimizer in self.optimizers)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that the pack holds in memory."""
        sources = [*self.weights.values(), *self.seeds.values(), *(mask.bits for mask in self.masks)]
        sources += [source for batch in self.batches for source in batch.sources]
        arrays = [array for source in sources for array in source.arrays]
        arrays += [array for optimizer in self.optimizers for array in optimizer.arrays().values()]
        return sum({id(array): array.nbytes for array in arrays}.values())


def leaves(value: Any) -> Iterator[TensorSource]:
    """Yield the tensor sources of a nested value, in order."""
    if isinstance(value, TensorSource):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from leaves(inner)


def with_leaves(value: Any, new: Callable[[TensorSource], Any]) -> Any:
    """Return the nested value with each tensor source replaced by the result of `new`."""
    if isinstance(value, TensorSource):
        return new(value)
    if isinstance(value, Mapping):
        return {key: with_leaves(inner, new) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(with_leaves(inner, new) for inner in value)
    return [with_leaves(inner, new) for inner in value] if isinstance(value, list) else value


def unkept(value: Any) -> Iterator[Unkept]:
    """Yield the `Unkept` placeholders of a nested value, in order."""
    if isinstance(value, Unkept):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from unkept(inner)
