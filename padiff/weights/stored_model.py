"""A recorded model: layer tree, weights, and stand-ins for its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from padiff.align.matching.parameter_units import tie_targets
from padiff.model.selection import Node
from padiff.records import ROOT, Layer, RunInfo, TensorSource


class StoredModel:
    """A recorded model with the lookups of a `LiveModel`.

    Args:
        info: the run's info with the layer tree.
        weights: tensors by layer path and slot; a tied tensor stands under its first path.
        label: source of the model, for messages.
        step: number of the recorded step; `None` for files.
    """

    def __init__(
        self, info: RunInfo, weights: Mapping[tuple[str, str], TensorSource], label: str, step: int | None = None
    ) -> None:
        self.info, self.label, self.step = info, label, step
        self.weights = weights
        self._homes = tie_targets(info.layers)
        self._layers = {layer.path: layer for layer in info.layers}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return an empty tuple: a recorded model has no layer objects."""
        return ()

    def source(self, path: str, slot: str) -> TensorSource | None:
        """Return the source of a parameter's or buffer's values; `None` if they were not recorded."""
        return self.weights.get(self._homes.get((path, slot), (path, slot)))

    def value(self, path: str, slot: str) -> np.ndarray:
        """Return the values of a parameter or buffer.

        Raises:
            KeyError: the values were not recorded.
        """
        source = self.source(path, slot)
        if source is None:
            raise KeyError(f"{path}/{slot}")
        return source.read()

    def below(self, path: str) -> list[Layer]:
        """Return the layer at a path and all layers below it."""
        return [x for x in self.info.layers if x.path == path or path == ROOT or x.path.startswith(f"{path}.")]

    def layer(self, path: str) -> StoredLayer:
        """Return a stand-in for the layer at a path, an object of a class with the recorded class name."""
        layer = self._layers[path]
        stand_in: StoredLayer = type(layer.type, (StoredLayer,), {})(self, layer)
        return stand_in

    def with_values(self, weights: Mapping[tuple[str, str], TensorSource]) -> StoredModel:
        """Return the same model with other values."""
        return StoredModel(self.info, weights, self.label, self.step)


class StoredTensor(np.ndarray):
    """A recorded tensor: an array with the methods that rules use to read torch and paddle tensors."""

    def detach(self) -> StoredTensor:
        return self

    def cpu(self) -> StoredTensor:
        return self

    def clone(self) -> StoredTensor:
        return self.copy()

    def numpy(self) -> np.ndarray:
        return np.array(self)

    def t(self) -> StoredTensor:
        return self.T

    def chunk(self, chunks: int, dim: int = 0) -> list[StoredTensor]:
        return [part.view(StoredTensor) for part in np.array_split(self, chunks, axis=dim)]


class StoredLayer:
    """Stand-in for a recorded layer in a rule of the user: tensors, sublayers and settings are attributes."""

    def __init__(self, model: StoredModel, layer: Layer) -> None:
        self._padiff = model, layer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_padiff":
            raise AttributeError(name)
        model, layer = self._padiff
        if any(p.slot == name for p in layer.parameters):
            return model.value(layer.path, name).view(StoredTensor)
        path = name if layer.path == ROOT else f"{layer.path}.{name}"
        if any(each.path == path for each in model.info.layers):
            return model.layer(path)
        if name in layer.settings:
            return layer.settings[name]
        raise AttributeError(
            f"{layer.path} is a recorded {layer.type}, of which there are its tensors "
            f"({', '.join(p.slot for p in layer.parameters) or 'none'}), its layers and its settings; no {name!r}"
        )

    def __getitem__(self, key: object) -> Any:
        return getattr(self, str(key))

    def named_parameters(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield all tensors of this layer and the layers below, with dotted names."""
        model, root = self._padiff
        for layer in model.below(root.path):
            inner = layer.path if root.path == ROOT else layer.path[len(root.path) + 1 :]
            for p in layer.parameters:
                name = p.slot if layer.path in (root.path, ROOT) else f"{inner}.{p.slot}"
                yield name, model.value(layer.path, p.slot).view(StoredTensor)

    def state_dict(self) -> dict[str, StoredTensor]:
        """Return all tensors of this layer and the layers below, by dotted name."""
        return dict(self.named_parameters())
