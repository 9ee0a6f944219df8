"""Layer tree of a live model, and its tensors by path and slot."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from padiff.frameworks import framework_of
from padiff.frameworks.base import Framework
from padiff.model import equivalents
from padiff.model.selection import Node, find_paths
from padiff.records import LOOP, ROOT, Both, Layer, Parameter, RunInfo
from padiff.system.guard import reraise_from_signal_handler


def walk(model: Any, framework: Framework) -> list[Node]:
    """Return the model's layers, depth first in order of definition; a shared layer once, with all of its paths."""
    nodes: dict[int, Node] = {}
    for path, layer in _walk(model, "", framework, ()):
        node = nodes.get(id(layer))
        nodes[id(layer)] = Node(node.path, layer, (*node.aliases, path)) if node else Node(path, layer)
    return list(nodes.values())


def _walk(layer: Any, prefix: str, framework: Framework, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(layer) in above:  # a layer that contains itself
        return
    yield prefix or ROOT, layer
    for name, child in framework.layers.children(layer):
        path = f"{prefix}.{name}" if prefix else name
        # A layer's name may equal padiff's path of the model itself or of the loop.
        path = f"layer{path}" if path in (ROOT, LOOP) else path
        yield from _walk(child, path, framework, (*above, id(layer)))


def owning(
    nodes: Collection[Node], framework: Framework, chosen: frozenset[str], layer_map: Iterable[Any]
) -> frozenset[str]:
    """Return the paths of the layers whose parameters are recorded: the chosen ones, and the projections of mapped
    attentions.

    A layer map excludes the layers below its own; but parameters that one framework packs into the attention's own
    matrix belong, in the other framework, to layers below the attention.
    """
    paths = set(chosen)
    for item in layer_map:
        for path in find_paths(list(nodes), item, "layer_map"):
            layer = next(node.layer for node in nodes if node.path == path)
            if path in chosen and equivalents.common_kind(framework.layers.kind(layer)) in equivalents.COMPOSITE:
                paths.update(node.path for node in nodes if path == ROOT or node.path.startswith(f"{path}."))
    return frozenset(paths)


def shape_of(framework: Framework, tensor: Any) -> tuple[int, ...]:
    """Return a tensor's shape; a length that is no single number is 0 (jagged), a shape that does not exist is (0,)
    (nested).
    """
    try:
        return tuple(length if isinstance(length, int) else 0 for length in framework.tensors.shape(tensor))
    except Exception as error:  # a tensor without a shape
        reraise_from_signal_handler(error)
        return (0,)


def describe(nodes: Collection[Node], framework: Framework, recorded: Collection[str]) -> tuple[Layer, ...]:
    """Return the layer tree as values, for the run folder."""
    first_seen: dict[tuple[int, int], str] = {}
    layers = []
    for node in nodes:
        parameters = []
        spread = {shard.slot: shard for shard in framework.spread.held(node.layer)}
        present = list(framework.layers.parameters(node.layer))
        # The order of definition; parameters that the layer does not hold now come first, before its buffers.
        order = {slot: place for place, (slot, _, _) in enumerate(present)}
        for shard in spread.values():
            site = f"{node.path}/{shard.slot}"
            tied_to = first_seen.setdefault(shard.key, site)
            parameters.append(
                Parameter(
                    slot=shard.slot,
                    shape=shard.shape,
                    dtype=shard.dtype,
                    layout=framework.layers.layout(node.layer, shard.slot),
                    trainable=shard.trainable,
                    tied_to="" if tied_to == site else tied_to,
                )
            )
        for slot, tensor, role in present:
            if slot in spread:
                continue  # this tensor exists for the current call only, or is a part
            site = f"{node.path}/{slot}"
            tied_to = first_seen.setdefault((id(tensor), -1), site)
            parameters.append(
                Parameter(
                    slot=slot,
                    shape=shape_of(framework, tensor),
                    dtype=framework.tensors.dtype(tensor),
                    role=role,
                    layout=framework.layers.layout(node.layer, slot),
                    trainable=role == "parameter" and framework.tensors.trainable(tensor),
                    tied_to="" if tied_to == site else tied_to,
                )
            )
        parameters.sort(key=lambda parameter: order.get(parameter.slot, -1))
        layers.append(
            Layer(
                path=node.path,
                type=type(node.layer).__name__,
                kind=framework.layers.kind(node.layer),
                parameters=tuple(parameters),
                settings=framework.layers.settings(node.layer),
                aliases=node.aliases,
                children=sum(1 for _ in framework.layers.children(node.layer)),
                recorded=node.path in recorded,
            )
        )
    return tuple(layers)


# Random generators that a program makes itself.
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)


