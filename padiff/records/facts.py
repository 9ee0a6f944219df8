"""What is found out once for all that is alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Thing = TypeVar("_Thing")
_Fact = TypeVar("_Fact")


def once(facts: dict[Any, Any], find: Callable[[_Thing], _Fact], given: Callable[[], _Thing]) -> _Fact:
    """What a function finds out from what it is given. Both are called once; ``facts`` keeps what was found."""
    if find not in facts:
        facts[find] = find(given())
    return facts[find]  # type: ignore[no-any-return]
