"""What a room may ask of a framework, split by what it is about; each part is one module of a framework's folder.

Tensors, hooks and optimizers are in `values`, `hooking` and `optimizing`, the rest is here.

Those folders are the only places that import torch or paddle. Which framework serves a model is found through
``sys.modules``: a model's own is always imported already.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.dropouts import MaskObserver, MaskSource
from padiff.frameworks.hooking import Handle, Hooking
from padiff.frameworks.optimizing import Optimizers
from padiff.frameworks.spreading import Spreading
from padiff.frameworks.values import Tensors
from padiff.frameworks.watching import Watch


@contextmanager
def evaluating_in(layers: Iterable[Any], context: AbstractContextManager[Any]) -> Iterator[None]:
    """In eval mode, and in a context of the framework's; modes are as before afterwards."""
    modes = [(layer, layer.training) for layer in layers]
    try:
        # Not eval(): people override it.
        for layer, _ in modes:
            layer.training = False
        with context:
            yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class Layers(Protocol):
    """Models: torch Modules, paddle Layers. (``training`` is an attribute of both.)"""

    def is_model(self, value: Any) -> bool: ...

    def unwrap(self, model: Any) -> Any:
        """The user's model inside a data-parallel wrapper."""

    def children(self, layer: Any) -> Iterator[tuple[str, Any]]:
        """Direct sublayers with their names, in order of definition, repeats included."""

    def parameters(self, layer: Any) -> Iterator[tuple[str, Any, str]]:
        """``(slot, tensor, role)`` of what the layer owns itself; role is ``parameter`` or ``buffer``."""

    def computed(self, layer: Any) -> Collection[str]:
        """Slots of the buffers that no checkpoint holds: the layer computes them when it is made."""

    def watch(self, layers: Sequence[Any]) -> Watch:
        """What sees whether these layers hold the layers that they held (`children`), and own the tensors that they
        owned, of the same names and shapes (`parameters`); as long as the tensors live. Cheap.
        """

    def is_builtin(self, layer: Any) -> bool:
        """Whether what the layer computes is the framework's own code, or compiled: none of the user's."""

    def sharded(self, layer: Any) -> bool:
        """Whether the layer's parameters are spread over processes (FSDP): this one holds a part of each, and while the
        layer is called, whole ones take their places.
        """

    def compiled(self, layer: Any) -> bool:
        """Whether what a call of the layer computes was compiled, as far as the layer shows it."""

    def kind(self, layer: Any) -> str:
        """The framework's own class that the layer is or derives from, lower case."""

    def layout(self, layer: Any, slot: str) -> str:
        """``in_out`` / ``out_in`` for the matrix of a linear layer, else empty."""

    def settings(self, layer: Any) -> dict[str, Any]:
        """The layer's hyper-parameters that are plain values, under common names."""

    def evaluating(self, layers: Iterable[Any]) -> AbstractContextManager[None]:
        """In eval mode, without a graph, each layer calling those inside; modes are as before afterwards."""

    def clear_gradients(self, model: Any) -> None:
        """Let go of the gradients of a model's parameters."""


class Randomness(Protocol):
    """The framework's own random numbers."""

    def kept(self) -> AbstractContextManager[None]:
        """Whatever draws inside, the random state is as before afterwards."""

    def state(self) -> Mapping[str, Any]:
        """The states of all generators in use, by name. No device is started for it."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put generators back into states; those that are not there here are passed over."""

    def stamp(self) -> Hashable:
        """Another value once something was drawn."""

    def as_arrays(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """States as arrays, for a file; empty where the framework does not give them."""

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Undo `as_arrays`; what is no state of a generator here is left out."""


class Masks(Protocol):
    """What dropout keeps."""

    def unfed(self, layer: Any) -> bool:
        """Whether a layer draws random numbers in training that can be neither seen nor fed, as far as its settings
        tell.
        """

    def see(self, observer: MaskObserver) -> Handle:
        """Tell an observer what each call of a dropout function keeps."""

    def feed(self, source: MaskSource) -> Handle:
        """Have dropout functions keep what a source says."""


class Data(Protocol):
    """What loops are fed with."""

    def tensor(self, array: np.ndarray, near: Any = None) -> Any:
        """A new tensor with an array's values and dtype, on the device of another tensor; else on the default one."""

    def dataset(self, items: Sequence[Any]) -> Any:
        """The framework's kind of dataset, with these items; an item is worked out when it is asked for."""


class Environment(Protocol):
    """What around a training can change its numbers. Reading changes nothing."""

    def read(self, kinds: Collection[str]) -> dict[str, Any]:
        """Versions, devices, threads and switches, under the names of `padiff.recorder.environment`.

        ``kinds`` are the devices that the model is on; others are not touched.
        """

    def autocast(self) -> dict[str, Any]:
        """``autocast.dtype`` (``off`` outside of any) as it stands now, and the level where there are levels."""

    def distributed(self) -> tuple[int, int]:
        """``(rank, world size)``; ``(0, 1)`` where nothing is distributed."""


@dataclass(frozen=True)
class Framework:
    """A deep-learning framework, as far as recording needs it."""

    name: str
    version: str
    tensors: Tensors
    layers: Layers
    hooks: Hooking
    optimizers: Optimizers
    randomness: Randomness
    masks: Masks
    environment: Environment
    data: Data
    spread: Spreading
