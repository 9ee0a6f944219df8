"""The optimizers that a recorder is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.base import Framework


def optimizers_of(given: Any, framework: Framework) -> list[Any]:
    """One optimizer, several, or several by name, as a list of those to hook, each once.

    Raises:
        UsageError: one of them is no optimizer of the framework, or one that nothing can be seen of.
    """
    if given is None:
        return []
    if isinstance(given, Mapping):
        listed = list(given.values())
    else:
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
    found: dict[int, Any] = {}
    for one in listed:
        steppers = framework.optimizers.steppers(one)
        if not steppers:
            raise UsageError(_refusal(one, framework))
        found.update((id(stepper), stepper) for stepper in steppers)
    return list(found.values())


def _refusal(one: Any, framework: Framework) -> str:
    got = f"{type(one).__module__}.{type(one).__qualname__}"
    if framework.optimizers.is_optimizer(one):
        return (
            f"optimizer: of {got} nothing can be seen: it was not initialised as an optimizer of {framework.name} "
            "(super().__init__), and holds none whose parameters are its own. Give the optimizer whose step() does the "
            "work, or none: gradients are then what backward left"
        )
    name = framework.name
    return f"optimizer: expected an optimizer of {name} (or a list of them) for a {name} model, got {got}"
