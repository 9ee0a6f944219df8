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


def framework_called(name: str | None) -> Framework:
    """The framework of a name; without one, the only one that this process has imported.

    Raises:
        UsageError: there is no such framework, or not exactly one is imported.
    """
    if name is not None:
        if name not in FRAMEWORKS:
            raise UsageError(f"framework is one of {', '.join(map(repr, FRAMEWORKS))}, got {name!r}")
        try:
            found: Framework = importlib.import_module(f"padiff.frameworks.{name}").FRAMEWORK
        except ImportError as error:
            raise UsageError(f"framework={name!r}: {name} can't be imported here ({error})") from error
        return found
    imported = list(_imported())
    if len(imported) == 1:
        return imported[0]
    how = "both frameworks are imported here" if imported else "no framework is imported here"
    raise UsageError(f"{how}: say of which the tensors are to be, with like=model or framework='torch' or 'paddle'")


def framework_like(value: Any) -> tuple[Framework, Any]:
    """The framework of a model or a tensor, and the tensor, or the first one of the model.

    Raises:
        UsageError: it is neither.
    """
    framework = framework_of_tensor(value)
    if framework is not None:
        return framework, value
    framework = framework_of(value)
    return framework, next(iter(value.parameters()), None)
