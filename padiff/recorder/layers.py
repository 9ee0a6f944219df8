"""The layers of the models in training, and the selection of recorded layers; both may change between steps."""

from __future__ import annotations

import glob
import importlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar

from padiff.errors import SelectionError, UsageError
from padiff.frameworks import framework_of
from padiff.frameworks.base import Framework, Watch
from padiff.model.selection import Node, find_paths, select, with_mode
from padiff.model.tree import describe, owning, walk
from padiff.recorder.model_copies import CONTAINERS, children_attribute, layer_of_tensors, parameters_of
from padiff.records import Layer
from padiff.system.guard import reraise_from_signal_handler
from padiff.system.terminal import first_few

# Number of paths that a message names.
_NAMED = 4


class Layers:
    """A model's current layers, and the selection of those that are recorded.

    Args:
        model: the model.
        white_list, black_list, layer_map: the arguments of `padiff.model.selection.select`. A layer in a list stands
            for its path: a layer that replaces another one at the same path is selected in the same way. Items that
            no longer match any layer are ignored.

    Attributes:
        framework: the model's framework.
        nodes: the layers, the model itself first.
        chosen: paths of the layers whose tensors are recorded.
        owning: paths of the layers whose parameters are recorded.
        computing: paths of the layers that own parameters, or have no child layers.
        mapped: paths of the layer map's layers.
        listed: the list that the selection follows, ``white_list`` or ``black_list``; empty without a list.
        changes: text that names the new, replaced and removed layers of the last change; empty before any change.
        stamp: object that is replaced when the layers, their parameters or their buffers change; None if changes
            can't be detected.

    Raises:
        UsageError: an item of a list matches no layer, or is not a layer.
    """

    def __init__(
        self, model: Any, framework: Framework, white_list: Any = None, black_list: Any = None, layer_map: Any = ()
    ) -> None:
        self._model, self.framework = model, framework
        self.changes = ""
        self.stamp: Any = None
        self._fresh = self._outdated = True
        #: The parameters and buffers at the last call of `described`.
        self._owned: list[tuple[int, str, object]] = []
        self.nodes: Sequence[Node] = walk(model, framework)
        white, black = (list(items) if isinstance(items, Iterator) else items for items in (white_list, black_list))
        mapped = list(layer_map)
        self.chosen = select(self.nodes, white, black, mapped)
        self._take(mapped)
        self._white, self._black = (_by_path(self.nodes, items) for items in (white, black))
        self.listed = "white_list" if self._white else "black_list" if self._black else ""
        self._watch = self._watched()
        self._map = [path for path, _ in _by_path(self.nodes, mapped)]

    @property
    def fresh(self) -> bool:
        """Return True if no step has ended since the layers were first seen or last changed."""
        return self._fresh

    def refresh(self) -> bool:
        """Update the layers if the model has changed; return True if layers were added, removed or replaced.

        The check takes microseconds per layer and is made in every due step.
        """
        if self._watch.same():
            return False
        self._note()
        self.framework.spread.find_shards(self._model)
        if _held(self.nodes, self.framework) == self._held:
            self._look_at_parameters()
            return False
        previous, self.nodes = self.nodes, walk(self._model, self.framework)
        white, black, mapped = (self._there(items) for items in (self._white, self._black, self._map))
        # A white list whose layers have all been removed selects nothing; an empty one would select all layers.
        self.chosen = frozenset() if self._white and not white else select(self.nodes, white, black, mapped)
        self._take(mapped)
        self._watch = self._watched()
        self._note()
        self.changes = _changes(previous, self.nodes)
        return True

    def release(self) -> None:
        """Drop the model and its layers, after the last step."""
        self._model, self.nodes, self.chosen = None, (), frozenset()
        self._white = self._black = self._map = []
        self._watch = self._watched()

    def _watched(self) -> Watch:
        return self.framework.layers.watch([node.layer for node in self.nodes])

    def _note(self) -> None:
        """Renew the stamp for the current layers and their parameters and buffers."""
        self.stamp = object() if self._watch.note() else None

    def settle(self) -> bool:
        """Return True if layers or parameters have changed since the last call of `described`; call at a step's end.

        The first step may create parameters: lazy layers have none before.
        """
        if self._fresh:
            self._fresh = False
            self._look_at_parameters()
        return self._outdated

    def described(self) -> tuple[Layer, ...]:
        """Return the layers as values of a run's description, and remember that the description is up to date."""
        self._outdated, self._owned = False, _owned(self.nodes, self.framework)
        return describe(self.nodes, self.framework, self.chosen)

    def _take(self, mapped: Sequence[Any]) -> None:
        self.owning = owning(self.nodes, self.framework, self.chosen, mapped)
        self.mapped = tuple(path for item in mapped for path in find_paths(self.nodes, item, "layer_map"))
        self._held = _held(self.nodes, self.framework)
        self.computing = _computing(self.nodes, self.framework)
        self._fresh = self._outdated = True

    def _look_at_parameters(self) -> None:
        self._outdated = self._outdated or _owned(self.nodes, self.framework) != self._owned

    def _there(self, items: Iterable[Any]) -> list[Any]:
        """Return the items that match a layer."""
        matching = []
        for entry in items:
            try:
                find_paths(self.nodes, with_mode(entry, "")[0], "")
            except SelectionError:
                continue
            matching.append(entry)
        return matching


