"""Finds the model and the optimizer of a script that does not record by itself, and records them.

The first step is watched only: of the layers that are called in it, the first one that owns all that the optimizer
holds is the model. Recording begins with the second step; a step ends when the optimizer has stepped.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from padiff.frameworks import framework_of
from padiff.frameworks.base import Handle
from padiff.model.tree import walk
from padiff.recorder import Recorder, record
from padiff.recorder.doctor_recorder import DoctorRecorder, Enough, Plan

#: What the finder writes where it gives up.
REFUSED = "refused.txt"


class ModelFinder:
    """Looks on until it has found a model, or until the script opens a recorder of its own."""

    def __init__(self) -> None:
        self._called: dict[int, Any] = {}
        self._recorder: Recorder | None = None
        self._optimizer: Any = None
        self._off: list[Callable[[], None]] = []
        self._tops: list[Handle] = []
        self._gone = False
        DoctorRecorder.leaving.append(self.leave)
        hooks: dict[str, Callable[[ModuleType], None]] = {
            "torch.optim.optimizer": self._on_torch,
            "paddle.optimizer.optimizer": self._on_paddle,
        }
        sys.meta_path.insert(0, _AfterImport(hooks))

    def leave(self) -> None:
        """The script records by itself: what was found is forgotten."""
        if not self._gone:
            self._gone = True
            self._stop_looking()
            while self._tops:
                self._tops.pop().remove()
            if self._recorder is not None:
                self._recorder.close()

    # -- both frameworks -----------------------------------------------------------------------------------

    def _call(self, layer: Any) -> None:
        self._called.setdefault(id(layer), layer)

    def _stepped(self, optimizer: Any) -> None:
        if self._gone:
            return
        if self._recorder is not None:
            if optimizer is not self._optimizer:
                self._refuse("several optimizers step in it")
            self._recorder.try_dump()
            return
        model = self._model(optimizer)
        self._stop_looking()
        if model is None:
            self._refuse("no layer that it calls owns all parameters that the optimizer holds")
        self._optimizer = optimizer
        DoctorRecorder.leaving.remove(self.leave)
        recorder = record(model, "found", optimizer=optimizer, start_step=1)
        DoctorRecorder.leaving.append(self.leave)
        recorder.open()
        recorder.attach()
        self._recorder = recorder

    def _model(self, optimizer: Any) -> Any:
        """The first layer called that owns all that the optimizer holds; what is around others is called first."""
        for layer in self._called.values():
            framework = framework_of(layer)
            held = {id(tensor) for tensor in framework.optimizers.optimized(optimizer)}
            owned = {id(t) for node in walk(layer, framework) for _, t, _ in framework.layers.parameters(node.layer)}
            if held and held <= owned:
                return layer
        return None

    def _stop_looking(self) -> None:
        while self._off:
            self._off.pop()()
        self._called.clear()

    def _refuse(self, why: str) -> None:
        self.leave()
        (Path(Plan.from_environment().folder) / REFUSED).write_text(why, encoding="utf-8")
        raise Enough

    # -- each framework ------------------------------------------------------------------------------------

    def _on_torch(self, optimizers: ModuleType) -> None:
        modules = importlib.import_module("torch.nn.modules.module")
        calls = modules.register_module_forward_pre_hook(lambda module, _: self._call(module))
        self._off.append(calls.remove)
        # Not on the optimizer itself: recording changes its hooks just then. These are called after its own.
        optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))

    def _on_paddle(self, optimizers: ModuleType) -> None:
        cls, finder = optimizers.Optimizer, self
        begin = cls.__init__

        def begun(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            finder._on_paddle_optimizer(optimizer)

        cls.__init__ = begun

    def _on_paddle_optimizer(self, optimizer: Any) -> None:
        if self._gone:
            return
        if not self._off and self._recorder is None:
            layer_class = importlib.import_module("paddle.nn.layer.layers").Layer
            call = layer_class.__call__

            def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
                self._call(layer)
                return call(layer, *args, **kwargs)

            layer_class.__call__ = called
            self._off.append(lambda: setattr(layer_class, "__call__", call))
        self._on_top(optimizer)

    def _on_top(self, optimizer: Any) -> None:
        framework = importlib.import_module("padiff.frameworks.paddle").FRAMEWORK
        handles: list[Handle] = []

        def stepped() -> None:
            # This hook is off while the recorder's come and go, and on above them again: it is to be called last.
            while handles:
                handles.pop().remove()
            self._stepped(optimizer)
            if not self._gone:
                self._on_top(optimizer)

        handles += framework.optimizers.hook(optimizer, lambda _: None, stepped)
        self._tops += handles


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back once a module was imported: the script imports what it wants, when it wants to."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        imported = self._waiting.pop(name, None)
        if imported is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, imported)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, imported: Callable[[ModuleType], None]) -> None:
        self._loader, self._imported = loader, imported

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._imported(module)
