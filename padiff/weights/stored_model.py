"""A model of which only the recording is there: its tree, its weights, and stand-ins for its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from padiff.align.matching.parameter_units import tie_targets
from padiff.model.selection import Node
from padiff.records import ROOT, Layer, RunInfo, TensorSource


class StoredModel:
    """The recorded model, looked up by path as a `LiveModel` is.

    Args:
        info: what holds for its run.
        weights: the tensors by path and slot; a tied one under the first path that reaches it.
        label: where it comes from, for messages.
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
        """Its layers as objects: none are there."""
        return ()

    def source(self, path: str, slot: str) -> TensorSource | None:
        """Where a parameter's or buffer's values are; `None` if they were not kept."""
        return self.weights.get(self._homes.get((path, slot), (path, slot)))

    def value(self, path: str, slot: str) -> np.ndarray:
        """The values of a parameter or buffer."""
        source = self.source(path, slot)
        if source is None:
            raise KeyError(f"{path}/{slot}")
        return source.read()

    def below(self, path: str) -> list[Layer]:
        """The layer at a path and all below it."""
        return [x for x in self.info.layers if x.path == path or path == ROOT or x.path.startswith(f"{path}.")]

    def layer(self, path: str) -> StoredLayer:
        """A stand-in for the layer at a path."""
        known = self._layers[path]
        made: StoredLayer = type(known.type, (StoredLayer,), {})(self, known)
        return made

    def with_values(self, weights: Mapping[tuple[str, str], TensorSource]) -> StoredModel:
        """The same model with other values."""
        return StoredModel(self.info, weights, self.label, self.step)


class StoredTensor(np.ndarray):
    """A recorded tensor: an array that also answers to the few calls by which people take values out of a tensor."""

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
    """Stands for a layer of a recorded model in a rule of the user's: its tensors and layers are its attributes."""

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
        """All tensors below, by dotted names."""
        model, own = self._padiff
        for layer in model.below(own.path):
            inner = layer.path if own.path == ROOT else layer.path[len(own.path) + 1 :]
            for p in layer.parameters:
                name = p.slot if layer.path in (own.path, ROOT) else f"{inner}.{p.slot}"
                yield name, model.value(layer.path, p.slot).view(StoredTensor)

    def state_dict(self) -> dict[str, StoredTensor]:
        """All tensors below, by dotted names."""
        return dict(self.named_parameters())
