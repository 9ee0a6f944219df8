"""Hooks on a training's calls, gradients and optimizers."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, SupportsIndex

from padiff.errors import UsageError
from padiff.frameworks.catalog import CATALOG
from padiff.frameworks.losses import LossObserver
from padiff.records.traces import (
    GRADIENT_AVERAGE,
    MASTER_WEIGHT,
    MAX_SECOND_MOMENT,
    MOMENTUM,
    STEPS,
    OptimizerState,
    ParameterState,
    Region,
)
from padiff.system.guard import RAISING, Guard

#: The reason for recording nothing inside of a function transform (`Hooking.transforming`).
TRANSFORMED = "inside of torch.func (vmap, grad, jvp, ...) tensors stand for others and have no values"


class Handle(Protocol):
    """A registration that can be removed."""

    def remove(self) -> None: ...


def remove_all(handles: list[Handle]) -> None:
    """Remove handles, the last one first; a handle that fails stays in the list, for another attempt."""
    while handles:
        handles[-1].remove()
        handles.pop()


#: ``before(key, layer, args, kwargs)``: called before a layer's call; the key is the one that `Hooking.on_calls` got.
BeforeCall = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]


#: ``after(key, layer, output, failed)``: called after a layer's call.
AfterCall = Callable[[Any, Any, Any, bool], None]


#: ``called(name, output)``: called after a function or tensor method, with its common name.
OnCall = Callable[[str, Any], None]


#: ``replaced(args, output)``: returns the tensor that replaces a layer's output.
Replaced = Callable[[tuple[Any, ...], Any], Any]


#: ``gradient(tensor)``: called with the gradient of a tensor; a value that it returns replaces the gradient.
OnGradient = Callable[[Any], Any]


class FunctionListener(Protocol):
    """A listener that is called around the functions and operators of a model's code.

    Attributes:
        guard: stops errors of the listener and of the code that calls the listener.
    """

    guard: Guard

    @property
    def only(self) -> Collection[str] | None:
        """The common names of the functions that the listener asks for; `None` for all."""

    def function_begins(
        self, name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note that a call begins.

        Args:
            name: the function's common name.
            parameters: the names of its positional parameters, as far as they are known.

        Returns:
            A value to call `function_ended` with; `None` to skip that call.
        """

    def function_ended(self, begun: Any, output: Any) -> None:
        """Note that a call has returned its output. This method is not called after an exception."""


class Hearing(Handle, Protocol):
    """An interceptor of function calls for a listener, until it is removed. It is off at first.

    Attributes:
        companions: what ends with the interception, also where a compiler ends it.
    """

    companions: list[Handle]

    @property
    def ends_for_compilers(self) -> bool:
        """Return True if the interception ends before anything is compiled, or changes no compiled code."""

    def listen(self, on: bool) -> None:
        """Start or stop passing function calls to the listener."""

    def listen_outside(self, on: bool) -> None:
        """Start or stop passing calls outside of the model, where the loop computes its loss.

        The caller stops this before any other code is called.
        """


class Hook:
    """A function on the calls of one layer; a shallow copy that shares the layer's hooks is ignored.

    Copies and pickles of a layer have no hook (`HookEntry`). If a program copies the hook itself, the copy is a
    function of the standard library that does nothing.
    """

    __slots__ = ("_call", "_guard", "_key", "_layer", "called")

    def __init__(self, key: Any, call: Callable[..., Any], layer: Any, guard: Guard = RAISING) -> None:
        self._key, self._call, self._layer, self._guard = key, call, id(layer), guard
        #: For `padiff.frameworks.interception`.
        self.called = False

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments, returns None


