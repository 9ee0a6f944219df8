"""Live model with its framework, its tree, and its tensors by path and slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from padiff.frameworks import framework_of
from padiff.frameworks.base import Framework
from padiff.model.selection import Node, find_paths
from padiff.model.tree import describe, walk
from padiff.records import ROOT, Both, Layer, RunInfo


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
