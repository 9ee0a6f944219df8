"""Layer tree of a live model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model import equivalents
from padiff.model.selection import Node, find_paths
from padiff.records import LOOP, ROOT, Layer, Parameter
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
