"""What a loop asks of a recorder is not seen by modes of the user's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def aside(
    method: Callable[Concatenate[Any, _Given], _Result],
) -> Callable[Concatenate[Any, _Given], _Result]:
    """Have a method of an object that has a ``_framework`` run outside of the user's modes (`Hooking.aside`)."""

    @wraps(method)
    def call(self: Any, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with self._framework.hooks.aside():
            return method(self, *args, **kwargs)

    return call
