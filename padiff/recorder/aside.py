"""A decorator that hides a recorder's work from the user's dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


def aside(method: _Method) -> _Method:
    """Decorate a method to run outside of the user's modes (`Hooking.aside`).

    The object of the method must have an attribute ``_framework``.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._framework.hooks.aside():
            return method(self, *args, **kwargs)

    return cast(_Method, call)
