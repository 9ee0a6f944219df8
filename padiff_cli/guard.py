"""Boundary between padiff's watchers and the watched script, which padiff's own errors do not cross."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from padiff.errors import RunsDifferError
from padiff.system.guard import reraise_from_signal_handler

_Method = TypeVar("_Method", bound=Callable[..., Any])


def guarded(method: _Method) -> _Method:
    """Hand an error of a watcher's method to the watcher's ``give_up(error)``, and return None to the script.

    An exception that ends the script on purpose passes through: `RunsDifferError`, and any that is no `Exception`.
    """

    @functools.wraps(method)
    def call(watcher: Any, *args: Any) -> Any:
        try:
            return method(watcher, *args)
        except RunsDifferError:
            raise
        except Exception as error:
            reraise_from_signal_handler(error)
            watcher.give_up(error)
            return None

    return call  # type: ignore[return-value]
