"""Names of a script's models and tensors: its variables, and what its objects and containers hold."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

from padiff.system.frames import is_users, stands_in

# Functions that hand out the dictionary of a function's variables.
_SHOWING = frozenset({"locals", "vars", "dir", "eval", "exec"})
# How far objects and containers hold others, and how many items of a container are searched.
_DEEPEST, _LONGEST = 2, 64


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the user's code from a frame outwards, the innermost first."""
    frames = []
    while frame is not None:
        if is_users(frame.f_code.co_filename) and not stands_in(frame):
            frames.append(frame)
        frame = frame.f_back
    return frames


def variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield names and values: the main module's globals, then local variables from the outermost frame inwards.

    Attributes of objects come after the variables themselves, and items of lists and dicts after these.
    """
    main = sys.modules.get("__main__")
    scopes: list[Mapping[str, Any]] = [vars(main)] if main is not None else []
    scopes += [locals_of(frame) for frame in reversed(user_frames(frame))]
    level = [item for scope in scopes for item in list(scope.items()) if not item[0].startswith("__")]
    yield from level
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        holders = [(name, value) for name, value in level if id(value) not in seen]
        seen.update(id(value) for _, value in holders)
        level = [item for _, value in holders if is_of_user(value) for item in list(vars(value).items())]
        level += [item for name, value in holders for item in _items(name, value)]
        yield from level


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a frame's local variables, and leave no trace in the frame.

    Before Python 3.13 a function's frame keeps the dictionary that shows its variables, and in it each value that the
    function drops later; it is the dictionary that ``locals()`` gives, too. It is emptied here, so a function that may
    hold it has no variables.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if not _SHOWING.isdisjoint(frame.f_code.co_names):
        return {}
    shown = frame.f_locals
    values = dict(shown)
    shown.clear()
    return values


def names_of(objects: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the names of the user's variables and attributes that hold each object, by the object's key."""
    keys = {id(each): key for key, each in objects.items()}
    names: dict[str, set[str]] = {}
    for name, value in variables(sys._getframe(1)):
        if id(value) in keys:
            names.setdefault(keys[id(value)], set()).add(name)
    return names


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    if type(value) in (list, tuple):
        return [(f"{name}_{k}", item) for k, item in enumerate(value[:_LONGEST])]
    if type(value) is dict:
        return [(key, item) for key, item in list(value.items())[:_LONGEST] if isinstance(key, str)]
    return []


def is_of_user(value: Any) -> bool:
    """Return True for an object of a class that the user's code defines."""
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_users(file)