@dataclass(frozen=True)
class FixedLayers:
    """A model's layers for a capture during which the model does not change; has the attributes of `Layers`."""

    framework: Framework
    nodes: Sequence[Node]
    chosen: frozenset[str]
    owning: Collection[str] = ()

    fresh: ClassVar[bool] = False
    stamp: ClassVar[Any] = None

    @cached_property
    def computing(self) -> frozenset[str]:
        return _computing(self.nodes, self.framework)

    def refresh(self) -> bool:
        return False


def _computing(nodes: Sequence[Node], framework: Framework) -> frozenset[str]:
    """Return the paths of the layers that own parameters, or have no child layers."""
    layers = framework.layers
    return frozenset(
        node.path
        for node in nodes
        if any(role == "parameter" for _, _, role in layers.parameters(node.layer))
        or not any(True for _ in layers.children(node.layer))
    )


def _by_path(nodes: Sequence[Node], items: Iterable[Any] | None) -> list[tuple[Any, str]]:
    """Return pairs of an item and its mode, with layers replaced by their paths."""
    entries = [with_mode(entry, "") for entry in items or ()]
    return [
        (item if isinstance(item, (str, type)) else glob.escape(find_paths(nodes, item, "")[0]), mode)
        for item, mode in entries
    ]


def _held(nodes: Sequence[Node], framework: Framework) -> list[tuple[int, str, int]]:
    """Return the tree of layers as (parent's index, name, child's identity).

    The nodes keep the layers alive, so that no other object can get the identity of one.
    """
    return [
        (k, name, id(child)) for k, node in enumerate(nodes) for name, child in framework.layers.children(node.layer)
    ]


def _owned(nodes: Sequence[Node], framework: Framework) -> list[tuple[int, str, object]]:
    """Return the parameters and buffers as (layer's index, slot, shape).

    Buffers have their role in place of the shape, which may change in each step.
    """
    return [
        (k, slot, _shape(framework, tensor) if role == "parameter" else role)
        for k, node in enumerate(nodes)
        for slot, tensor, role in framework.layers.parameters(node.layer)
    ]


def _shape(framework: Framework, tensor: Any) -> object:
    try:
        return framework.tensors.shape(tensor)
    except Exception as error:  # a tensor without a shape, for example a nested one
        reraise_from_signal_handler(error)
        return None


def _changes(before: Sequence[Node], now: Sequence[Node]) -> str:
    old, new = ({node.path: node.layer for node in nodes} for nodes in (before, now))
    changes = {
        "new": [path for path in new if path not in old],
        "replaced": [path for path in new if path in old and new[path] is not old[path]],
        "gone": [path for path in old if path not in new],
    }
    return "; ".join(f"{what}: {first_few(paths, _NAMED)}" for what, paths in changes.items() if paths)


class TrackedLayers:
    """Layers whose calls are observed, and the parts of the calls that are recorded.

    Args:
        layers: the model's layers.
        functions: True if functions are traced, too.
        skip_wrappers: True to not record layers that have no parameters and a single sublayer.

    Attributes:
        nodes: all layers, the model first.
        known: layers by identity.
        chosen: paths of the layers whose tensors are recorded.
        traced: paths of the layers whose inputs are traced in every call.
    """

    def __init__(self, layers: Layers | FixedLayers, functions: bool, skip_wrappers: bool) -> None:
        self._layers, self._functions, self._skip_wrappers = layers, functions, skip_wrappers
        self.refresh()

    def refresh(self) -> None:
        """Read the current layers of the model."""
        layers = self._layers
        self.nodes: Sequence[Node] = layers.nodes
        self.known = {id(node.layer): node for node in layers.nodes}
        self.chosen = frozenset(layers.chosen)
        if self._skip_wrappers:
            self.chosen -= _wrappers(layers.nodes, layers.framework)
        self.traced = self.chosen if self._functions else self.chosen & layers.computing

    def chose(self, node: Node) -> bool:
        """Return True if a layer's tensors are recorded."""
        return node.path in self.chosen

    def note_modes(self, training: bool, settings: dict[str, Any]) -> None:
        """Note the training modes of the layers at an outermost call.

        The first call in training mode counts, or the first call if there is none in training mode.
        """
        if (not training and "training" in settings) or settings.get("training"):
            return
        others = [node.path for node in self.nodes if bool(node.layer.training) is not training]
        settings["training"] = training
        settings.pop("training.others", None)
        if others:
            settings["training.others"] = others


