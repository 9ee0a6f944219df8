"""The layers of a model that is being trained, and which of them are recorded: both may change between its steps."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from padiff.errors import SelectionError
from padiff.frameworks.base import Framework
from padiff.frameworks.watching import Watch
from padiff.model.selection import Node, find_paths, select, with_mode
from padiff.model.tree import describe, owning, walk
from padiff.records import Layer
from padiff.system.guard import reraise_from_signal_handler
from padiff.system.naming import first_few

# How many paths a message names.
_NAMED = 4


class Layers:
    """A model's layers as they are now.

    Args:
        model: the model.
        white_list, black_list, layer_map: as `padiff.model.selection.select` takes them. Layers are meant by their
            paths: what takes a layer's place is in the list as it was. Items that match nothing any more are passed
            over.

    Attributes:
        framework: the model's.
        nodes: the layers, the model itself first.
        chosen: paths of those whose tensors are recorded.
        owning: paths of those whose parameters are.
        computing: paths of those that own parameters, or hold no other layer.
        mapped: paths of the layer map's layers.
        changes: what came, went and was replaced, in words; empty where nothing did.
        stamp: another value once layers, or what they own, are others; as of the last look. `None`: not known.

    Raises:
        UsageError: an item of a list matches no layer, or is none.
    """

    def __init__(
        self, model: Any, framework: Framework, white_list: Any = None, black_list: Any = None, layer_map: Any = ()
    ) -> None:
        self._model, self.framework = model, framework
        self.changes = ""
        self.stamp: Any = None
        self._fresh = self._outdated = True
        #: As they were last described.
        self._owned: list[tuple[int, str, object]] = []
        self.nodes: Sequence[Node] = walk(model, framework)
        white, black = (list(items) if isinstance(items, Iterator) else items for items in (white_list, black_list))
        mapped = list(layer_map)
        self.chosen = select(self.nodes, white, black, mapped)
        self._take(mapped)
        self._white, self._black = (_by_path(self.nodes, items) for items in (white, black))
        self._watch = self._watched()
        self._map = [path for path, _ in _by_path(self.nodes, mapped)]

    @property
    def fresh(self) -> bool:
        """Whether no step has ended since the layers were first seen, or became others."""
        return self._fresh

    def look(self) -> bool:
        """See whether the layers are others than before; whether they are.

        A matter of microseconds for each layer: it is done in every due step.
        """
        if self._watch.same():
            return False
        self._note()
        self.framework.spread.look(self._model)
        if _held(self.nodes, self.framework) == self._held:
            self._look_at_parameters()
            return False
        before, self.nodes = self.nodes, walk(self._model, self.framework)
        white, black, mapped = (self._there(items) for items in (self._white, self._black, self._map))
        # A white list none of whose layers is left does not mean all layers.
        self.chosen = frozenset() if self._white and not white else select(self.nodes, white, black, mapped)
        self._take(mapped)
        self._watch = self._watched()
        self._note()
        self.changes = _changes(before, self.nodes)
        return True

    def _watched(self) -> Watch:
        return self.framework.layers.watch([node.layer for node in self.nodes])

    def _note(self) -> None:
        """Have a stamp for what layers, and what they own, are now."""
        self.stamp = object() if self._watch.note() else None

    def settle(self) -> bool:
        """At the end of a step: whether the layers, or what they own, are others than when they were last described.

        The first step may have given them parameters: lazy layers have none before.
        """
        if self._fresh:
            self._fresh = False
            self._look_at_parameters()
        return self._outdated

    def described(self) -> tuple[Layer, ...]:
        """The layers as values; they are up to date then."""
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
        """The items that match a layer."""
        found = []
        for entry in items:
            try:
                find_paths(self.nodes, with_mode(entry, "")[0], "")
            except SelectionError:
                continue
            found.append(entry)
        return found


@dataclass(frozen=True)
class FixedLayers:
    """A model's layers for a capture during which they stay as they are; its attributes are those of `Layers`."""

    framework: Framework
    nodes: Sequence[Node]
    chosen: frozenset[str]
    owning: Collection[str] = ()

    fresh: ClassVar[bool] = False
    stamp: ClassVar[Any] = None

    @cached_property
    def computing(self) -> frozenset[str]:
        return _computing(self.nodes, self.framework)

    def look(self) -> bool:
        return False


def _computing(nodes: Sequence[Node], framework: Framework) -> frozenset[str]:
    """Paths of the layers that own parameters, or hold no other layer."""
    layers = framework.layers
    return frozenset(
        node.path
        for node in nodes
        if any(role == "parameter" for _, _, role in layers.parameters(node.layer))
        or not any(True for _ in layers.children(node.layer))
    )


def _by_path(nodes: Sequence[Node], items: Iterable[Any] | None) -> list[tuple[Any, str]]:
    """The items and their modes, layers replaced by their paths."""
    entries = [with_mode(entry, "") for entry in items or ()]
    return [
        (item if isinstance(item, (str, type)) else glob.escape(find_paths(nodes, item, "")[0]), mode)
        for item, mode in entries
    ]


def _held(nodes: Sequence[Node], framework: Framework) -> list[tuple[int, str, int]]:
    """Which layer holds which, by identity; the nodes keep them, so that no other can have it."""
    return [
        (k, name, id(child)) for k, node in enumerate(nodes) for name, child in framework.layers.children(node.layer)
    ]


def _owned(nodes: Sequence[Node], framework: Framework) -> list[tuple[int, str, object]]:
    """Which parameters and buffers there are. Buffers may be of another shape in every step."""
    return [
        (k, slot, _shape(framework, tensor) if role == "parameter" else role)
        for k, node in enumerate(nodes)
        for slot, tensor, role in framework.layers.parameters(node.layer)
    ]


def _shape(framework: Framework, tensor: Any) -> object:
    try:
        return framework.tensors.shape(tensor)
    except Exception as error:  # nested, say: it has none
        reraise_from_signal_handler(error)
        return None


def _changes(before: Sequence[Node], now: Sequence[Node]) -> str:
    old, new = ({node.path: node.layer for node in nodes} for nodes in (before, now))
    found = {
        "new": [path for path in new if path not in old],
        "replaced": [path for path in new if path in old and new[path] is not old[path]],
        "gone": [path for path in old if path not in new],
    }
    return "; ".join(f"{what}: {first_few(paths, _NAMED)}" for what, paths in found.items() if paths)
