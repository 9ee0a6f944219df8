"""Group of several models of a training: a ``ModuleDict``, or a ``LayerDict``, which nobody calls."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks import framework_of


def group(models: Mapping[str, Any]) -> Any:
    """Return one layer that holds models by name; they stay as they are.

    The group trains while one of its models does.

    Raises:
        UsageError: there is no model, a name is no text, or the models belong to several frameworks.
    """
    if not models or not all(isinstance(name, str) and name for name in models):
        raise UsageError(f"several models are recorded by name: expected {{'g': g, 'd': d}}, got names {list(models)}")
    names = sorted({framework_of(model).name for model in models.values()})
    if len(names) > 1:
        raise UsageError("a run holds models of one framework, got torch and paddle: record each with its own recorder")
    (name,) = names
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