def _wrappers(nodes: Sequence[Node], framework: Framework) -> frozenset[str]:
    """Return the paths of the layers, except the model, that have no parameters and a single sublayer."""
    return frozenset(
        node.path
        for node in nodes[1:]
        if not any(framework.layers.parameters(node.layer)) and len(list(framework.layers.children(node.layer))) == 1
    )


def group(models: Mapping[str, Any]) -> Any:
    """Return one layer that holds models by name; see `group_of`.

    Args:
        models: the models; an average of one's parameters may be a dict or list of tensors.

    Raises:
        UsageError: there is no model, a name is no text, the models belong to several frameworks, or tensors are no
            copy of a model's.
    """
    if not models or not all(isinstance(name, str) and name for name in models):
        raise UsageError(f"several models are recorded by name: expected {{'g': g, 'd': d}}, got names {list(models)}")
    layers = {name: model for name, model in models.items() if type(model) not in CONTAINERS}
    if not layers:
        raise UsageError(f"tensors are recorded with the model that they are a copy of, got no model in {list(models)}")
    names = sorted({framework_of(model).name for model in layers.values()})
    if len(names) > 1:
        raise UsageError("a run holds models of one framework, got torch and paddle: record each with its own recorder")
    together = {name: layers[name] if name in layers else _copy(name, models[name], layers) for name in models}
    return group_of(names[0], together, {})


def _copy(name: str, values: Any, models: Mapping[str, Any]) -> Any:
    """Return the layer that stands for a copy of a model, of which the loop holds the tensors."""
    for model in models.values():
        for node in walk(model, framework := framework_of(model)):
            parameters = list(parameters_of(node.layer, framework))
            if (copy := layer_of_tensors(values, node.layer, parameters, framework)) is not None:
                return copy
    raise UsageError(
        f"{name!r} is a {type(values).__name__} of {len(values)} values, which are no copy of a recorded model's "
        "parameters: expected a model, a dict of tensors by the parameters' names, or a list of them in their order"
    )


def group_of(
    framework: str,
    models: Mapping[str, Any],
    tensors: Mapping[str, Any],
    current: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
) -> Any:
    """Return one layer that holds models and tensors by name; these stay as they are.

    The group trains while one of its models does; tensors have no other mode.

    Args:
        framework: name of the framework.
        tensors: trained tensors that no layer owns. They become parameters of the group.
        current: for models that the loop replaces, a function that returns the one of now; `None`: as before.
    """
    nn = importlib.import_module(f"{framework}.nn")
    base = nn.ModuleDict if framework == "torch" else nn.LayerDict

    def is_training(layers: Any) -> bool:
        return bool(tensors) or not len(layers) or any(layer.training for layer in layers.values())

    # Making a layer sets it to training; the group is what its models are.
    training = property(is_training, lambda layers, value: None)
    attributes: dict[str, Any] = {"training": training, "__module__": base.__module__}
    if current:
        children = children_attribute(framework)
        attributes[children] = property(partial(_children_now, children, current), partial(_set_children, children))
    layers = type(base.__name__, (base,), attributes)()
    for label, model in models.items():
        layers[_free(layers, label)] = model
    for label, tensor in tensors.items():
        layers._parameters[_free(layers, label)] = tensor  # a plain tensor is refused by the checks of `__setattr__`
    return layers


def _children_now(attribute: str, current: Mapping[str, Callable[[], Any]], layers: Any) -> Any:
    """Return a group's layers, with those that the loop has replaced."""
    children = vars(layers)[attribute]
    for label, read in current.items():
        if label in children and (layer := read()) is not None:
            children[label] = layer
    return children


def _set_children(attribute: str, layers: Any, value: Any) -> None:
    vars(layers)[attribute] = value


def _free(layers: Any, label: str) -> str:
    """Return a name for a model or tensor that the group has no attribute of."""
    name = label.replace(".", "_")
    while hasattr(layers, name):
        name += "_"
    return name


# The tuple is replaced, never modified. Claims hold weak references, so the registry keeps no model alive.
_CLAIMS: ContextVar[tuple[ModelLease, ...]] = ContextVar("padiff_recorded", default=())


class ModelLease:
    """Registration of a recorder for a model; valid as long as both objects are alive."""

    def __init__(self, model: Any, recorder: Any) -> None:
        self.model = weakref.ref(model)
        self.recorder = weakref.ref(recorder)

    @classmethod
    def set(cls, model: Any, recorder: Any) -> ModelLease:
        living = tuple(claim for claim in _CLAIMS.get() if claim.valid)
        claim = cls(model, recorder)
        _CLAIMS.set((*living, claim))
        return claim

    @property
    def valid(self) -> bool:
        return self.model() is not None and self.recorder() is not None

    def remove(self) -> None:
        _CLAIMS.set(tuple(claim for claim in _CLAIMS.get() if claim is not self))


def claimed(model: Any) -> bool:
    """Return True if a living recorder is registered for the model."""
    return any(claim.model() is model and claim.valid for claim in _CLAIMS.get())
