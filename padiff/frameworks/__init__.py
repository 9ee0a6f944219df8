"""Finding the framework of a model, without importing one that the user has not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.frameworks.known import FRAMEWORKS


def _imported() -> Iterator[Framework]:
    for name in FRAMEWORKS:
        if name in sys.modules:
            framework: Framework = importlib.import_module(f"padiff.frameworks.{name}").FRAMEWORK
            yield framework


def framework_of_tensor(value: Any) -> Framework | None:
    """The framework that a tensor belongs to, `None` for anything else."""
    return next((framework for framework in _imported() if framework.tensors.is_tensor(value)), None)


def framework_of(model: Any) -> Framework:
    """The framework that a model belongs to.

    Raises:
        UsageError: the value is neither a torch Module nor a paddle Layer.
    """
    for framework in _imported():
        if framework.layers.is_model(model):
            return framework
    hint = ""
    if hasattr(model, "network") and hasattr(model, "train_batch"):
        hint = " A paddle.Model wraps the layer: give its .network, or use padiff_hapi.PaDiffCallback in fit()."
    got = f"{type(model).__module__}.{type(model).__qualname__}"
    raise UsageError(f"expected a torch.nn.Module or a paddle.nn.Layer, got {got}.{hint}")
