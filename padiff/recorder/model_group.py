"""Several models of a training, and tensors of no model, as one ``ModuleDict`` or ``LayerDict``, which nobody calls."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks import framework_of


def group(models: Mapping[str, Any]) -> Any:
    """Return one layer that holds models by name; see `group_of`.

    Raises:
        UsageError: there is no model, a name is no text, or the models belong to several frameworks.
    """
    if not models or not all(isinstance(name, str) and name for name in models):
        raise UsageError(f"several models are recorded by name: expected {{'g': g, 'd': d}}, got names {list(models)}")
    names = sorted({framework_of(model).name for model in models.values()})
    if len(names) > 1:
        raise UsageError("a run holds models of one framework, got torch and paddle: record each with its own recorder")
    return group_of(names[0], models, {})


def group_of(framework: str, models: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """Return one layer that holds models and tensors by name; these stay as they are.

    The group trains while one of its models does.

    Args:
        framework: name of the framework.
        tensors: trained tensors that no layer owns. They become parameters of the group.
    """
    nn = importlib.import_module(f"{framework}.nn")
    base = nn.ModuleDict if framework == "torch" else nn.LayerDict

    def is_training(layers: Any) -> bool:
        return not len(layers) or any(layer.training for layer in layers.values())

    # Making a layer sets it to training; the group is what its models are.
    training = property(is_training, lambda layers, value: None)
    kind = type(base.__name__, (base,), {"training": training, "__module__": base.__module__})
    layers = kind()
    for label, model in models.items():
        layers[_free(layers, label)] = model
    for label, tensor in tensors.items():
        layers._parameters[_free(layers, label)] = tensor  # a plain tensor is refused by the checks of `__setattr__`
    return layers


def _free(layers: Any, label: str) -> str:
    """Return a name for a model or tensor that the group has no attribute of."""
    name = label.replace(".", "_")
    while hasattr(layers, name):
        name += "_"
    return name