class HookEntry:
    """A hook in an object's ordered dictionary of hooks, hidden from copies and pickles.

    A model that is copied or saved while it is recorded equals, to the byte, a model without padiff. The key is the
    same in every step and uses up no number of the framework, because compilers check keys, and pickles contain the
    keys of the user's hooks.

    Args:
        hooks: the dictionary in which the framework looks up hooks.
        hook: the function to call.
        flags: dictionaries that hold options of the hook by its key.
        listed: True if ``hooks.values()`` includes the hook; `False` where readers of the values copy or script them.
        first: the first key to try. Global hooks need another key than a layer's hooks, because torch looks up the
            flags of both in the layer.
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
        self._key = first  # below 0, because frameworks count from 0
        while self._key in hooks:  # another recorder's
            self._key -= 1
        for each in self._dictionaries:
            _hide(each)
        if not listed:
            vars(hooks)["values"] = partial(_values, weakref.ref(hooks))
        for each in flags:
            each[self._key] = True
        hooks[self._key] = hook  # last, because the flags determine how the hook is called

    def remove(self) -> None:
        for each in self._dictionaries:
            each.pop(self._key, None)
            if not any(map(_is_hidden, each)):
                vars(each).clear()


def _is_hidden(key: Any) -> bool:
    return isinstance(key, int) and key < 0


def _hide(hooks: OrderedDict[int, Any]) -> None:
    """Make copies and pickles of a dictionary skip hidden entries, by overriding methods on the object."""
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
    """Yield the predecessors of a node with their distance, nearest first.

    Args:
        first: the node to begin with, at distance 0; `None` yields nothing.
        before: returns the direct predecessors of a node; `None` among them is skipped.
        most: the maximum number of nodes.
    """
    waiting, visited = deque([(first, 0)] if first is not None else []), [first]
    while waiting:
        node, distance = waiting.popleft()
        yield node, distance
        for each in before(node):
            if each is not None and len(visited) < most and all(each is not item for item in visited):
                visited.append(each)
                waiting.append((each, distance + 1))


class RegionRecorder(Protocol):
    """Recorder of the compiled regions that a step calls."""

    def listen(self) -> None:
        """Record the regions that are called from now on."""

    def remove(self) -> None:
        """Stop recording."""

    def rerun(self) -> tuple[Region, ...]:
        """Run each region again eagerly, and return what was found."""


class Hooking(Protocol):
    """Hooks of a framework on a training's calls and gradients."""

    #: True if an exception of a hook in backward reaches the caller of backward unchanged.
    RAISES_AS_IT_IS: bool
    #: True if a compiler traces the code of hooks, and can't follow all of it.
    READ: bool

    def on_calls(
        self, layer: Any, key: Any, before: BeforeCall, after: AfterCall, guard: Guard = RAISING
    ) -> list[Handle]:
        """Call ``before`` and ``after`` around each call of a layer; ``guard`` stops errors of the callbacks."""

    def on_outputs(self, layer: Any, replaced: Replaced) -> Handle:
        """Replace a layer's output by the result of ``replaced(args, output)``, after all hooks set before."""

    def on_functions(self, called: OnCall, third_party: Sequence[str], guard: Guard = RAISING) -> Handle:
        """Call ``called`` after each function and tensor method that computes values, called by the user's code.

        ``third_party`` lists dotted names of custom operators (paddle only); ``guard`` stops errors of the callback.
        """

    def on_losses(self, observer: LossObserver) -> Handle:
        """Notify the observer after each call of a loss function or of a function that clips gradients."""

    def before_capture(self, capture: Callable[[], None], guard: Guard = RAISING) -> Handle | None:
        """Call ``capture`` before a CUDA graph is captured; `None` if the framework captures none here."""

    def on_compilations(self) -> Handle | None:
        """Keep the graphs that are compiled from now on; `None` if nothing was ever compiled here."""

    def on_regions(
        self, layers: Iterable[tuple[str, Any]], inside: Callable[[], str], guard: Guard
    ) -> RegionRecorder | None:
        """Record the compiled regions that are called; `None` if the framework compiles none that can be run again.

        Args:
            layers: path and layer of the model's layers.
            inside: returns the path of the layer whose call is running; empty outside of the model.
            guard: stops errors of the recording.
        """

    def behind(self, tensor: Any, most: int) -> Iterator[tuple[Any, int]]:
        """Yield the operations that computed a tensor, the last one first, each with its distance from the tensor.

        At most ``most`` operations are yielded. Two of them are the same operation if they are the same object, as long
        as the caller keeps both.
        """

    def hear_functions(self, listener: FunctionListener) -> Hearing:
        """Return an interceptor that passes the functions and operators called on this thread to a listener.

        Compiled code, and code that is being compiled, is not intercepted and stays unchanged.
        """

    def on_gradient(self, tensor: Any, gradient: OnGradient) -> Handle | None:
        """Call ``gradient`` with the tensor's gradient in each backward; return `None` if the tensor needs no gradient.

        The output of an operation gets the whole gradient of the backward; a parameter gets the gradient that this
        backward adds.
        """

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context that hides calls from the user's dispatch modes. Callbacks of hooks run inside it."""

    def transforming(self) -> bool:
        """Return True inside a function transform (torch.func), where tensors have no values of their own."""

    def recomputing(self) -> bool:
        """Return True if a forward call made now is activation recomputation inside a backward."""

    def learning(self) -> bool:
        """Return True if operations executed now are recorded for a backward."""


#: ``consumed(parameters, gradients)``: called with the gradients that the optimizer uses; `None` stands for a missing
#: gradient. Two lists, not a list of pairs: pairs of many parameters would keep the garbage collector busy.
OnConsumed = Callable[[Sequence[Any], Sequence[Any]], None]


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with the same settings in an optimizer, and these settings.

    Attributes:
        values: the settings, under the names that both frameworks share (`padiff.frameworks.settings`).
        parameters: the tensors.
    """

    values: Mapping[str, Any]
    parameters: Sequence[Any]


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of an optimizer.

    Attributes:
        rule: the update rule, under the name that both frameworks share; the full name of the class if it is not the
            framework's own.
        groups: the parameters, grouped by their settings.
        others: settings of the whole optimizer: ``clip.kind``, ``schedule``.
    """

    rule: str
    groups: Sequence[OptimizerGroup]
    others: Mapping[str, Any] = field(default_factory=dict)


