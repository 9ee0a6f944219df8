"""Check and list the optimizers that are passed to a recorder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.base import Framework


def optimizers_of(given: Any, framework: Framework) -> list[Any]:
    """Return the distinct optimizers to hook.

    Args:
        given: one optimizer, a list or tuple of optimizers, a mapping of optimizers, or `None`.

    Raises:
        UsageError: an object is no optimizer of the framework, or its steps cannot be observed.
    """
    if given is None:
        return []
    if isinstance(given, Mapping):
        listed = list(given.values())
    else:
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
    hooked: dict[int, Any] = {}
    for optimizer in listed:
        steppers = framework.optimizers.steppers(optimizer)
        if not steppers:
            raise UsageError(_refusal(optimizer, framework))
        hooked.update((id(stepper), stepper) for stepper in steppers)
    return list(hooked.values())


def _refusal(optimizer: Any, framework: Framework) -> str:
    got = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if framework.optimizers.is_optimizer(optimizer):
        return (
            f"optimizer: of {got} nothing can be seen: it was not initialised as an optimizer of {framework.name} "
            "(super().__init__), and holds none whose parameters are its own. Give the optimizer whose step() does the "
            "work, or none: gradients are then what backward left"
        )
    name = framework.name
    return f"optimizer: expected an optimizer of {name} (or a list of them) for a {name} model, got {got}"
