"""A pack: a recorded step with all that is needed to do it again elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.records.optimizer_state import OptimizerState
from padiff.records.sources import TensorSource


@dataclass(frozen=True, slots=True)
class Unkept:
    """Something in a batch that a pack can't hold.

    Attributes:
        kind: its class, in words.
    """

    kind: str


@dataclass(frozen=True, slots=True)
class Batch:
    """What a micro-batch was.

    Values are nested: tuples, lists and dicts of tensor sources, of plain values, and of `Unkept`.

    Attributes:
        args, kwargs: what the model was called with, by position and by name.
        labels: what went into the loss functions besides what the model gave, in order; `None`: it was not seen.
        whole: the batch as its host handed it over; `None` where there is none.
        seen: whether it is known what the model was called with.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[Any, ...] | None = None
    whole: Any = None
    seen: bool = True

    @property
    def sources(self) -> Iterator[TensorSource]:
        """All tensors, those of the inputs first."""
        for part in (self.args, self.kwargs, self.labels, self.whole):
            yield from leaves(part)


@dataclass(frozen=True, slots=True)
class Mask:
    """Which elements a call of a dropout function kept.

    Attributes:
        layer: the innermost layer whose code called it.
        batch: in which micro-batch, counted from 0.
        function: its common name.
        rate: the share that it drops.
        shape: of what it dropped from (of the weights of an attention).
        bits: eight elements to a byte, as `numpy.packbits` has them.
    """

    layer: str
    batch: int
    function: str
    rate: float
    shape: tuple[int, ...]
    bits: TensorSource

    def kept(self) -> np.ndarray:
        """Whether each element was kept."""
        size = int(np.prod(self.shape, dtype=np.int64))
        return np.unpackbits(self.bits.read(), count=size).astype(bool).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random numbers that were drawn, but not seen: what a replay can't feed.

    Attributes:
        layer: the innermost layer that drew them.
        what: its class, or the function.
    """

    layer: str
    what: str


@dataclass(frozen=True)
class Pack:
    """A recorded step with all that is needed to do it again elsewhere.

    Attributes:
        step: its number.
        framework, framework_version: where it was recorded.
        weights: parameters and buffers before the step, by path of the layer and slot; a tied one under the first.
        optimizers: what each optimizer held before the step, with the rates that the step used; empty: none was
            recorded.
        batches: the micro-batches, in order.
        masks: what dropout drew, in order.
        loss_scale: factor by which the loss was scaled.
        unseen: random numbers that were drawn by something else.
        seeds: the states of random generators before the step, by name (``python``, ``numpy``, ``torch.cpu``).
        rank: which process of a distributed run.
        notes: sentences about what could not be kept.
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
        """Of each optimizer, the different learning rates that it stepped with."""
        return tuple(tuple(rate.value for rate in optimizer.rates) for optimizer in self.optimizers)

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds in memory."""
        sources = [*self.weights.values(), *self.seeds.values(), *(mask.bits for mask in self.masks)]
        sources += [source for batch in self.batches for source in batch.sources]
        arrays = [array for source in sources for array in source.arrays]
        arrays += [array for optimizer in self.optimizers for array in optimizer.arrays().values()]
        return sum({id(array): array.nbytes for array in arrays}.values())


def leaves(value: Any) -> Iterator[TensorSource]:
    """The tensor sources of a nested value, in order."""
    if isinstance(value, TensorSource):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from leaves(inner)


def with_leaves(value: Any, new: Callable[[TensorSource], Any]) -> Any:
    """The nested value with each tensor source replaced."""
    if isinstance(value, TensorSource):
        return new(value)
    if isinstance(value, Mapping):
        return {key: with_leaves(inner, new) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(with_leaves(inner, new) for inner in value)
    return [with_leaves(inner, new) for inner in value] if isinstance(value, list) else value


def unkept(value: Any) -> Iterator[Unkept]:
    """What of a nested value a pack does not hold, in order."""
    if isinstance(value, Unkept):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from unkept(inner)
