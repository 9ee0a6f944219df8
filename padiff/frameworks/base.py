"""What a room may ask of a framework, split by what it is about; each part is one module of a framework's folder.

Those folders are the only places that import torch or paddle. Which framework serves a model is found through
``sys.modules``: a model's own is always imported already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.dropouts import MaskObserver, MaskSource
from padiff.frameworks.losses import LossObserver
from padiff.records.optimizer_state import OptimizerState
from padiff.sketches.samples import Empty
from padiff.sketches.sketch import Cut

#: Why nothing is recorded inside of a function transform (`Hooking.transforming`).
TRANSFORMED = "inside of torch.func (vmap, grad, jvp, ...) tensors stand for others and have no values"


class UncopiedError(Exception):
    """A tensor has no values that could be copied; the text says why."""


class Handle(Protocol):
    """Something that can be taken off again."""

    def remove(self) -> None: ...


#: ``before(layer, args, kwargs)`` of a layer's call.
BeforeCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
#: ``after(layer, output, failed)`` of a layer's call.
AfterCall = Callable[[Any, Any, bool], None]
#: ``called(name, output)`` of a functional call or a tensor's method, by its common name.
OnCall = Callable[[str, Any], None]
#: ``replaced(args, output)``: what to put in the place of a layer's output.
Replaced = Callable[[tuple[Any, ...], Any], Any]
#: ``gradient(tensor)``: called with the gradient of a tensor; what it returns, if anything, takes its place.
OnGradient = Callable[[Any], Any]
#: ``consumed(pairs)``: called with ``(parameter, gradient)`` pairs as the optimizer consumes them.
OnConsumed = Callable[[Iterable[tuple[Any, Any]]], None]


class FunctionListener(Protocol):
    """Hears of the functions and operators that a model's code calls."""

    def function_begins(
        self, name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call begins.

        Args:
            name: the function's common name.
            parameters: what it calls its parameters that may be given by position, as far as that is known.

        Returns:
            What `function_ended` is to be called with; `None` not to hear of its end.
        """

    def function_ended(self, begun: Any, output: Any) -> None:
        """It has ended, and given this. Of one that ends in an exception nothing more is heard."""


class Hearing(Handle, Protocol):
    """What hears functions for a listener, until it is removed."""

    def listen(self, on: bool) -> None:
        """Hear those that are called from now on, or none. Hears none before it is asked to."""

    def listen_outside(self, on: bool) -> None:
        """The same outside of the model, where the loop computes its loss; it ends before anything else is called."""


class Hook:
    """A function that is put on a layer. In a copy or a pickle of the layer there is one that does nothing instead,
    of the standard library: a model that is copied or saved while it is recorded is a model like any other.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, gives None


class Override:
    """An attribute set on one object over its class's (or over its own); removing it uncovers what was there.

    Set on the very object: wrappers hand what is set as an attribute on to what they wrap.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value
        self._before = vars(owner).get(name)  # somebody else's, set the same way before
        vars(owner)[name] = value

    def remove(self) -> None:
        # Somebody may have set another one over this meanwhile: that one stays.
        if vars(self._owner).get(self._name) is not self._value:
            return
        if self._before is not None:
            vars(self._owner)[self._name] = self._before
        else:
            del vars(self._owner)[self._name]


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


def breadth_first(first: Any, before: Callable[[Any], Iterable[Any]], most: int) -> Iterator[tuple[Any, int]]:
    """What comes before something, the nearest first, each with how far it is; at most so many."""
    waiting, seen = deque([(first, 0)] if first is not None else []), [first]
    while waiting:
        node, distance = waiting.popleft()
        yield node, distance
        for each in before(node):
            if each is not None and len(seen) < most and all(each is not other for other in seen):
                seen.append(each)
                waiting.append((each, distance + 1))


class Tensors(Protocol):
    """Values, and what tensors are. What both frameworks call alike (``grad``, ``element_size()``) is asked of them."""

    #: The class of them, for those who ask in every call.
    TYPE: type

    def is_tensor(self, value: Any) -> bool: ...

    def trainable(self, tensor: Any) -> bool: ...

    def all_trainable(self, tensors: Sequence[Any]) -> list[bool]:
        """`trainable` of many, in one go."""

    def dtype(self, tensor: Any) -> str: ...

    def shape(self, tensor: Any) -> tuple[int, ...]: ...

    def device(self, tensor: Any) -> str:
        """``cpu`` or ``gpu`` (or what torch calls another kind)."""

    def copy(self, tensor: Any, empty: Empty = np.empty) -> np.ndarray:
        """A copy of the tensor's values that nothing else can write to; bfloat16 stays bfloat16.

        ``empty`` makes the array to copy into.

        Raises:
            UncopiedError: of this kind of tensor there is no copy.
        """

    def sample(self, tensor: Any, transposed: bool = False) -> Any:
        """A copy of the elements that a sketch looks at (`padiff.sketches.sketch.sample`), flat.

        On the CPU an array; on another device a tensor that is still there, and that `fetch` brings over.
        ``transposed`` looks at a matrix transposed.
        """

    def live(self, tensor: Any) -> np.ndarray | None:
        """The tensor's own memory as an array, where it is plain memory of the CPU, else `None`.

        To be read at once, or for as long as `memory` stays the same: training code may free what is below a tensor.
        """

    def cut(self, tensor: Any, transposed: bool = False) -> Cut | None:
        """Where the sample that is sketched lies in the tensor's memory, where that is plain memory of the CPU.

        Holds for as long as `live` does. ``transposed`` looks at a matrix transposed.
        """

    def memory(self, tensor: Any) -> Any:
        """Where the tensor's memory is, and how the tensor lies in it; another value once one of these is another."""

    def memories(self, tensors: Sequence[Any]) -> list[Any]:
        """`memory` of many, in one go."""

    def same_values(self, tensor: Any, other: Any) -> bool:
        """Whether two tensors have one memory, and all of it in the same order: views of other shapes."""

    def version_of(self, tensor: Any) -> int:
        """A number that changes when the tensor is written in place; -1 where there is none."""

    def fetch(self, tensors: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
        """Begin to bring tensors over from their device, all at once; what is returned waits for them."""

    def write(self, tensor: Any, array: np.ndarray) -> None:
        """Set a parameter's or buffer's values in place; its dtype and device stay, no graph is recorded."""

    def like(self, tensor: Any, array: np.ndarray) -> Any:
        """A new tensor with these values, of another one's dtype and device, that takes part in no backward."""

    def leaf(self, tensor: Any, array: np.ndarray) -> Any:
        """As `like`, but a gradient can be had of it where its dtype has any."""

    def gradients(self, outputs: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Any]) -> Sequence[Any]:
        """The gradients of inputs, given those of outputs; `None` where none reaches one. Parameters keep theirs."""

    def make(self, array: np.ndarray, near: Any) -> Any:
        """A new tensor with an array's values and dtype, on the device of another tensor; it has its own memory."""

    def in_float64(self, tensors: Sequence[Any]) -> Callable[[], None]:
        """Make parameters and buffers float64, those of another floating dtype, each the same object as before; what is
        made without a dtype is float64, too.

        Returns:
            What puts all of it back as it was, to the bit, whatever was written to them meanwhile. Their gradients have
            to be cleared before both.
        """

    def without_grad(self) -> AbstractContextManager[Any]:
        """No graph is recorded."""


class Layers(Protocol):
    """Models: torch Modules, paddle Layers. (``training`` is an attribute of both.)"""

    def is_model(self, value: Any) -> bool: ...

    def unwrap(self, model: Any) -> Any:
        """The user's model inside a data-parallel wrapper."""

    def children(self, layer: Any) -> Iterator[tuple[str, Any]]:
        """Direct sublayers with their names, in order of definition, repeats included."""

    def parameters(self, layer: Any) -> Iterator[tuple[str, Any, str]]:
        """``(slot, tensor, role)`` of what the layer owns itself; role is ``parameter`` or ``buffer``."""

    def stamp(self, layers: Sequence[Any]) -> Any:
        """A value that is another one once these layers hold other layers (`children`), or own other tensors, or
        tensors of other names or shapes (`parameters`); as long as the tensors live. Cheap.
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


class Hooking(Protocol):
    """Seeing a training's calls and gradients."""

    #: Whether what a hook raises in backward reaches whoever called backward as it is.
    RAISES_AS_IT_IS: bool

    def on_calls(self, layer: Any, before: BeforeCall, after: AfterCall) -> list[Handle]: ...

    def on_outputs(self, layer: Any, replaced: Replaced) -> Handle:
        """Replace a layer's output by what ``replaced(args, output)`` gives, after all hooks set before."""

    def on_functions(self, called: OnCall, third_party: Sequence[str]) -> Handle:
        """Call back after each functional call and tensor method that computes something, made from the user's side.

        ``third_party`` are dotted names of custom operators (paddle only).
        """

    def on_losses(self, observer: LossObserver) -> Handle:
        """Call back after each call of a loss function, and of one that clips gradients."""

    def behind(self, tensor: Any, most: int) -> Iterator[tuple[Any, int]]:
        """The operations that a tensor was computed by, the last one first, each with how many lie after it.

        Two are the same operation where they are the same object, as long as both are kept. At most so many.
        """

    def hear_functions(self, listener: FunctionListener) -> Hearing:
        """Have a listener hear of the functions and operators that are called on this thread, while it listens.

        What is compiled, or is being compiled, is not heard, and is the same as without.
        """

    def on_gradient(self, tensor: Any, gradient: OnGradient) -> Handle | None:
        """Call back with the tensor's gradient in each backward; `None` if it takes part in none.

        For the output of an operation that is the whole gradient of the backward, for a parameter what this
        backward adds to it.
        """

    def transforming(self) -> bool:
        """Whether code that runs now is being transformed (torch.func): its tensors stand for others."""

    def recomputing(self) -> bool:
        """Whether a forward call made now is activation recomputation inside a backward."""

    def learning(self) -> bool:
        """Whether what is computed now could be gone back through by a backward."""


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that an optimizer treats alike, and how.

    Attributes:
        values: names and values, under the names that both frameworks share (`padiff.frameworks.settings`).
        parameters: the tensors.
    """

    values: Mapping[str, Any]
    parameters: Sequence[Any]


@dataclass(frozen=True)
class OptimizerSettings:
    """What an optimizer is set to.

    Attributes:
        rule: the update rule, under the name that both frameworks share; the class's full name where it is none of
            the framework's own.
        groups: its parameters, by what holds for them.
        others: what holds for all of it: ``clip.kind``, ``schedule``.
    """

    rule: str
    groups: Sequence[OptimizerGroup]
    others: Mapping[str, Any] = field(default_factory=dict)


class Optimizers(Protocol):
    """Optimizers, and what they do."""

    def is_optimizer(self, value: Any) -> bool: ...

    def steppers(self, optimizer: Any) -> list[Any]:
        """What to hook of an optimizer (`hook`): itself, or those inside that it hands its work to.

        Empty where it is no optimizer, or one of which nothing can be seen.
        """

    def hook(
        self,
        optimizer: Any,
        consumed: OnConsumed,
        stepped: Callable[[], None],
        clipping: Callable[[Any], None] = lambda norm: None,
    ) -> list[Handle]:
        """Call ``consumed`` with the gradients as the optimizer uses them, ``stepped`` once it has.

        ``clipping`` is called with the norm of all gradients before an optimizer clips by it itself, as a tensor.
        """

    def optimized(self, optimizer: Any) -> Sequence[Any]:
        """The parameters that an optimizer may change."""

    def learning_rates(self, optimizer: Any) -> list[float]:
        """The learning rate of each of the optimizer's parameter groups."""

    def settings(self, optimizer: Any) -> OptimizerSettings:
        """What an optimizer is set to now, as far as it can be seen."""

    def settings_stamp(self, optimizer: Any) -> Any:
        """A value that is another one once `settings` may be others; learning rates do not count. Cheap."""

    def state(self, optimizer: Any, names: Mapping[int, str]) -> OptimizerState:
        """What an optimizer holds now, as copies.

        Args:
            names: ``id`` of a parameter -> its site in the model, ``layer/slot``; of others nothing is said.

        Raises:
            UsageError: it holds what can't be told so.
        """

    def set_state(self, optimizer: Any, names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
        """Give an optimizer a state, all of it or none: moments, counts of steps, learning rates.

        A parameter that the state does not know is as if it had never been stepped. Tensors are in the order of this
        optimizer's framework. Set the weights before: where the optimizer keeps them in more digits than the model,
        and the state has none, it takes the model's.

        Returns:
            What puts the optimizer back as it was.

        Raises:
            UsageError: the state does not fit; nothing was changed.
        """

    def in_float64(self, optimizer: Any) -> Callable[[], None]:
        """Have an optimizer step parameters that `Tensors.in_float64` has made float64; give it a state afterwards.

        Returns:
            What puts it back; the state that it has then is to be put back besides.
        """

    def step(self, optimizer: Any) -> None:
        """One step of an optimizer, and its gradients cleared."""


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

    def unfed(self, layer: Any) -> bool:
        """Whether a layer draws random numbers in training that can be neither seen nor fed, as far as its settings
        tell.
        """

    def see_masks(self, observer: MaskObserver) -> Handle:
        """Tell an observer what each call of a dropout function keeps."""

    def feed_masks(self, source: MaskSource) -> Handle:
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
    environment: Environment
    data: Data
