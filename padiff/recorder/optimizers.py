"""The optimizers that a recorder is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.frameworks.base import Framework


def optimizers_of(given: Any, framework: Framework) -> list[Any]:
    """One optimizer, several, or several by name, as a list.

    Raises:
        UsageError: one of them is no optimizer of the framework.
    """
    if given is None:
        return []
    if isinstance(given, Mapping):
        listed = list(given.values())
    else:
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in listed:
        if not framework.is_optimizer(one):
            raise UsageError(
                f"optimizer: expected an optimizer of {framework.name} (or a list of them) for a {framework.name} "
                f"model, got {type(one).__module__}.{type(one).__qualname__}"
            )
    return listed
