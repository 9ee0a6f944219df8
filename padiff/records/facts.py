"""What is found out once for all that is alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Thing = TypeVar("_Thing")
_Fact = TypeVar("_Fact")


def once(facts: dict[Any, Any], find: Callable[[_Thing], _Fact], thing: _Thing) -> _Fact:
    """What a function finds out from a thing. It is called once; ``facts`` keeps what it found."""
    if find not in facts:
        facts[find] = find(thing)
    return facts[find]  # type: ignore[no-any-return]