class Optimizers(Protocol):
    """Operations on the optimizers of a framework."""

    def is_optimizer(self, value: Any) -> bool: ...

    def steppers(self, optimizer: Any) -> list[Any]:
        """Return the objects to `hook` for an optimizer: itself, or the inner optimizers that a wrapper calls.

        The list is empty if the value is no optimizer, or an optimizer that can't be hooked.
        """

    def hook(
        self,
        optimizer: Any,
        consumed: OnConsumed,
        stepped: Callable[[], None],
        clipping: Callable[[Any], None] = lambda norm: None,
        guard: Guard = RAISING,
    ) -> list[Handle]:
        """Call ``consumed`` with the gradients that the optimizer uses, and ``stepped`` after its step.

        If the optimizer itself clips by the norm of all gradients, ``clipping`` is called with that norm before
        clipping, as a tensor. ``guard`` stops errors of the callbacks, and of reading the optimizer for them.
        """

    def optimized(self, optimizer: Any) -> Sequence[Any]:
        """Return the parameters that an optimizer may change."""

    def learning_rates(self, optimizer: Any) -> list[float]:
        """Return the learning rate of each of the optimizer's parameter groups."""

    def settings(self, optimizer: Any) -> OptimizerSettings:
        """Return the current settings of an optimizer, as far as they are readable."""

    def settings_stamp(self, optimizer: Any) -> Any:
        """Return a value that changes when `settings` may have changed, except for learning rates. Cheap."""

    def has_state(self, optimizer: Any) -> bool:
        """Return True if an optimizer holds the state of updates that it has made, or that a checkpoint holds."""

    def state(self, optimizer: Any, names: Mapping[int, str]) -> OptimizerState:
        """Return a copy of an optimizer's state.

        Args:
            names: ``id`` of a parameter -> its site in the model, ``layer/slot``; other parameters are omitted.

        Raises:
            UsageError: the state has values that `OptimizerState` can't describe.
        """

    def set_state(self, optimizer: Any, names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
        """Set an optimizer's state: moments, counts of steps, learning rates. An error leaves the old state.

        A parameter that is missing in the state becomes like a parameter that was never stepped. Tensors are in the
        layout of this optimizer's framework. Set the model's weights first: an optimizer that keeps master weights
        copies them from the model if the state has none.

        Returns:
            A function that restores the old state.

        Raises:
            UsageError: the state does not fit; nothing was changed.
        """

    def in_float64(self, optimizer: Any) -> Callable[[], None]:
        """Prepare an optimizer for parameters that `Tensors.in_float64` has made float64; call `set_state` afterwards.

        Returns:
            A function that undoes the preparation, but not the change of the state.
        """

    def step(self, optimizer: Any) -> None:
        """Step an optimizer once, then clear its gradients."""


# Rules whose states have the same tensors and numbers, so that one can use the state of the other.
_ALIKE = frozenset({"Adam", "AdamW"})
# Rules whose update depends on the number of steps.
COUNTING = frozenset(row.rule for row in CATALOG if row.counts)


def check_rule(given: str, own: str) -> None:
    """Check that an optimizer of the rule ``own`` can use a state of the rule ``given``.

    Raises:
        UsageError: the optimizer can't use the state.
    """
    if given != own and not {given, own} <= _ALIKE:
        raise UsageError(f"the state is that of {given}, the optimizer is {own}: use the same rule on both sides")


def check_slots(
    rule: str, site: str, given: ParameterState, wanted: Collection[str] | None, shape: tuple[int, ...]
) -> None:
    """Check that a parameter's state has exactly the tensors and numbers that an optimizer needs.

    Args:
        site: the parameter, for messages.
        given: the state to check.
        wanted: names of the tensors that the optimizer needs; `None` if they are unknown.
        shape: the parameter's shape.

    Raises:
        UsageError: a tensor is missing, superfluous or of another shape, or the count of steps is missing.
    """
    names = set(given.tensors) - {MASTER_WEIGHT}
    if wanted is not None:
        missing, surplus = set(wanted) - names, names - set(wanted)
        if missing:
            raise UsageError(
                f"{site}: {rule} as it is set here needs {_words(missing)}, which the state does not have: set both "
                "optimizers alike (amsgrad, momentum, centered)"
            )
        if surplus:
            raise UsageError(
                f"{site}: {rule} as it is set here has no place for {_words(surplus)} of the state: set both "
                "optimizers alike (amsgrad, momentum, centered)"
            )
    for name, array in given.tensors.items():
        if array.shape != shape:
            raise UsageError(f"{site}: {name} is {[*array.shape]}, expected the parameter's shape, {[*shape]}")
    if rule in COUNTING and STEPS not in given.numbers:
        raise UsageError(f"{site}: the state of {rule} has no count of steps")


def _words(names: Collection[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in sorted(names))


def needed(slots: Iterable[str], settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the tensors that a rule needs under these settings, out of all tensors of the rule (common names)."""
    off = {
        MAX_SECOND_MOMENT: not settings.get("amsgrad"),
        MOMENTUM: not settings.get("momentum"),
        GRADIENT_AVERAGE: not settings.get("centered"),
    }
    return frozenset(name for name in slots if not off.get(name))
