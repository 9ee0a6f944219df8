"""The layers whose calls are observed in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model.selection import Node
from padiff.recorder.layers import FixedLayers, Layers


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
