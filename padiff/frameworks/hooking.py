"""Seeing a training's calls and gradients, and what is put on objects for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from padiff.frameworks.losses import LossObserver
from padiff.system.guard import RAISING, Guard

#: Why nothing is recorded inside of a function transform (`Hooking.transforming`).
TRANSFORMED = "inside of torch.func (vmap, grad, jvp, ...) tensors stand for others and have no values"


class Handle(Protocol):
    """Something that can be taken off again."""

    def remove(self) -> None: ...


#: ``before(key, layer, args, kwargs)`` of a layer's call; the key is what the layer was hooked with.
BeforeCall = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]


#: ``after(key, layer, output, failed)`` of a layer's call.
AfterCall = Callable[[Any, Any, Any, bool], None]


#: ``called(name, output)`` of a functional call or a tensor's method, by its common name.
OnCall = Callable[[str, Any], None]


#: ``replaced(args, output)``: what to put in the place of a layer's output.
Replaced = Callable[[tuple[Any, ...], Any], Any]


#: ``gradient(tensor)``: called with the gradient of a tensor; what it returns, if anything, takes its place.
OnGradient = Callable[[Any], Any]


class GradientHook(Protocol):
    """A hook on the gradient of one tensor after the other, without making a new object for each.

    It may be put on the next one when no graph has it any more: when nobody holds it but who made it.

    Attributes:
        callback: what it calls.
    """

    @property
    def callback(self) -> Any: ...

    def put(self, tensor: Any) -> bool:
        """Put it on, as `Hooking.on_gradient` does. Whether that could be done: not where there are others on the
        tensor, or somebody has added others to this one.
        """


class FunctionListener(Protocol):
    """Hears of the functions and operators that a model's code calls.

    Attributes:
        guard: stops errors of the listener and of what calls it.
    """

    guard: Guard

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

    __slots__ = ("_call", "_guard", "_key")

    def __init__(self, key: Any, call: Callable[..., Any], guard: Guard = RAISING) -> None:
        self._key, self._call, self._guard = key, call, guard

    def __call__(self, *args: Any) -> Any:
        return self._call(self._key, *args)

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


class Hooking(Protocol):
    """Seeing a training's calls and gradients."""

    #: Whether what a hook raises in backward reaches whoever called backward as it is.
    RAISES_AS_IT_IS: bool
    #: Whether a compiler reads what hooks do, and can't follow all of it.
    READ: bool

    def on_calls(
        self, layer: Any, key: Any, before: BeforeCall, after: AfterCall, guard: Guard = RAISING
    ) -> list[Handle]:
        """Call back around each call of a layer; ``guard`` stops errors of the callbacks."""

    def on_outputs(self, layer: Any, replaced: Replaced) -> Handle:
        """Replace a layer's output by what ``replaced(args, output)`` gives, after all hooks set before."""

    def on_functions(self, called: OnCall, third_party: Sequence[str], guard: Guard = RAISING) -> Handle:
        """Call back after each functional call and tensor method that computes something, made from the user's side.

        ``third_party`` are dotted names of custom operators (paddle only); ``guard`` stops errors of the callback.
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

    def gradient_hook(self, gradient: OnGradient) -> GradientHook | None:
        """A hook that can be used again; `None` where there is no such thing."""

    def transforming(self) -> bool:
        """Whether code that runs now is being transformed (torch.func): its tensors stand for others."""

    def recomputing(self) -> bool:
        """Whether a forward call made now is activation recomputation inside a backward."""

    def learning(self) -> bool:
        """Whether what is computed now could be gone back through by a backward."""
