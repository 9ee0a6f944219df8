"""Hooks on a model's layers, gradients, optimizers and loss functions, kept from one due step to the next."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import Handle, remove_all
from padiff.frameworks.interception import naming_users_line
from padiff.frameworks.losses import ClipCall, LossCall, LossObserver
from padiff.model.nested import flatten
from padiff.model.selection import Node
from padiff.recorder.calls import Calls
from padiff.recorder.losses import Losses
from padiff.recorder.template_matcher import Planning
from padiff.recorder.tracer import Prelude
from padiff.records import ROOT, is_below
from padiff.system.guard import Guard, reraise_from_signal_handler
from padiff.system.terminal import Switches, warn

# Stack frames per nested layer (Python 3.11, torch 2.13; one less in paddle): the layer's `__call__`, two functions of
# the framework, `forward`. A hook adds one frame.
_FRAMES = 4
# Stack frames reserved for recording a call and for the callers of the training loop; 40 were measured.
_RESERVE = 120


def within_reach(nodes: Sequence[Node]) -> Sequence[Node]:
    """Return the layers that can have hooks without a RecursionError in the training.

    All layers are returned, except in extremely nested models. A warning names the depth from which on layers are left
    out.
    """
    deepest = max(map(_depth, nodes), default=0)
    frames = sys.getrecursionlimit() - _RESERVE
    if (_FRAMES + 1) * deepest <= frames:
        return nodes
    reach = max(frames - _FRAMES * deepest, 0)
    warn(
        f"the model's layers are nested {deepest} deep; calls of those deeper than {reach} are not recorded, "
        f"for Python nests {sys.getrecursionlimit()} calls at most (sys.setrecursionlimit)"
    )
    return [node for node in nodes if _depth(node) <= reach]


def _depth(node: Node) -> int:
    return 0 if node.path == ROOT else node.path.count(".") + 1


class Observer(Protocol):
    """Receiver of the hooks' events. Keys are the identities (``id()``) of layers and parameters.

    Attributes:
        losses: recorder of loss functions, or None.
        planning: plan of the step. A step that follows a plan gets layer calls first; the observer gets only those
            that the plan does not expect.
        autocast_open: True until the autocast state of the model is known; until then the observer gets all calls.
        hears: True if functions that choose are heard, by ``functions``.
    """

    planning: Planning
    autocast_open: bool
    hears: bool
    functions: Any

    @property
    def losses(self) -> Losses | None: ...

    def before_call(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def after_call(self, key: int, output: Any, failed: bool) -> None: ...

    def after_function(self, name: str, output: Any) -> None: ...

    def backward_begins(self) -> None: ...

    def backward_ended(self, tensor: Any) -> None: ...

    def add_gradient(self, key: int, gradient: Any) -> None: ...

    def consume(self, optimizer: Any, parameters: Sequence[Any], gradients: Sequence[Any]) -> None: ...

    def optimizer_stepped(self, optimizer: Any) -> None: ...


class Hooks:
    """Hooks on the layers, the parameters and the optimizers, which pass events to the current step's observer.

    Args:
        guard: handler of errors in each hook.

    Attributes:
        observer: the current step's observer; None while no hook is attached, to avoid a reference cycle that would
            keep the model alive until garbage collection.
    """

    __slots__ = (
        "__weakref__", "_framework", "_gradients", "_layers", "_losses", "_nodes", "_others", "guard", "observer",
    )  # fmt: skip

    def __init__(self, framework: Framework, guard: Guard) -> None:
        self.guard = guard
        self.observer: Observer | None = None
        self._framework = framework
        #: Keeps the hooked layers alive, so that no other object can get the identity of one.
        self._nodes: Sequence[Node] = ()
        self._layers: dict[int, list[Handle]] = {}
        self._gradients: dict[int, tuple[weakref.ref[Any], Handle]] = {}
        self._others: list[Handle] = []
        self._losses: list[Handle] = []

    def on_layers(self, nodes: Sequence[Node]) -> None:
        """Attach hooks to these layers, and detach the hooks of all other layers."""
        if nodes is self._nodes:
            return
        layers = {id(node.layer): node.layer for node in self._outside_compiled(within_reach(nodes))}
        for key in [key for key in self._layers if key not in layers]:
            remove_all(self._layers.pop(key))
        before, after = self._before_call, self._after_call
        for key, layer in layers.items():
            if key not in self._layers:
                # By identity, not by node: the path of a hooked layer may change.
                self._layers[key] = self._framework.hooks.on_calls(layer, key, before, after, self.guard)
        self._nodes = nodes

    def _outside_compiled(self, nodes: Sequence[Node]) -> Iterable[Node]:
        """Return the layers outside of compiled ones, inside which a hook would make the compiler compile again."""
        if self._framework.hooks.READ:
            return nodes
        compiled = [node.path for node in nodes if self._framework.layers.compiled(node.layer)]
        if not compiled:
            return nodes
        return [node for node in nodes if not any(is_below(node.path, path) for path in compiled)]

    def on_gradients(self, tensors: Iterable[tuple[int, Any]]) -> None:
        """Attach hooks to the gradients of these parameters, and detach those of all other parameters.

        Args:
            tensors: pairs of a parameter's identity and the parameter.
        """
        parameters = dict(tensors)
        for key in [key for key, (alive, _) in self._gradients.items() if alive() is not parameters.get(key, self)]:
            self._gradients.pop(key)[1].remove()
        for key, tensor in parameters.items():
            if key not in self._gradients:
                handle = self._framework.hooks.on_gradient(tensor, partial(self._add, key))
                if handle is not None:
                    self._gradients[key] = weakref.ref(tensor), handle

    def on_others(self, optimizers: Sequence[Any], switches: Switches) -> None:
        """Attach hooks to the optimizers, and to functional calls if the switches request these."""
        if self._others:
            return
        self._others.append(naming_users_line())
        if switches.api_check:
            functions = self._framework.hooks.on_functions(self._after_function, switches.third_party, self.guard)
            self._others.append(functions)
        for optimizer in optimizers:
            self._others += self._framework.optimizers.hook(
                optimizer,
                partial(self._consume, optimizer),
                partial(self._stepped, optimizer),
                self._clipping,
                self.guard,
            )

    def on_losses(self, wanted: bool) -> None:
        """Attach (True) or detach (False) the hooks on loss functions."""
        if wanted and not self._losses:
            handle = self._framework.hooks.on_losses(self.loss_observer)
            # The functions refer to their hooks: without this, they would keep a recording and its model alive.
            weakref.finalize(self, handle.remove)
            self._losses.append(handle)
        elif not wanted:
            remove_all(self._losses)

    @property
    def loss_observer(self) -> LossObserver:
        """Return an observer that passes losses and backwards to the current step's observer."""
        return _LossHook(self)

    @property
    def hears_losses(self) -> bool:
        """Return True if loss functions and clipping functions are hooked."""
        return bool(self._losses)

    def remove(self) -> None:
        """Detach all hooks; may be called twice."""
        self.observer, self._nodes = None, ()
        for handles in self._layers.values():
            remove_all(handles)
        self._layers.clear()
        for _, handle in self._gradients.values():
            handle.remove()
        self._gradients.clear()
        remove_all(self._others)
        remove_all(self._losses)

    # -- callbacks of hooks --------------------------------------------------------------------------------

    def _before_call(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observer = self.observer
        if observer is None:
            return
        if observer.hears:
            observer.functions.pause()
        following = observer.planning.following
        if following is None or observer.autocast_open or not following.begins(key, layer, args, kwargs):
            observer.before_call(key, layer, args, kwargs)
        if observer.hears:
            observer.functions.resume()

    def _after_call(self, key: int, layer: Any, output: Any, failed: bool) -> None:
        observer = self.observer
        if observer is None:
            return
        if observer.hears:
            observer.functions.pause()
        following = observer.planning.following
        if following is None or failed or len(following.running) < 2 or not following.ends(key, output):
            observer.after_call(key, output, failed)
        else:
            following.running.pop()
        if observer.hears:
            observer.functions.resume()

    def _after_function(self, name: str, output: Any) -> None:
        if self.observer is not None:
            self.observer.after_function(name, output)

    def _add(self, key: int, gradient: Any) -> None:
        self.guard.run(self._add_aside, key, gradient)

    def _add_aside(self, key: int, gradient: Any) -> None:
        if self.observer is not None:
            with self._framework.hooks.aside():
                self.observer.add_gradient(key, gradient)

    def _consume(self, optimizer: Any, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        if self.observer is not None:
            self.observer.consume(optimizer, parameters, gradients)

    def _clipping(self, norm: Any) -> None:
        if self.observer is not None and self.observer.losses is not None:
            self.observer.losses.clipping(norm)

    def _stepped(self, optimizer: Any) -> None:
        if self.observer is not None:
            self.observer.optimizer_stepped(optimizer)


class _LossHook:
    """Hook on loss functions, which passes their calls to the current step's observer."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks, self.guard = weakref.ref(hooks), hooks.guard

    @property
    def losses(self) -> Losses | None:
        """Return the loss recorder of the current step, or None."""
        hooks = self._hooks()
        return hooks.observer.losses if hooks is not None and hooks.observer is not None else None

    def is_listening(self) -> bool:
        losses = self.losses
        return losses is not None and losses.is_listening()

    def loss(self, call: LossCall, others: Sequence[LossObserver]) -> None:
        losses = self.losses
        if losses is not None:
            losses.loss(call, _rivals(others))

    def clip(self, call: ClipCall, others: Sequence[LossObserver]) -> None:
        losses = self.losses
        if losses is not None:
            losses.clip(call, _rivals(others))

    def scaled(self, scale: float) -> None:
        losses = self.losses
        if losses is not None:
            losses.scaled(scale)

    def backward_begins(self) -> None:
        losses = self.losses
        if losses is not None:
            losses.backward_begins()
        hooks = self._hooks()
        if hooks is not None and hooks.observer is not None:
            hooks.observer.backward_begins()

    def backward(self, tensor: Any) -> None:
        losses = self.losses
        if losses is not None:
            losses.backward(tensor)
        hooks = self._hooks()
        if hooks is not None and hooks.observer is not None:
            hooks.observer.backward_ended(tensor)


def _rivals(others: Sequence[LossObserver]) -> list[Losses]:
    hooks = [observer for observer in others if isinstance(observer, _LossHook)]
    return [losses for losses in (hook.losses for hook in hooks) if losses is not None]


class TrainingHistory:
    """Evidence that a model is trained, collected over the steps of a recorder.

    Attributes:
        trains: True if the recorder has an optimizer, or a backward has followed a call in training mode.
        parts: paths of layers that the loop has called directly in training mode with gradients enabled.
    """

    def __init__(self, trains: bool = False) -> None:
        self.trains = trains
        self.parts: set[str] = set()


class EvaluationFilter:
    """Filter that decides at the beginning of each call of the loop if the step only counts this call.

    Args:
        calls: counter of the step's calls.
        history: evidence from earlier steps.
    """

    def __init__(self, framework: Framework, calls: Calls, history: TrainingHistory) -> None:
        self._framework, self._calls, self._history = framework, calls, history
        #: True if the loop's last call was only counted.
        self.active = False

    def check(self, node: Node, root: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if a call is evaluation, and count the call in this case.

        Args:
            node: the called layer.
            root: the model; the mode of the call is the model's mode.
        """
        learning = self._framework.hooks.learning()
        self.active = self._is_evaluation(node, root, learning)
        if self.active:
            self._calls.count_evaluation(node.path, self._shapes(args, kwargs), learning)
        elif learning and node.layer.training:
            self._history.parts.add(node.path)
        return self.active

    def _is_evaluation(self, node: Node, root: Node, learning: bool) -> bool:
        if not root.layer.training:
            # A step with training calls drops the records of evaluation calls in the end anyway.
            return self._calls.has_trained or (not learning and self._history.trains)
        return not learning and not node.layer.training and node.path in self._history.parts

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        tensors = self._framework.tensors
        try:
            return tuple(tuple(tensors.shape(each)) for _, each in flatten((args, kwargs), "", tensors.is_tensor))
        except Exception as error:  # a tensor without a shape
            reraise_from_signal_handler(error)
            return ()

    def note_gradient(self) -> None:
        """Note that a parameter has received a gradient."""
        if not self._history.trains and self._calls.has_trained:
            self._history.trains = True


class EvaluationObserver:
    """Observer that replaces a step's observer until an evaluation call ends, and records nothing.

    Args:
        key: identity of the called layer.
        hooks: the hooks that call the step's observer.
    """

    autocast_open = hears = False
    losses = functions = None
    planning: Any = SimpleNamespace(following=None)

    def __init__(self, key: int, hooks: Hooks) -> None:
        self._key, self._hooks, self._depth = key, hooks, 1
        self._observer, hooks.observer = hooks.observer, self

    def before_call(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if key == self._key:
            self._depth += 1

    def after_call(self, key: int, output: Any, failed: bool) -> None:
        if key == self._key:
            self._depth -= 1
            if not self._depth and self._hooks.observer is self:
                self._hooks.observer = self._observer

    def after_function(self, name: str, output: Any) -> None: ...

    def backward_begins(self) -> None: ...

    def backward_ended(self, tensor: Any) -> None: ...

    def add_gradient(self, key: int, gradient: Any) -> None: ...

    def consume(self, optimizer: Any, parameters: Sequence[Any], gradients: Sequence[Any]) -> None: ...

    def optimizer_stepped(self, optimizer: Any) -> None: ...


@dataclass(frozen=True)
class CaptureOptions:
    """Optional parts of a capture; the fields are arguments of `padiff.recorder.capture.Capture`."""

    stepped: Callable[[int], None] | None = None
    stacks: bool = False
    consuming: Callable[[Any], None] | None = None
    functions: bool = False
    losses: bool = False
    packing: bool = False
    whole: bool = False
    loss_logged: bool = False
    history: TrainingHistory = field(default_factory=TrainingHistory)
    prelude: Prelude | None = None
