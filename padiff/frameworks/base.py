"""Protocols of a framework's operations; each protocol is implemented by one module in `torch/` and one in `paddle/`.

`values`, `hooking`, `optimizing` and `spreading` hold the protocols of tensors, hooks, optimizers and sharded
parameters; this module holds the other protocols.

Only the folders `torch/` and `paddle/` import a framework. padiff finds the framework of a model through
``sys.modules``, because the model's own framework is always imported already.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.dropout_masks import MaskObserver, MaskSource
from padiff.frameworks.hooking import Handle, Hooking
from padiff.frameworks.optimizing import Optimizers
from padiff.frameworks.pinned_choices import ChoiceSource
from padiff.frameworks.spreading import Spreading
from padiff.frameworks.values import Tensors
from padiff.frameworks.watching import Watch


@contextmanager
def evaluating_in(layers: Iterable[Any], context: AbstractContextManager[Any]) -> Iterator[None]:
    """Set layers to eval mode inside a context of the framework; restore their modes on exit."""
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
        """Return the user's model inside a data-parallel wrapper."""

    def children(self, layer: Any) -> Iterator[tuple[str, Any]]:
        """Yield the direct sublayers with their names, in order of definition, repeats included."""

    def parameters(self, layer: Any) -> Iterator[tuple[str, Any, str]]:
        """Yield ``(slot, tensor, role)`` of the layer's own tensors; role is ``parameter`` or ``buffer``."""

    def computed(self, layer: Any) -> Collection[str]:
        """Return the slots of buffers that are in no checkpoint, because the layer computes them when it is created."""

    def watch(self, layers: Sequence[Any]) -> Watch:
        """Return a watch that detects changes of these layers' sublayers (`children`) and own tensors (`parameters`).

        The watch compares the identity of layers and tensors, and the tensors' names and shapes. It is valid as long as
        the tensors live. Checking is cheap.
        """

    def is_builtin(self, layer: Any) -> bool:
        """Return True if the layer's code is the framework's own or compiled, so that none of it is the user's."""

    def sharded(self, layer: Any) -> bool:
        """Return True if the layer's parameters are sharded over processes (FSDP).

        This process then holds a part of each parameter, and whole parameters replace the parts during a call of the
        layer.
        """

    def compiled(self, layer: Any) -> bool:
        """Return True if the layer shows that its forward was compiled."""

    def kind(self, layer: Any) -> str:
        """Return the name of the framework's own class that the layer is or derives from, in lower case."""

    def layout(self, layer: Any, slot: str) -> str:
        """Return ``in_out`` or ``out_in`` for the matrix of a linear layer, else an empty text."""

    def settings(self, layer: Any) -> dict[str, Any]:
        """Return the layer's hyper-parameters that are plain values, under common names."""

    def evaluating(self, layers: Iterable[Any]) -> AbstractContextManager[None]:
        """Return a context with these layers in eval mode and without a graph; modes are restored on exit.

        Each layer calls its sublayers one by one inside the context: no fused kernel skips them.
        """

    def clear_gradients(self, model: Any) -> None:
        """Release the gradients of a model's parameters."""


class Randomness(Protocol):
    """The random generators of the framework."""

    def kept(self) -> AbstractContextManager[None]:
        """Return a context that restores the random state on exit."""

    def state(self) -> Mapping[str, Any]:
        """Return the states of all generators in use, by name, without initializing any device."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the generators to these states; skip generators that this machine does not have."""

    def stamp(self) -> Hashable:
        """Return a value that changes when a random number is drawn."""

    def as_arrays(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the states as arrays, for a file; empty if the framework does not reveal the states."""

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Convert arrays of `as_arrays` back to states; skip arrays that fit no generator of this machine."""


class Masks(Protocol):
    """Dropout masks: recording them and feeding them."""

    def unfed(self, layer: Any) -> bool:
        """Return True if the layer's settings show that it draws random numbers in training that padiff can neither
        record nor feed.
        """

    def see(self, observer: MaskObserver) -> Handle:
        """Pass the mask of each dropout call to an observer, until the handle is removed."""

    def feed(self, source: MaskSource) -> Handle:
        """Make dropout functions use the masks of a source, until the handle is removed."""


class Choosing(Protocol):
    """Functions that choose."""

    def feed(self, source: ChoiceSource) -> Handle:
        """Make functions choose the places of a source, until the handle is removed."""


class Data(Protocol):
    """Tensors and datasets that a training loop reads."""

    def tensor(self, array: np.ndarray, near: Any = None) -> Any:
        """Return a new tensor with an array's values and dtype, on the device of ``near`` or on the default device."""

    def dataset(self, items: Sequence[Any]) -> Any:
        """Return a dataset of the framework with these items; each item is computed when it is read."""


class Environment(Protocol):
    """Versions, devices and switches that can change a training's numbers. Reading them changes nothing."""

    def read(self, kinds: Collection[str]) -> dict[str, Any]:
        """Return versions, devices, threads and switches, under the names of `padiff.recorder.environment_fingerprint`.

        ``kinds`` are the devices that the model is on; others are not touched.
        """

    def autocast(self) -> dict[str, Any]:
        """Return the current ``autocast.dtype`` (``off`` outside of autocast), and the level if there are levels."""

    def distributed(self) -> tuple[int, int]:
        """Return ``(rank, world size)``; ``(0, 1)`` if training is not distributed."""


@dataclass(frozen=True)
class Framework:
    """A deep-learning framework: its name, its version and the implementations of the protocols."""

    name: str
    version: str
    tensors: Tensors
    layers: Layers
    hooks: Hooking
    optimizers: Optimizers
    randomness: Randomness
    masks: Masks
    choosing: Choosing
    environment: Environment
    data: Data
    spread: Spreading
