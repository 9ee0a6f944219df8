"""Search for the models and the optimizers of a training loop that does not record by itself.

The finder searches the called layers and the script's variables for layers that own the parameters of the optimizers.
A step ends when the last optimizer of an iteration has stepped. Subclasses of `ModelFinder` record the model.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from padiff.errors import PadiffError
from padiff.frameworks import framework_of
from padiff.frameworks.hooking import Handle
from padiff.frameworks.interception import DirectCallWatch, Override
from padiff.model.tree import walk
from padiff.recorder import Recorder
from padiff.recorder.layers import group_of
from padiff.recorder.model_copies import Copy, copies_of, named_models, parameters_of
from padiff.system.frames import variables
from padiff.system.guard import reraise_from_signal_handler
from padiff_cli.after_import import AfterImport
from padiff_cli.guard import guarded
from padiff_cli.run.iterations import Iterations, called_around, stepping_around

SEVERAL = "several optimizers step in it"


class ModelFinder(ABC):
    """Watcher of layers and optimizers, until the script opens a recorder of its own.

    Attributes:
        model, optimizers: the recorded ones; `None` and empty until the finder has found a model.
        unowned: names of the tensors of the optimizers that no layer owns.
        copies: copies of the models that the loop keeps, by name.
        gone: True once the finder watches nothing any more.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.optimizers: list[Any] = []
        self.unowned: Sequence[str] = ()
        self.copies: Mapping[str, Copy] = {}
        self.gone = False
        self._iterations = Iterations(())
        self._called: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._made: list[tuple[weakref.ref[Any], str]] = []
        self._watching = True
        self._watches: list[Callable[[], None]] = []
        self._classes: list[tuple[Any, str, Callable[[Any, Any], Any]]] = []
        self._patches: list[Callable[[], None]] = []
        self._direct: list[DirectCallWatch] = []
        self._tops: dict[int, list[Handle]] = {}
        self._turn = threading.RLock()
        Recorder.leaving.append(self._records_itself)
        self._imports = AfterImport(
            {
                "torch.optim.optimizer": self._on_torch,
                "paddle.nn.layer.layers": self._on_paddle_layers,
                "paddle.optimizer.optimizer": self._on_paddle,
            }
        )

    def follow_fork(self, parent: ModelFinder | None = None) -> None:
        """Go on in a fork of the process, with the optimizers that a finder of the parent process has seen."""
        self._turn = threading.RLock()  # a thread that is gone may have held it
        if parent is not None:
            self._made = [*parent._made]

    def stop(self) -> None:
        """Stop watching, and remove all hooks and patches."""
        if self.gone:
            return
        self.gone = True
        self._watch(False)
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
        """Stop watching, because the script opens a recorder of its own."""
        self.stop()

    def give_up(self, error: Exception) -> None:
        """Stop watching, because of an error inside of padiff."""
        try:
            self._refuse(f"padiff failed: {type(error).__name__}: {error}")
        except Exception:
            self.gone = True

    # -- for subclasses --------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> None:
        """Begin to record; called when ``model`` and ``optimizers`` are set."""

    @abstractmethod
    def _end_step(self) -> None:
        """End a recorded step; called when the last optimizer of an iteration has stepped."""

    @abstractmethod
    def _end(self) -> None:
        """End the recording; called when the finder stops watching."""

    @abstractmethod
    def _refuse(self, why: str) -> None:
        """Report the reason for which the training cannot be recorded, and stop."""

    def _call(self, layer: Any) -> None:
        """Remember a layer; called when the layer is about to run."""
        self._called.setdefault(id(layer), layer)

    def _before_step(self, optimizer: Any) -> None:
        """Do nothing; called when an optimizer is about to step (not for every kind of optimizer)."""
        return

    def _step(self, optimizer: Any) -> None:
        """Find the models or end a recorded step; called when an optimizer has stepped."""
        frame = sys._getframe(1)
        if any(optimizer is each for each in self.optimizers):
            if self._iterations.optimizer_stepped(optimizer, frame):
                self._end_step()
        elif self.model is not None:
            self._refuse(SEVERAL)
        else:
            optimizers = [optimizer, *self._others(optimizer)]
            self._iterations.watch(optimizers)
            if self._iterations.optimizer_stepped(optimizer, frame):  # a recorded step begins where an iteration does
                self._find(optimizers, frame)

    def _others(self, optimizer: Any) -> list[Any]:
        """Return the other optimizers that the loop around an optimizer's step calls."""
        around = stepping_around(sys._getframe(1), self._alive())
        return [each for each in around if each is not optimizer]

    # -- models ----------------------------------------------------------------------------------------------

    def _alive(self) -> list[Any]:
        """Return the optimizers that still exist and have parameters."""
        optimizers = []
        for reference, name in self._made:
            optimizer = reference()
            if optimizer is not None and len(_framework(name).optimizers.optimized(optimizer)):
                optimizers.append(optimizer)
        return optimizers

    def _find(self, optimizers: Sequence[Any], frame: FrameType | None, layer: Any = None) -> None:
        """Search the models that own the optimizers' parameters, and begin to record them and what no model owns."""
        models, tensors = self._select(optimizers, frame, layer)
        models = {name: _without_fabric(model) for name, model in models.items()}
        self.unowned = [*tensors]
        named = named_models(models, frame)
        self.copies = self._copies(named, frame)
        others = {name: copy.layer for name, copy in self.copies.items()}
        others |= self._frozen({**named, **others}, frame, layer)
        if others:
            models = {**named, **others}
        if len(models) == 1 and not tensors:
            self._start(next(iter(models.values())), optimizers)
        else:
            current = {name: copy.current for name, copy in self.copies.items()}
            self._start(group_of(self._framework_name(optimizers), models, tensors, current), optimizers)

    def _copies(self, models: Mapping[str, Any], frame: FrameType | None) -> dict[str, Copy]:
        """Return the copies of the models that the loop keeps; empty if the search fails: the models are recorded."""
        try:
            optimizers = [(each(), _framework(name).optimizers) for each, name in self._made]
            owned = {id(t) for each, kind in optimizers if each is not None for t in kind.optimized(each)}
            return copies_of(models, frame, owned)
        except Exception as error:
            reraise_from_signal_handler(error)
            return {}

    def _frozen(self, models: Mapping[str, Any], frame: FrameType | None, layer: Any = None) -> dict[str, Any]:
        """Return the frozen networks that the loop may compute its loss with, by name.

        Args:
            models: what is recorded anyway.
            layer: a layer that the loop is calling.
        """
        seen = {key for model in models.values() for key in _owned(model)}
        values = list(variables(frame))
        held = [(label, value) for label, value in values if _has_parameters(value)]
        called = called_around(frame, [value for _, value in held])
        chosen = set(map(id, called))
        named = [(label, value) for label, value in held if id(value) in chosen or _is_frozen(value)]
        if layer is not None and not _owned(layer) & seen:
            label = next((label for label, value in values if value is layer), type(layer).__name__.lower())
            named.append((label, layer))
        frozen: dict[str, Any] = {}
        for label, value in sorted(named, key=lambda item: -len(_owned(item[1]))):  # what holds others comes first
            if seen.isdisjoint(owned := _owned(value)):
                seen |= owned
                while label in models or label in frozen:
                    label += "_"
                frozen[label] = value
        return frozen

    def _start(self, model: Any, optimizers: Sequence[Any]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self._iterations = Iterations(self.optimizers)
        topped = [optimizer for optimizer in optimizers if self._off_top(optimizer)]
        with self._own_recorder():
            self._begin()
        if not self.gone:
            for optimizer in topped:
                self._on_top(optimizer)

    @contextmanager
    def _own_recorder(self) -> Iterator[None]:
        """Keep the finder watching although a recorder is opened, within the context."""
        Recorder.leaving.remove(self._records_itself)
        try:
            yield
        finally:
            if not self.gone:
                Recorder.leaving.append(self._records_itself)

    def _select(
        self, optimizers: Sequence[Any], frame: FrameType | None, layer: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the owners of the optimizers' parameters, and the tensors without an owner, both by name.

        Args:
            layer: a layer that is being called.
        """
        framework = _framework(self._framework_name(optimizers))
        optimized = {id(tensor): tensor for each in optimizers for tensor in framework.optimizers.optimized(each)}
        called = [each for each in (layer, *self._called.values()) if framework.layers.is_model(each)]
        owned = {id(each): _owned(each) for each in called}
        for each in called:
            if optimized.keys() <= owned[id(each)]:
                return {"": each}, {}
        named = [(label, value) for label, value in variables(frame) if framework.layers.is_model(value)]
        named += [(type(each).__name__.lower(), each) for each in called]
        order = {id(each): place for place, each in enumerate(reversed(called), 1)}
        candidates: dict[int, tuple[str, Any]] = {}
        for label, value in named:
            if id(value) not in candidates:
                owned.setdefault(id(value), _owned(value))
                if owned[id(value)] & optimized.keys():
                    candidates[id(value)] = label, value
        models: dict[str, Any] = {}
        unowned = set(optimized)
        while candidates:
            # The layer that owns most of the remaining parameters; then called layers, the smallest, the first called.
            key = max(
                candidates,
                key=lambda k: (len(owned[k] & unowned), k in order, -len(owned[k] - optimized.keys()), order.get(k, 0)),
            )
            label, value = candidates.pop(key)
            if not owned[key] & unowned:
                break
            unowned -= owned[key]
            while label in models:
                label += "_"
            models[label] = value
        places = {label: place for place, (label, _) in enumerate(reversed(named))}
        labels = {id(value): label for label, value in reversed([*variables(frame)]) if id(value) in unowned}
        tensors: dict[str, Any] = {}
        for k, tensor in enumerate(optimized.values()):
            if id(tensor) in unowned:
                label = labels.get(id(tensor), f"parameter_{k}")
                tensors[label if label not in tensors else f"{label}_{k}"] = tensor
        return dict(sorted(models.items(), key=lambda item: -places.get(item[0], 0))), tensors

    def _framework_name(self, optimizers: Sequence[Any]) -> str:
        return next(name for reference, name in self._made if reference() is optimizers[0])

    # -- both frameworks -------------------------------------------------------------------------------------

    def _watch(self, on: bool) -> None:
        """Switch the watching of layer calls on or off."""
        self._watching = on
        while self._direct:
            self._direct.pop().remove()
        if not on:
            # Code that was compiled with the patches would be compiled again without: then they stay, and do nothing.
            while self._watches and not _has_compiled():
                self._watches.pop()()
        else:
            for owner, name, watch in self._classes[len(self._watches) :]:
                original = vars(owner)[name]
                watched = watch(owner, original)
                setattr(owner, name, watched)
                self._watches.append(functools.partial(_restore, owner, name, watched, original))
            self._direct = [DirectCallWatch(owner, self._on_call) for owner, _, _ in self._classes]

    def _watch_class(self, owner: Any, name: str, watch: Callable[[Any, Any], Any]) -> None:
        """Add a class whose layer calls are watched; ``watch(owner, original)`` returns the replacement method."""
        if not any(owner is each for each, _, _ in self._classes):
            self._classes.append((owner, name, watch))
            if self._watching:
                self._watch(True)

    @guarded
    def _on_call(self, layer: Any) -> None:
        self._handle(self._call, layer)

    @guarded
    def _on_before_step(self, optimizer: Any) -> None:
        self._handle(self._before_step, optimizer)

    @guarded
    def _on_step(self, optimizer: Any) -> None:
        self._handle(self._step, optimizer)

    def _handle(self, event: Callable[[Any], None], subject: Any) -> None:
        """Handle an event of the script; those of several threads one after the other."""
        if self.gone:
            return
        with self._turn:
            event(subject)

    def _add(self, optimizer: Any, framework: str) -> None:
        """Add an optimizer that the script has created, and drop those that no longer exist."""
        self._made = [each for each in self._made if each[0]() is not None]
        self._made.append((weakref.ref(optimizer), framework))

    def _watch_begin(self, kind: Any, made: Callable[[Any], None]) -> None:
        """Patch ``kind.__init__`` so that it calls ``made`` with the optimizer when it returns."""
        begin = kind.__init__

        @functools.wraps(begin)
        def begun(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            self._on_made(made, optimizer)

        kind.__init__ = begun
        self._patches.append(functools.partial(_restore, kind, "__init__", begun, begin))

    @guarded
    def _on_made(self, made: Callable[[Any], None], optimizer: Any) -> None:
        if not self.gone:
            made(optimizer)

    # -- torch -----------------------------------------------------------------------------------------------

    @guarded
    def _on_torch(self, optimizers: ModuleType) -> None:
        module = importlib.import_module("torch.nn.modules.module")
        self._watch_class(module.Module, "_call_impl", self._torch_call)
        self._watch_compiling(module.Module)
        self._watch_begin(optimizers.Optimizer, lambda optimizer: self._add(optimizer, "torch"))
        # Global hooks, because recording changes the optimizer's own hooks at this time. They run after its own.
        before = optimizers.register_optimizer_step_pre_hook(_uncompiled(self._on_before_step))
        stepped = optimizers.register_optimizer_step_post_hook(_uncompiled(self._on_step))
        self._patches += [before.remove, stepped.remove]

    def _torch_call(self, module_class: Any, call: Any) -> Any:
        """Return a ``Module._call_impl`` that reports calls, and that torch.compile treats as torch's own.

        A hook would be too late: hooks that are added within a hook do not run in the same call. The compiler skips
        code of torch's own file, and follows the calls from there, as it does without the patch.
        """
        on_call, torch = _uncompiled(self._on_call), sys.modules["torch"]

        def _call_impl(layer: Any, *args: Any, **kwargs: Any) -> Any:
            # In this order: a compiler that does not read `_watching` does not compile again when it changes.
            if not _is_compiling(torch) and self._watching:
                on_call(layer)
            return call(layer, *args, **kwargs)

        return functools.wraps(call)(_as_torch(_call_impl))

    def _watch_compiling(self, module_class: Any) -> None:
        """Patch ``Module.compile``, because calls of modules compiled in place bypass ``_call_impl``."""
        compile_in_place = module_class.compile

        @functools.wraps(compile_in_place)
        def compile(module: Any, *args: Any, **kwargs: Any) -> None:
            compile_in_place(module, *args, **kwargs)
            self._watch_compiled(module)

        module_class.compile = compile
        self._patches.append(functools.partial(_restore, module_class, "compile", compile, compile_in_place))
        if "torch._dynamo" in sys.modules:
            # A process that a launcher started is watched only once it makes an optimizer.
            for each in gc.get_objects():
                if issubclass(type(each), module_class):
                    self._watch_compiled(each)

    def _watch_compiled(self, module: Any) -> None:
        """Report the calls of a module that is compiled in place; of another one, do nothing."""
        torch: Any = sys.modules["torch"]
        reference: Any = weakref.ref(module)
        on_call = _uncompiled(self._on_call)
        call: Any = vars(module).get("_compiled_call_impl")
        if call is None or self.gone:
            return

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not _is_compiling(torch) and self._watching:
                layer = reference()
                on = vars(layer).get("_compiled_call_impl") is watched
                if on:
                    vars(layer)["_compiled_call_impl"] = call
                on_call(layer)
                if vars(layer).get("_compiled_call_impl") is not call:
                    return layer(*args, **kwargs)  # the layer is recorded from now on
                if on and self._watching:
                    vars(layer)["_compiled_call_impl"] = watched
            return call(*args, **kwargs)

        vars(module)["_compiled_call_impl"] = watched

    # -- paddle ----------------------------------------------------------------------------------------------

    @guarded
    def _on_paddle_layers(self, layers: ModuleType) -> None:
        self._watch_class(layers.Layer, "__call__", self._paddle_call)

    @guarded
    def _on_paddle(self, optimizers: ModuleType) -> None:
        # Some subclasses, such as AdamW, do not call the ``__init__`` of their base class.
        cls = optimizers.Optimizer
        watched: set[Any] = set()

        def made(owner: Any, optimizer: Any) -> None:
            if _beginning(type(optimizer)) is owner:  # not a subclass whose own ``__init__`` still runs
                self._on_paddle_optimizer(optimizer)

        def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self._on_paddle_new(kind, watched, made)
            return object.__new__(kind)

        # Never removed: without it, Python would then reject arguments that reach ``object.__new__``.
        cls.__new__ = new

    @guarded
    def _on_paddle_new(self, kind: Any, watched: set[Any], made: Callable[[Any, Any], None]) -> None:
        owner = _beginning(kind)
        if owner not in watched and not self.gone:
            watched.add(owner)
            self._watch_begin(owner, functools.partial(made, owner))

    @guarded
    def _on_paddle_optimizer(self, optimizer: Any) -> None:
        self._add(optimizer, "paddle")
        self._on_top(optimizer)

    def _paddle_call(self, layer_class: Any, call: Any) -> Any:
        @functools.wraps(call)
        def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._watching and sys.modules["paddle"].in_dynamic_mode():
                self._on_call(layer)
            return call(layer, *args, **kwargs)

        return called

    def _on_top(self, optimizer: Any) -> None:
        """Put the finder's hooks above all others on an optimizer, so that they run after the recorder's."""
        self._off_top(optimizer)
        alive = weakref.ref(optimizer)

        def stepped() -> None:
            if sys.modules["paddle"].in_dynamic_mode():  # in static mode, `minimize` adds to a program
                self._on_paddle_step(alive())

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            stepping: Any = alive()
            model = self.model
            self._on_before_step(stepping)
            # A call that has begun has no place for the hooks of a recorder that begins with it.
            return (original if self.model is model else stepping.step)(*args, **kwargs)

        handles = _framework("paddle").optimizers.hook(optimizer, lambda *_: None, stepped)
        self._tops[id(optimizer)] = [*handles, Override(optimizer, "step", step)]

    @guarded
    def _on_paddle_step(self, optimizer: Any) -> None:
        # Removed while the recorder adds and removes its hooks, then put above these again.
        self._off_top(optimizer)
        self._on_step(optimizer)
        if not self.gone:
            self._on_top(optimizer)

    def _off_top(self, optimizer: Any) -> bool:
        handles = self._tops.pop(id(optimizer), None)
        for handle in reversed(handles or ()):
            handle.remove()
        return handles is not None


def _framework(name: str) -> Any:
    return importlib.import_module(f"padiff.frameworks.{name}").FRAMEWORK


def _owned(layer: Any) -> set[int]:
    """Return the ids of the parameters of a layer and of the layers inside of it."""
    framework = framework_of(layer)
    return {id(tensor) for node in walk(layer, framework) for _, tensor, _ in framework.layers.parameters(node.layer)}


def _has_parameters(value: Any) -> bool:
    """Return True if a value is a layer with parameters."""
    try:
        framework = framework_of(value)
    except PadiffError:
        return False
    return framework.layers.is_model(value) and any(True for _ in parameters_of(value, framework))


def _is_frozen(layer: Any) -> bool:
    """Return True if none of a layer's parameters trains."""
    framework = framework_of(layer)
    return not any(framework.tensors.trainable(tensor) for _, tensor in parameters_of(layer, framework))


def _has_compiled() -> bool:
    """Return True if torch.compile has compiled any code in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"])


def _without_fabric(layer: Any) -> Any:
    """Return the layer inside of Lightning Fabric's wrapper, or the layer itself if it has no wrapper."""
    while type(layer).__name__ == "_FabricModule":
        layer = layer._forward_module
    return layer


def _as_torch(function: Any) -> Any:
    """Set a function's file to that of ``torch.nn.Module``, whose functions torch.compile skips, and return it."""
    file = sys.modules["torch.nn.modules.module"].__file__
    function.__code__ = function.__code__.replace(co_filename=file)
    return function


def _is_compiling(torch: Any) -> bool:
    """Return True while torch.compile traces; torch 2.2 has this under another name."""
    compiler = torch.compiler if hasattr(torch.compiler, "is_compiling") else torch._utils
    return bool(compiler.is_compiling())


def _uncompiled(callback: Callable[[Any], None]) -> Callable[..., None]:
    """Return a wrapper of a callback that torch.compile neither compiles nor traces."""
    torch: Any = sys.modules["torch"]  # may be only partly imported, so its attributes are looked up later

    def uncompiled(watched: Any, *_: Any) -> None:
        if not _is_compiling(torch):
            switch = torch._C._dynamo.eval_frame.set_eval_frame
            compiler = switch(None)
            try:
                callback(watched)
            finally:
                switch(compiler)

    wrapper: Callable[..., None] = _as_torch(uncompiled)
    return wrapper


def _restore(owner: Any, name: str, watched: Any, original: Any) -> None:
    # If other code has replaced the method meanwhile, the replacement stays.
    if vars(owner).get(name) is watched:
        setattr(owner, name, original)


def _beginning(kind: Any) -> Any:
    """Return the class in the method resolution order that defines ``__init__``."""
    return next(each for each in kind.__mro__ if "__init__" in vars(each))
