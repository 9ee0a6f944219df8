"""Protocols of a framework's operations, which the modules of `torch/` and of `paddle/` implement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.feeding import ChoiceSource, MaskObserver, MaskSource
from padiff.frameworks.hooking import Handle, Hooking, Optimizers
from padiff.records.recorded import Part
from padiff.sketches.sketch import Cut, Form
from padiff.system.guard import reraise_from_signal_handler


class Items:
    """The two methods of a dataset, over a sequence. Subclasses also derive from the framework's dataset class."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class Watch(Protocol):
    """A check that objects are still in the state that `note` recorded."""

    def note(self, unchanged: bool = False) -> bool:
        """Record the current state; return True if the state can be read.

        Args:
            unchanged: True if the caller knows that the state equals the last recorded one, though `same` returned
                False.
        """

    def same(self) -> bool:
        """Return True if the state is unchanged; `False` if it can't be read or was never recorded."""


# Number of tensors or layers to check at a time, one property after the other. With many more, the first ones would
# have left the processor's cache, and the many results would trigger the garbage collector.
_AT_ONCE = 200

#: Slots of a linear layer's matrix: the weight, or what weight norm and spectral norm compute it from.
MATRICES = frozenset({"weight", "weight_v", "weight_orig"})


def in_turn(many: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the items in chunks of at most 200."""
    return [many[start : start + _AT_ONCE] for start in range(0, len(many), _AT_ONCE)]


class Each:
    """A watch that combines several watches."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

    def note(self, unchanged: bool = False) -> bool:
        noted = [watch.note(unchanged) for watch in self._watches]  # note all of them, even after one has failed
        return all(noted)

    def same(self) -> bool:
        return all(watch.same() for watch in self._watches)


class Compared:
    """A watch that compares the value of a function.

    Args:
        now: returns the current state as a comparable value; an exception means that the state can't be read.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._noted: Any = None

    def note(self, unchanged: bool = False) -> bool:
        try:
            self._noted = self._now()
        except Exception as error:  # unknown kinds of tensors or layers may raise anything
            reraise_from_signal_handler(error)
            self._noted = None
        return self._noted is not None

    def same(self) -> bool:
        try:
            return self._noted is not None and bool(self._noted == self._now())
        except Exception as error:  # as in `note`
            reraise_from_signal_handler(error)
            return False


def compared(now: Callable[[Sequence[Any]], Any], many: Sequence[Any]) -> Each:
    """Return a watch that compares the value of ``now`` for many objects, in chunks."""
    return Each([Compared(partial(now, chunk)) for chunk in in_turn(many)])


class UncopiedError(Exception):
    """Raised for a tensor whose values can't be copied; the text gives the reason."""


class Tensors(Protocol):
    """Operations on tensors. Attributes that both frameworks share (``grad``, ``element_size()``) are used directly."""

    #: The class of tensors, for `isinstance` checks on hot paths.
    TYPE: type

    def is_tensor(self, value: Any) -> bool: ...

    def trainable(self, tensor: Any) -> bool: ...

    def all_trainable(self, tensors: Sequence[Any]) -> list[bool]:
        """Return `trainable` of each tensor."""

    def dtype(self, tensor: Any) -> str: ...

    def shape(self, tensor: Any) -> tuple[int, ...]: ...

    def device(self, tensor: Any) -> str:
        """Return the kind of device: ``cpu`` or ``gpu`` in paddle, the device type (such as ``cuda``) in torch."""

    def copy(self, tensor: Any) -> np.ndarray:
        """Return a copy of the tensor's values that shares no memory; bfloat16 stays bfloat16.

        Raises:
            UncopiedError: this kind of tensor can't be copied.
        """

    def sample(self, tensor: Any, transposed: bool = False) -> Any:
        """Return a flat copy of the elements that a sketch uses (`padiff.sketches.sketch.sample`).

        The copy of a CPU tensor is an array. For another device it is a tensor on that device, to be moved by `fetch`.
        ``transposed`` samples the transpose of a matrix.
        """

    def elements(self, tensor: Any, chosen: np.ndarray) -> Any:
        """Return a copy of the elements at these flat row-major indices: an array, or a tensor as in `sample`."""

    def cut(self, tensor: Any, transposed: bool = False) -> Cut | None:
        """Return the position of the `sample` in the tensor's memory if it is plain CPU memory, else `None`.

        Read from the position at once, or only while `memory` stays the same: training code may free a tensor's memory.
        ``transposed`` samples the transpose of a matrix.
        """

    def form(self, dtype: str, shape: tuple[int, ...]) -> Form | None:
        """Return the memory layout of a contiguous CPU tensor of this dtype and shape; `None` if it is unsupported."""

    def address(self, tensor: Any, form: Form) -> int:
        """Return the address of a tensor's memory if it is contiguous on the CPU and of this form; else 0.

        Call this only for tensors that the framework itself has just written, or is about to read.
        """

    def locator(self, forms: Sequence[Form]) -> Callable[[Sequence[Any]], list[int] | None]:
        """Return a function that computes the `address` of each of a list of tensors, or `None` if one of them is 0.

        The list has one tensor per form.
        """

    #: True if `pieces` can return views of tensors on another device, so that many samples are copied together.
    JOINS: bool

    def pieces(self, tensor: Any, transposed: bool = False) -> Sequence[Any]:
        """Return views of a tensor on another device that, concatenated, are its `sample`; empty if there are none.

        The views are valid while `memory` stays the same.
        """

    def join(self, pieces: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the concatenated copy of each tensor's pieces, with one copy operation per dtype and device."""

    def memory(self, tensor: Any) -> Any:
        """Return a value that changes when the tensor's memory, or its layout in the memory, changes."""

    def watch(self, tensors: Sequence[Any]) -> Watch:
        """Return a watch that detects changes of memory, dtype, shape, layout and trainability of many tensors."""

    def same_values(self, tensor: Any, other: Any) -> bool:
        """Return True if two tensors cover the same memory in the same order, so that only their shapes may differ."""

    #: `version_of` for hot paths; raises an error if the tensor has no version.
    WRITTEN: Callable[[Any], int]

    def version_of(self, tensor: Any) -> int:
        """Return a number that changes when the tensor is written in place; -1 if the tensor has no such number."""

    def fetch(self, tensors: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
        """Begin to copy tensors from their device to the CPU; return a function that waits for the arrays."""

    def write(self, tensor: Any, array: np.ndarray) -> None:
        """Set a parameter's or buffer's values in place; its dtype and device stay, no graph is recorded."""

    def like(self, tensor: Any, array: np.ndarray) -> Any:
        """Return a new tensor with these values, with the dtype and device of ``tensor``, that requires no gradient."""

    def leaf(self, tensor: Any, array: np.ndarray) -> Any:
        """Return a tensor as `like` does, but requiring a gradient if its dtype allows it."""

    def gradients(self, outputs: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of inputs, from the gradients ``seeds`` of outputs; `None` for an unreached input.

        The ``grad`` of parameters stays unchanged.
        """

    def make(self, array: np.ndarray, near: Any) -> Any:
        """Return a new tensor with an array's values and dtype, on the device of ``near``, in its own memory."""

    def in_float64(self, tensors: Sequence[Any]) -> Callable[[], None]:
        """Convert floating-point parameters and buffers to float64 in place, and make float64 the default dtype.

        Returns:
            A function that restores the tensors to the bit, whatever was written to them since, and the default dtype.
            Clear the gradients before both calls.
        """

    def rows(self, tensor: Any, axis: int | None) -> Any:
        """Return a tensor as a matrix whose rows run along an axis; `None`: one row of all elements."""

    def ranked(self, scores: Any, count: int, largest: bool) -> tuple[Any, Any]:
        """Return the largest (or smallest) scores of each row in order, and their places in the row."""

    def drawn(self, name: str, given: Mapping[str, Any]) -> Any:
        """Return the scores by which a function is about to draw places: the largest is drawn.

        `None` if the framework does not show the random numbers that come next. The generator stays as it is.

        Args:
            name: ``multinomial`` or ``gumbel_softmax``.
            given: all arguments by parameter name.
        """

    def along(self, tensor: Any, places: Any) -> Any:
        """Return the elements at some places of each row of a matrix."""

    def without_grad(self) -> AbstractContextManager[Any]:
        """Return a context that records no graph."""


@dataclass(frozen=True, slots=True)
class Held:
    """A sharded parameter: this process holds a part of it, or nothing.

    The layer may have another tensor in place of the parameter during its call.

    Attributes:
        slot: the parameter's name within the layer.
        shape: the shape of the whole parameter.
        dtype: the dtype of the part.
        trainable: True if an optimizer may change the parameter.
        stepped: the tensor that the optimizer steps; kept alive by this object.
        within: the first element and the number of elements of the part in the flattened `stepped`; `None` if
            `stepped` is the parameter itself.
        local: returns the part as a plain tensor, and its position in the whole; both are `None` if this process holds
            nothing.
        gradient: returns the current gradient of the part, or `None`.
        number: the index of the parameter among those inside `stepped`; -1 if `stepped` is the parameter itself.
        heard: True if a hook on `stepped` receives the parameter's own gradient in backward.
    """

    slot: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    stepped: Any
    within: tuple[int, int] | None
    local: Callable[[], tuple[Any, Part | None]]
    gradient: Callable[[], Any]
    number: int = -1
    heard: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """A key of the parameter: equal for two objects of the same parameter, as long as both are alive."""
        return id(self.stepped), self.number


class Spreading(Protocol):
    """Access to this process's parts of sharded tensors."""

    def find_shards(self, model: Any) -> None:
        """Find the sharded parameters of a model, given with the wrappers that the training calls."""

    def held(self, layer: Any) -> Sequence[Held]:
        """Return the sharded parameters of a layer that `look` found, which the layer replaces while it is called."""

    def is_spread(self, tensor: Any) -> bool:
        """Return True if the tensor's own class says that it is sharded (such as torch's ``DTensor``). Cheap."""

    def local(self, tensor: Any) -> tuple[Any, Part | None]:
        """Return this process's part as a plain tensor, and its position in the whole.

        A tensor that is not sharded is returned itself, with `None`.

        Raises:
            UncopiedError: the position of the part is unknown.
        """


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

    def draw_as_eager(self) -> None:
        """Make code that is compiled from now on draw the random numbers of eager code, where the framework can."""

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
        """Return versions, devices, threads and switches, under the names of `padiff.recorder.description`.

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
