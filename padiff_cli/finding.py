"""Finds the model and the optimizer of a loop that does not record by itself.

Of the layers that are called, the first one that owns all that the optimizer holds is the model. A step ends when the
optimizer has stepped. What is done with both is up to who derives from `ModelFinder`.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

from padiff.frameworks import framework_of
from padiff.frameworks.hooking import Handle
from padiff.model.tree import walk
from padiff.recorder import Recorder
from padiff_cli.after_import import AfterImport

SEVERAL = "several optimizers step in it"
NO_OWNER = "no layer that it calls owns all parameters that the optimizer holds"


class ModelFinder(ABC):
    """Looks on until it has found a model, or until the script opens a recorder of its own.

    Attributes:
        model, optimizer: what was found; `None` before.
        gone: whether it looks no more.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.optimizer: Any = None
        self.gone = False
        self._called: dict[int, Any] = {}
        self._made: list[tuple[weakref.ref[Any], str]] = []
        self._off: list[Callable[[], None]] = []
        self._watched: set[Any] = set()
        self._patches: list[Callable[[], None]] = []
        self._tops: dict[int, list[Handle]] = {}
        self._looking = True
        Recorder.leaving.append(self._records_itself)
        self._imports = AfterImport(
            {"torch.optim.optimizer": self._on_torch, "paddle.optimizer.optimizer": self._on_paddle}
        )

    def leave(self) -> None:
        """Look no more, and take off all that this is done with."""
        if self.gone:
            return
        self.gone = True
        self._stop_looking()
        self._imports.remove()
        while self._tops:
            for handle in reversed(self._tops.popitem()[1]):
                handle.remove()
        while self._patches:
            self._patches.pop()()
        if self._records_itself in Recorder.leaving:
            Recorder.leaving.remove(self._records_itself)
        self._end()

    def _records_itself(self) -> None:
        """The script makes a recorder of its own."""
        self.leave()

    # -- for those who derive --------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> None:
        """Model and optimizer are found: begin to record them."""

    @abstractmethod
    def _end_step(self) -> None:
        """The optimizer stepped."""

    @abstractmethod
    def _end(self) -> None:
        """Nothing more is seen: end what was begun."""

    @abstractmethod
    def _refuse(self, why: str) -> None:
        """What trains is not known."""

    def _decides(self, optimizer: Any) -> bool:
        """Whether the first optimizer that steps is the one to record."""
        return True

    # -- both frameworks -------------------------------------------------------------------------------------

    def optimizers(self) -> list[Any]:
        """The optimizers that were made, are still there, and hold parameters."""
        found = []
        for made, name in self._made:
            optimizer = made()
            if optimizer is not None:
                framework = importlib.import_module(f"padiff.frameworks.{name}").FRAMEWORK
                if len(framework.optimizers.optimized(optimizer)):
                    found.append(optimizer)
        return found

    def _call(self, layer: Any) -> None:
        """A layer is called, before a model is found."""
        self._called.setdefault(id(layer), layer)

    def _stepped(self, optimizer: Any) -> None:
        if self.gone:
            return
        if self.model is not None:
            if optimizer is self.optimizer:
                self._end_step()
            else:
                self._refuse(SEVERAL)
        elif self._decides(optimizer) and not self.gone:
            model = next((layer for layer in self._called.values() if self._owns(layer, optimizer)), None)
            if model is None:
                self._stop_looking()
                self._refuse(NO_OWNER)
            else:
                self._found(model, optimizer)

    def _found(self, model: Any, optimizer: Any) -> None:
        self._stop_looking()
        self.model, self.optimizer = model, optimizer
        topped = self._off_top(optimizer)
        # The recorder that is made now is ours.
        Recorder.leaving.remove(self._records_itself)
        try:
            self._begin()
        finally:
            if not self.gone:
                Recorder.leaving.append(self._records_itself)
                if topped:
                    self._on_top(optimizer)

    def _owns(self, layer: Any, optimizer: Any) -> bool:
        framework = framework_of(layer)
        if not framework.optimizers.is_optimizer(optimizer):
            return False
        held = {id(tensor) for tensor in framework.optimizers.optimized(optimizer)}
        owned = {id(t) for node in walk(layer, framework) for _, t, _ in framework.layers.parameters(node.layer)}
        return bool(held) and held <= owned

    def _stop_looking(self) -> None:
        self._looking = False
        while self._off:
            self._off.pop()()
        self._called.clear()

    def _watch_calls(self, layer_class: Any) -> None:
        if layer_class in self._watched:
            return
        self._watched.add(layer_class)
        # Not by a hook: what is put on a layer inside of one is not called in the same call any more.
        call = layer_class.__call__

        @functools.wraps(call)
        def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._looking:
                self._call(layer)
            return call(layer, *args, **kwargs)

        layer_class.__call__ = called
        self._off.append(lambda: setattr(layer_class, "__call__", call))

    def _watch_begin(self, kind: Any, made: Callable[[Any], None]) -> None:
        """Hear of each optimizer whose ``__init__`` is this class's, once that is over."""
        begin = kind.__init__

        @functools.wraps(begin)
        def begun(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            if not self.gone:
                made(optimizer)

        kind.__init__ = begun
        self._patches.append(lambda: setattr(kind, "__init__", begin))

    # -- each framework --------------------------------------------------------------------------------------

    def _on_torch(self, optimizers: ModuleType) -> None:
        def made(optimizer: Any) -> None:
            self._made.append((weakref.ref(optimizer), "torch"))

        self._watch_calls(importlib.import_module("torch.nn.modules.module").Module)
        self._watch_begin(optimizers.Optimizer, made)
        # Not on the optimizer itself: recording changes its hooks just then. These are called after its own.
        stepped = optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        self._patches.append(stepped.remove)

    def _on_paddle(self, optimizers: ModuleType) -> None:
        # Not all call the ``__init__`` of the class that they derive from: AdamW does not.
        cls, watched = optimizers.Optimizer, set()

        def made(owner: Any, optimizer: Any) -> None:
            if _beginning(type(optimizer)) is owner:  # and not one that derives from it, half made
                self._made.append((weakref.ref(optimizer), "paddle"))
                self._on_paddle_optimizer(optimizer)

        def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
            owner = _beginning(kind)
            if owner not in watched and not self.gone:
                watched.add(owner)
                self._watch_begin(owner, functools.partial(made, owner))
            return object.__new__(kind)

        # It stays: once there was one, Python takes ``object``'s for a mistake.
        cls.__new__ = new

    def _on_paddle_optimizer(self, optimizer: Any) -> None:
        if self._looking:
            self._watch_calls(importlib.import_module("paddle.nn.layer.layers").Layer)
        self._on_top(optimizer)

    def _on_top(self, optimizer: Any) -> None:
        """Have the end of its step heard of after everybody else on it: after the recorder, above all."""
        self._off_top(optimizer)
        framework = importlib.import_module("padiff.frameworks.paddle").FRAMEWORK

        def stepped() -> None:
            # Off while the recorder's hooks come and go, and on above them again.
            self._off_top(optimizer)
            self._stepped(optimizer)
            if not self.gone:
                self._on_top(optimizer)

        self._tops[id(optimizer)] = framework.optimizers.hook(optimizer, lambda *_: None, stepped)

    def _off_top(self, optimizer: Any) -> bool:
        handles = self._tops.pop(id(optimizer), None)
        for handle in reversed(handles or ()):
            handle.remove()
        return handles is not None


def _beginning(kind: Any) -> Any:
    """The class whose ``__init__`` a class has."""
    return next(one for one in kind.__mro__ if "__init__" in vars(one))
