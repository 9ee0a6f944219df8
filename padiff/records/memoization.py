"""Memoization of functions whose result is the same for many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Thing = TypeVar("_Thing")
_Fact = TypeVar("_Fact")


def memoize(facts: dict[Any, Any], find: Callable[[_Thing], _Fact], given: Callable[[], _Thing]) -> _Fact:
    """Return `find(given())`, computed once and cached in `facts` under the function `find`."""
    if find not in facts:
        facts[find] = find(given())
    return facts[find]  # type: ignore[no-any-return]
