"""Hooks that stay from one due step to the next, and follow the model: what is hooked is what there is to hook."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from padiff.frameworks.base import Framework, Handle
from padiff.model.selection import Node
from padiff.system.switches import Switches


class Observer(Protocol):
    """What hooks call. Keys are the identities of layers and parameters."""

    def before_call(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def after_call(self, key: int, output: Any, failed: bool) -> None: ...

    def after_function(self, name: str, output: Any) -> None: ...

    def add_gradient(self, key: int, gradient: Any) -> None: ...

    def consume(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None: ...

    def optimizer_stepped(self, optimizer: Any) -> None: ...


class Hooks:
    """What is on the layers, the parameters and the optimizers; it hands on to the observer of the step under way.

    Attributes:
        observer: that observer. `None` while no hook is on: it would be a cycle, and the model would live on until it
            is collected.
    """

    __slots__ = ("_framework", "_gradients", "_layers", "_nodes", "_others", "observer")

    def __init__(self, framework: Framework) -> None:
        self.observer: Observer | None = None
        self._framework = framework
        #: The layers that are hooked are kept: no other object can have their identity.
        self._nodes: Sequence[Node] = ()
        self._layers: dict[int, list[Handle]] = {}
        self._gradients: dict[int, tuple[weakref.ref[Any], Handle]] = {}
        self._others: list[Handle] = []

    def on_layers(self, nodes: Sequence[Node]) -> None:
        """Have hooks on these layers and on no others."""
        if nodes is self._nodes:
            return
        there = {id(node.layer): node.layer for node in nodes}
        for key in [key for key in self._layers if key not in there]:
            _take_off(self._layers.pop(key))
        for key, layer in there.items():
            if key not in self._layers:
                # By identity, not by node: a layer may get another path while it is hooked.
                self._layers[key] = self._framework.hooks.on_calls(
                    layer, partial(self._before_call, key), partial(self._after_call, key)
                )
        self._nodes = nodes

    def on_gradients(self, tensors: Iterable[tuple[int, Any]]) -> None:
        """Have hooks on the gradients of these parameters, given with their identities, and of no others."""
        wanted = dict(tensors)
        for key in [key for key, (alive, _) in self._gradients.items() if alive() is not wanted.get(key, self)]:
            self._gradients.pop(key)[1].remove()
        for key, tensor in wanted.items():
            if key not in self._gradients:
                handle = self._framework.hooks.on_gradient(tensor, partial(self._add, key))
                if handle is not None:
                    self._gradients[key] = weakref.ref(tensor), handle

    def on_others(self, optimizers: Sequence[Any], switches: Switches) -> None:
        """Have hooks on the optimizers, and on functional calls if they are asked for."""
        if self._others:
            return
        if switches.api_check:
            self._others.append(self._framework.hooks.on_functions(self._after_function, switches.third_party))
        for optimizer in optimizers:
            self._others += self._framework.optimizers.hook(
                optimizer, partial(self._consume, optimizer), partial(self._stepped, optimizer)
            )

    def remove(self) -> None:
        """Take every hook off; may be called twice."""
        self.observer, self._nodes = None, ()
        while self._layers:
            _take_off(self._layers.popitem()[1])
        while self._gradients:
            self._gradients.popitem()[1][1].remove()
        _take_off(self._others)

    # -- what the hooks call -------------------------------------------------------------------------------

    def _before_call(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.observer is not None:
            self.observer.before_call(key, layer, args, kwargs)

    def _after_call(self, key: int, layer: Any, output: Any, failed: bool) -> None:
        if self.observer is not None:
            self.observer.after_call(key, output, failed)

    def _after_function(self, name: str, output: Any) -> None:
        if self.observer is not None:
            self.observer.after_function(name, output)

    def _add(self, key: int, gradient: Any) -> None:
        if self.observer is not None:
            self.observer.add_gradient(key, gradient)

    def _consume(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        if self.observer is not None:
            self.observer.consume(optimizer, pairs)

    def _stepped(self, optimizer: Any) -> None:
        if self.observer is not None:
            self.observer.optimizer_stepped(optimizer)


def _take_off(handles: list[Handle]) -> None:
    while handles:
        handles.pop().remove()