def _restorer(generator: Any) -> Callable[[], None]:
    """Return a function that sets a random generator, or the module of one, back to its present state."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if hasattr(generator, "getstate"):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


class LiveModel:
    """A live model with its layer tree; layers and tensors are accessed by path."""

    def __init__(self, model: Any, layer_map: tuple[Any, ...] = ()) -> None:
        self.framework: Framework = framework_of(model)
        self.model = self.framework.layers.unwrap(model)
        self.nodes = walk(self.model, self.framework)
        layers = describe(self.nodes, self.framework, [node.path for node in self.nodes])
        self.info = RunInfo(
            framework=self.framework.name,
            framework_version=self.framework.version,
            layers=layers,
            name=type(self.model).__name__,
            layer_map=tuple(path for item in layer_map for path in find_paths(self.nodes, item, "layer_map")),
        )
        self._nodes = {node.path: node for node in self.nodes}

    @classmethod
    def from_model(cls, model: Any) -> LiveModel:
        """Return the live model of a plain model, or of a proxy from ``create_model`` (with its layer map)."""
        return cls(model.padiff_model, tuple(model.padiff_layer_map)) if is_proxy(model) else cls(model)

    def layer(self, path: str) -> Any:
        """Return the live layer at a path."""
        node: Node = self._nodes[path]
        return node.layer

    def tensor(self, path: str, slot: str) -> Any:
        """Return the live parameter or buffer."""
        return self.owned(path, slot)[0]

    def owned(self, path: str, slot: str) -> tuple[Any, str]:
        """Return the live parameter or buffer, and its role: ``parameter`` or ``buffer``."""
        owned = self.framework.layers.parameters(self.layer(path))
        return next((tensor, role) for name, tensor, role in owned if name == slot)

    def value(self, path: str, slot: str) -> np.ndarray:
        """Return a copy of a parameter's or buffer's values."""
        return self.framework.tensors.copy(self.tensor(path, slot))

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield ``(path/slot, tensor)`` of all parameters and buffers, each tensor once."""
        identities: set[int] = set()
        for node in self.nodes:
            for slot, tensor, _ in self.framework.layers.parameters(node.layer):
                if id(tensor) not in identities:
                    identities.add(id(tensor))
                    yield f"{node.path}/{slot}", tensor

    def draws(self) -> Callable[[], None]:
        """Return a function that sets random generators back to their present states.

        They are those of the framework, Python and numpy, and those that the layers or the modules of their classes
        hold: ``RNG = numpy.random.default_rng(0)``.
        """
        holders = [vars(node.layer) for node in self.nodes]
        modules = {type(node.layer).__module__: None for node in self.nodes}
        holders += [vars(sys.modules[name]) for name in modules if name in sys.modules]
        generators = {
            id(value): value for holder in holders for value in holder.values() if issubclass(type(value), _GENERATORS)
        }
        restorers = [_restorer(each) for each in (random, np.random, *generators.values())]
        randomness = self.framework.randomness
        restorers.append(partial(randomness.restore, randomness.state()))

        def restore() -> None:
            for each in restorers:
                each()

        return restore

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Restore all buffers at the end of the context."""
        buffers = [
            (tensor, self.framework.tensors.copy(tensor))
            for node in self.nodes
            for _, tensor, role in self.framework.layers.parameters(node.layer)
            if role == "buffer"
        ]
        try:
            yield
        finally:
            for tensor, values in buffers:
                self.framework.tensors.write(tensor, values)

    def below(self, path: str) -> list[Layer]:
        """Return the layer at a path and all layers below it."""
        return [x for x in self.info.layers if x.path == path or path == ROOT or x.path.startswith(f"{path}.")]


def layers_at(models: Both[LiveModel], paths: Both[str]) -> Both[Any]:
    """Return the live layers of two models at a path of each."""
    return Both(models.reference.layer(paths.reference), models.candidate.layer(paths.candidate))


def frameworks_name(model: Any) -> str:
    """Return ``torch`` or ``paddle`` for a plain model or a proxy from ``create_model``."""
    return framework_of(model.padiff_model if is_proxy(model) else model).name


def is_proxy(model: Any) -> bool:
    """Return True for a proxy from ``create_model``. (The class is checked, as some models have every attribute.)"""
    return hasattr(type(model), "padiff_model")
