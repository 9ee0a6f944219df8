"""What a loop asks of a recorder is not seen by modes of the user's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


def aside(method: _Method) -> _Method:
    """Have a method of an object that has a ``_framework`` run outside of the user's modes (`Hooking.aside`)."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._framework.hooks.aside():
            return method(self, *args, **kwargs)

    return cast(_Method, call)
