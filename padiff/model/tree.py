"""The layer tree of a live model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model import equivalents
from padiff.model.selection import Node, find_paths
from padiff.records import LOOP, ROOT, Layer, Parameter


def walk(model: Any, framework: Framework) -> list[Node]:
    """The model's layers, depth first in order of definition; a shared layer once, with all of its paths."""
    found: dict[int, Node] = {}
    for path, layer in _walk(model, "", framework, ()):
        known = found.get(id(layer))
        found[id(layer)] = Node(known.path, layer, (*known.aliases, path)) if known else Node(path, layer)
    return list(found.values())


def _walk(layer: Any, prefix: str, framework: Framework, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(layer) in above:  # a layer that holds itself
        return
    yield prefix or ROOT, layer
    for name, child in framework.layers.children(layer):
        path = f"{prefix}.{name}" if prefix else name
        # A layer of the model may be called as padiff calls the model itself.
        path = f"layer{path}" if path in (ROOT, LOOP) else path
        yield from _walk(child, path, framework, (*above, id(layer)))


def owning(
    nodes: Collection[Node], framework: Framework, chosen: frozenset[str], layer_map: Iterable[Any]
) -> frozenset[str]:
    """Paths of the layers whose parameters are recorded: the chosen ones, and the projections of mapped attentions.

    A layer map leaves out what is below its layers; but what one framework packs into the attention's own parameters
    stands in layers below it in the other.
    """
    found = set(chosen)
    for item in layer_map:
        for path in find_paths(list(nodes), item, "layer_map"):
            layer = next(node.layer for node in nodes if node.path == path)
            if path in chosen and equivalents.common_kind(framework.layers.kind(layer)) in equivalents.COMPOSITE:
                found.update(node.path for node in nodes if path == ROOT or node.path.startswith(f"{path}."))
    return frozenset(found)


def shape_of(framework: Framework, tensor: Any) -> tuple[int, ...]:
    """A tensor's shape; 0 for a length that it has not one of (jagged), and one such where it has no shape (nested)."""
    try:
        return tuple(length if isinstance(length, int) else 0 for length in framework.tensors.shape(tensor))
    except Exception:  # of a kind of its own: that it is there is known all the same
        return (0,)


def describe(nodes: Collection[Node], framework: Framework, recorded: Collection[str]) -> tuple[Layer, ...]:
    """The tree as values, for the run folder."""
    first_seen: dict[tuple[int, int], str] = {}
    layers = []
    for node in nodes:
        parameters = []
        held = {one.slot: one for one in framework.spread.held(node.layer)}
        standing = list(framework.layers.parameters(node.layer))
        # In the order of definition; those that do not stand there now come before what does: buffers.
        order = {slot: place for place, (slot, _, _) in enumerate(standing)}
        for one in held.values():
            site = f"{node.path}/{one.slot}"
            tied_to = first_seen.setdefault(one.key, site)
            parameters.append(
                Parameter(
                    slot=one.slot,
                    shape=one.shape,
                    dtype=one.dtype,
                    layout=framework.layers.layout(node.layer, one.slot),
                    trainable=one.trainable,
                    tied_to="" if tied_to == site else tied_to,
                )
            )
        for slot, tensor, role in standing:
            if slot in held:
                continue  # what stands there is for this call only, or a part
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
