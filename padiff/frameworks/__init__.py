"""Functions that find the framework of a model or tensor, without importing a framework that the user has not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.frameworks.settings import FRAMEWORKS, conventions_of


def _imported() -> Iterator[Framework]:
    for name in FRAMEWORKS:
        if _is_imported(name):
            yield _framework(name)


def _is_imported(name: str) -> bool:
    """Return True if a module of the framework's name is the framework.

    Another module may have the name: after `paddle.enable_compat`, ``import torch`` gives a proxy of paddle. A real
    torch that was imported before is then absent from ``sys.modules``. This function still returns True if padiff has
    used the real torch, or if paddle keeps it.
    """
    layer = getattr(getattr(sys.modules.get(name), "nn", None), conventions_of(name).layer.capitalize(), None)
    if str(getattr(layer, "__module__", "")).partition(".")[0] == name:
        return True
    return f"padiff.frameworks.{name}" in sys.modules or name in _behind_proxies()


def _behind_proxies() -> Mapping[str, Any]:
    """Return the real modules that paddle's proxies hide, by name; empty if none was imported before."""
    modules: Mapping[str, Any] = getattr(sys.modules.get("paddle.compat.proxy"), "TORCH_MODULES_CACHE", {})
    return modules


def _framework(name: str) -> Framework:
    module = f"padiff.frameworks.{name}"
    without_proxies: AbstractContextManager[Any] = nullcontext()
    if module not in sys.modules and name in _behind_proxies():
        without_proxies = sys.modules["paddle.compat.proxy"].use_torch_proxy_guard(enable=False, silent=True)
    with without_proxies:
        framework: Framework = importlib.import_module(module).FRAMEWORK
    return framework


def framework_of_tensor(value: Any) -> Framework | None:
    """Return the framework of a tensor, or `None` if the value is no tensor."""
    return next((framework for framework in _imported() if framework.tensors.is_tensor(value)), None)


def framework_of(model: Any) -> Framework:
    """Return the framework of a model.

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
    """Return the framework of this name; without a name, the only framework that this process has imported.

    Raises:
        UsageError: there is no such framework, or not exactly one is imported.
    """
    if name is not None:
        if name not in FRAMEWORKS:
            raise UsageError(f"framework is one of {', '.join(map(repr, FRAMEWORKS))}, got {name!r}")
        try:
            framework = _framework(name)
        except ImportError as error:
            raise UsageError(f"framework={name!r}: {name} can't be imported here ({error})") from error
        return framework
    imported = list(_imported())
    if len(imported) == 1:
        return imported[0]
    how = "both frameworks are imported here" if imported else "no framework is imported here"
    raise UsageError(f"{how}: say of which the tensors are to be, with like=model or framework='torch' or 'paddle'")


def framework_like(value: Any) -> tuple[Framework, Any]:
    """Return the framework of a model or tensor, and a tensor: the value itself, or the model's first parameter.

    The tensor is `None` if the model has no parameters.

    Raises:
        UsageError: the value is neither a model nor a tensor.
    """
    framework = framework_of_tensor(value)
    if framework is not None:
        return framework, value
    framework = framework_of(value)
    return framework, next(iter(value.parameters()), None)
