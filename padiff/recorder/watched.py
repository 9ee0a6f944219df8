"""The layers of a step, as its hooks know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model.selection import Node
from padiff.recorder.layers import FixedLayers, Layers


class Watched:
    """The layers whose calls are seen, and what is looked at of each.

    Args:
        layers: the model's.
        functions: whether functions are looked at, too.
        skip_wrappers: whether layers that own nothing and hold one layer are passed over.

    Attributes:
        nodes: the layers, the model first.
        known: by their identities.
        chosen: paths of those whose tensors are recorded.
        traced: of which what goes in is looked at, whichever layer is called first.
    """

    def __init__(self, layers: Layers | FixedLayers, functions: bool, skip_wrappers: bool) -> None:
        self._layers, self._functions, self._skip_wrappers = layers, functions, skip_wrappers
        self.take()

    def take(self) -> None:
        """Take the layers as they are now."""
        layers = self._layers
        self.nodes: Sequence[Node] = layers.nodes
        self.known = {id(node.layer): node for node in layers.nodes}
        self.chosen = frozenset(layers.chosen)
        if self._skip_wrappers:
            self.chosen -= _wrappers(layers.nodes, layers.framework)
        self.traced = self.chosen if self._functions else self.chosen & layers.computing

    def chose(self, node: Node) -> bool:
        """Whether a layer's tensors are recorded."""
        return node.path in self.chosen

    def note_modes(self, training: bool, settings: dict[str, Any]) -> None:
        """Note which layers train, in the step's first call; in its first one in training mode, where there is one."""
        if (not training and "training" in settings) or settings.get("training"):
            return
        others = [node.path for node in self.nodes if bool(node.layer.training) is not training]
        settings["training"] = training
        settings.pop("training.others", None)
        if others:
            settings["training.others"] = others


def _wrappers(nodes: Sequence[Node], framework: Framework) -> frozenset[str]:
    """Paths of the layers that own nothing and hold one layer."""
    return frozenset(
        node.path
        for node in nodes[1:]
        if not any(framework.layers.parameters(node.layer)) and len(list(framework.layers.children(node.layer))) == 1
    )
