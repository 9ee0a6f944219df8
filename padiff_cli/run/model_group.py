"""Several models of a training as one: a ``ModuleDict``, or a ``LayerDict``, which nobody calls."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from padiff.frameworks import framework_of


def group(models: Mapping[str, Any]) -> Any:
    """Return one layer that holds models by name; they stay as they are.

    The group trains while one of its models does.
    """
    name = framework_of(next(iter(models.values()))).name
    nn = importlib.import_module(f"{name}.nn")
    base = nn.ModuleDict if name == "torch" else nn.LayerDict

    def is_training(layers: Any) -> bool:
        return any(layer.training for layer in layers.values())

    # Making a layer sets it to training; the group is what its models are.
    training = property(is_training, lambda layers, value: None)
    kind = type(base.__name__, (base,), {"training": training, "__module__": base.__module__})
    layers = kind()
    for label, model in models.items():
        key = label.replace(".", "_")
        while hasattr(layers, key):
            key += "_"
        layers[key] = model
    return layers
