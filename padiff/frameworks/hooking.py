"""Seeing a training's calls and gradients, and what is put on objects for it."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, SupportsIndex

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
    """A function on a layer's calls. A layer that shares its hooks with the hooked one (a shallow copy) is not meant.

    Copies and pickles of a layer have no hook (`HookEntry`). Where somebody carries one over to another layer by hand,
    a copy of it is a function of the standard library that does nothing.
    """

    __slots__ = ("_call", "_guard", "_key", "_layer")

    def __init__(self, key: Any, call: Callable[..., Any], layer: Any, guard: Guard = RAISING) -> None:
        self._key, self._call, self._layer, self._guard = key, call, id(layer), guard

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, gives None


class HookEntry:
    """A hook among those of an object, in the ordered dictionary where the framework looks them up.

    Copies and pickles of the dictionary are without the hook: a model that is copied or saved while it is recorded is
    a model like any other, to the byte. The key is the same from step to step, and no number of the framework's is
    used up: compilers look at keys, and pickles have those of the user's hooks.

    Args:
        hooks: the dictionary.
        hook: the function to call.
        flags: dictionaries that say more of the hook by its key.
        listed: whether ``hooks.values()`` has the hook; `False` where those who ask for values copy or script them.
        first: the first key to try. Hooks of all layers need another one than those of a layer: torch looks the flags
            of both up in the layer.
    """

    def __init__(
        self,
        hooks: OrderedDict[int, Any],
        hook: Any,
        flags: Sequence[OrderedDict[int, Any]] = (),
        listed: bool = True,
        first: int = -1,
    ) -> None:
        self._dictionaries = hooks, *flags
        self._key = first  # below 0: frameworks count from 0 on
        while self._key in hooks:  # another recorder's
            self._key -= 1
        for each in self._dictionaries:
            _hide(each)
        if not listed:
            vars(hooks)["values"] = partial(_values, weakref.ref(hooks))
        for each in flags:
            each[self._key] = True
        hooks[self._key] = hook  # the last: flags say how it is called

    def remove(self) -> None:
        for each in self._dictionaries:
            each.pop(self._key, None)
            if not any(map(_is_hidden, each)):
                vars(each).clear()


def _is_hidden(key: Any) -> bool:
    return isinstance(key, int) and key < 0


def _hide(hooks: OrderedDict[int, Any]) -> None:
    """Leave hidden entries out of copies and pickles of a dictionary: these look for its methods on the object."""
    alive = weakref.ref(hooks)
    vars(hooks).update(__reduce_ex__=partial(_reduced, alive), copy=partial(_shown, alive))


def _shown(alive: weakref.ref[OrderedDict[int, Any]]) -> OrderedDict[int, Any]:
    hooks = alive()
    return OrderedDict((key, hook) for key, hook in (hooks or {}).items() if not _is_hidden(key))


def _reduced(alive: weakref.ref[OrderedDict[int, Any]], protocol: SupportsIndex) -> Any:
    return _shown(alive).__reduce_ex__(protocol)


def _values(alive: weakref.ref[OrderedDict[int, Any]]) -> Any:
    return _shown(alive).values()


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

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context in which what is called is not seen by modes of the user's. What hooks call is in it."""

    def transforming(self) -> bool:
        """Whether code that runs now is being transformed (torch.func): its tensors stand for others."""

    def recomputing(self) -> bool:
        """Whether a forward call made now is activation recomputation inside a backward."""

    def learning(self) -> bool:
        """Whether what is computed now could be gone back through by a backward."""
