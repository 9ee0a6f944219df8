"""Finding the framework of a model, without importing one that the user has not."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.base import Framework

_NAMES = ("torch", "paddle")


def framework_of(model: Any) -> Framework:
    """The framework that a model belongs to.

    Raises:
        UsageError: the value is neither a torch Module nor a paddle Layer.
    """
    for name in _NAMES:
        if name not in sys.modules:
            continue
        framework: Framework = importlib.import_module(f"padiff.frameworks.{name}").FRAMEWORK
        if framework.is_model(model):
            return framework
    hint = ""
    if hasattr(model, "network") and hasattr(model, "train_batch"):
        hint = " A paddle.Model wraps the layer: give its .network, or use padiff_hapi.PaDiffCallback in fit()."
    got = f"{type(model).__module__}.{type(model).__qualname__}"
    raise UsageError(f"expected a torch.nn.Module or a paddle.nn.Layer, got {got}.{hint}")
