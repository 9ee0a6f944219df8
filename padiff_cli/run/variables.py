"""Names of a script's models and tensors: its variables, and what its objects and containers hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

from padiff.system.frames import is_users


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the user's code from a frame outwards, the innermost first."""
    frames = []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


def variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield names and values: the main module's globals, then local variables from the outermost frame inwards.

    What objects, lists and dicts hold comes after the variables themselves, by the name of its attribute or key.
    """
    main = sys.modules.get("__main__")
    scopes: list[Mapping[str, Any]] = [vars(main)] if main is not None else []
    scopes += [frame.f_locals for frame in reversed(user_frames(frame))]
    for scope in scopes:
        yield from list(scope.items())
    seen: set[int] = set()
    for scope in scopes:
        for name, value in list(scope.items()):
            if id(value) not in seen and not name.startswith("__"):
                seen.add(id(value))
                yield from _inside(name, value, depth=2)


def _inside(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        held = [(f"{name}_{k}", item) for k, item in enumerate(value[:64])]
    elif isinstance(value, dict):
        held = [(key, item) for key, item in list(value.items())[:64] if isinstance(key, str)]
    elif isinstance(value, (type, ModuleType)) or not is_of_user(value):
        return
    else:
        held = list(vars(value).items())
    yield from held
    if depth > 1:
        for inner, item in held:
            yield from _inside(inner, item, depth - 1)


def is_of_user(value: Any) -> bool:
    """Return True for an object of a class that the user's code defines."""
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return hasattr(value, "__dict__") and file is not None and is_users(file)
