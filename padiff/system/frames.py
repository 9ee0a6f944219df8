"""Lines of the user's code on the call stack, and the variables that hold a script's models."""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from padiff.system.lazily import current_folder, start_folder

#: Largest number of recorded lines of a stack; the innermost lines are kept.
MOST = 12
# Largest number of recorded characters of a line, and of a statement; and of a statement's lines. Chosen.
_LONGEST, _STATEMENT, _LINES = 200, 1200, 30
# Strings, comments and brackets of code.
_TOKENS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|#.*|[()\[\]{}]""")
_PADIFF = str(Path(__file__).resolve().parents[1])
# The demo's models and trainings are code like a user's.
_DEMO = os.path.join(os.path.dirname(_PADIFF), "padiff_demo", "")
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# Packages that call models, and do not contain the code of models.
_AROUND = ("padiff", "lightning", "pytorch_lightning", "_pytest", "pytest")
_INSTALLED = ("site-packages", "dist-packages")
# Packages of padiff that are not beside it where it runs from its sources.
_INTEGRATIONS = tuple(
    f"{os.sep}{name}{os.sep}"
    for name in ("padiff_hapi", "padiff_lightning", "padiff_transformers", "padiff_paddleformers")
)


class Frame(NamedTuple):
    """A line of a call stack.

    Attributes:
        file: path of the file, relative to the working directory at the start if the file is below it.
        line: number of the line, counted from 1.
        function: name of the function.
        code: text of the line without surrounding whitespace, with the next lines if its brackets close there; empty
            if the file can't be read.
    """

    file: str
    line: int
    function: str
    code: str

    def is_line(self, text: str) -> bool:
        """Return True if a line of a file, without surrounding whitespace, is the first line of the code."""
        first = self.code.partition("\n")[0]
        return text[:_LONGEST] == first or (first != self.code and text.startswith(first))


def is_users(file: str) -> bool:
    """Return True if a file belongs neither to padiff, nor to the standard library, nor to an installed package."""
    return file.startswith(_DEMO) or not (
        file.startswith((_PADIFF, *_LIBRARIES, "<")) or any(name in file for name in (*_INSTALLED, *_INTEGRATIONS))
    )


def is_own(file: str) -> bool:
    """Return True if a file belongs to padiff."""
    return file.startswith(_PADIFF) and not file.startswith(_DEMO)


def code_frames(framework: str) -> tuple[Frame, ...]:
    """Return the lines of the user's code on the current call stack, outermost first, 12 at most.

    The innermost line may also be in an installed package that contains models (a model zoo), but not in the framework
    or padiff.

    Args:
        framework: name of the framework, which is also the name of its package.
    """
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < MOST:
        file = frame.f_code.co_filename
        users, model, short = _about(file, framework)
        if (users or (model and not frames)) and not stands_in(frame):
            frames.append(Frame(short, frame.f_lineno, frame.f_code.co_name, _code(file, frame.f_lineno)))
        frame = frame.f_back
    return tuple(reversed(frames))


@lru_cache(maxsize=4096)
def _about(file: str, framework: str) -> tuple[bool, bool, str]:
    """Return the results of `is_users`, `_is_model` and `short_path` for a file, from a cache."""
    return is_users(file), _is_model(file, framework), short_path(file)


def outside_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is neither padiff's nor a framework's; `None` if there is none."""
    while frame is not None and (not _is_outside(frame.f_code.co_filename) or stands_in(frame)):
        frame = frame.f_back
    return frame


@lru_cache(maxsize=4096)
def _is_outside(file: str) -> bool:
    return is_users(file) or (_is_model(file, "torch") and _is_model(file, "paddle"))


def stands_in(frame: FrameType) -> bool:
    """Return True for a function of the user's that padiff intercepts: its own code runs in another frame."""
    constants = frame.f_code.co_consts
    return len(constants) < 4 and any(type(each).__module__ == "padiff.frameworks.interception" for each in constants)


def _is_model(file: str, framework: str) -> bool:
    """Return True if a file is in an installed package that may contain the code of models."""
    if file.startswith((_PADIFF, "<")):
        return False
    parts = Path(file).parts
    package = next((parts[k + 1] for k, part in enumerate(parts[:-1]) if part in _INSTALLED), None)
    return package is not None and package != framework and not package.startswith(_AROUND)


def short_path(file: str) -> str:
    """Return a path relative to the working directory at the start if the file is below it."""
    for folder in (start_folder(), current_folder()):
        here = os.path.join(folder, "")
        if folder and file.startswith(here):
            return file[len(here) :]
    return file


@lru_cache(maxsize=4096)
def _code(file: str, line: int) -> str:
    lines = linecache.getlines(os.path.join(start_folder(), file)) or linecache.getlines(file)
    return statement(lines, line)


def statement(lines: Sequence[str], number: int) -> str:
    """Return a line of a file without surrounding whitespace, and the lines after it up to the one that closes its
    brackets, without comments.

    Args:
        lines: the lines of the file.
        number: the number of the line, from 1.
    """
    shown, depth, room = [], 0, _STATEMENT
    for line in lines[number - 1 : number - 1 + _LINES]:
        shown.append(_TOKENS.sub(lambda token: "" if token[0][0] == "#" else token[0], line).strip())
        depth += sum((token in "([{") - (token in ")]}") for token in _TOKENS.findall(line))
        room -= len(shown[-1]) + 1
        if depth <= 0 or room < 0:
            break
    if len(shown) > 1 and depth <= 0 <= room:
        return "\n".join(shown)
    return lines[number - 1].strip()[:_LONGEST] if 0 < number <= len(lines) else ""


# Functions that hand out the dictionary of a function's variables.
_SHOWING = frozenset({"locals", "vars", "dir", "eval", "exec"})
# How far objects and containers hold others, and how many items of a container are searched.
_DEEPEST, _VARIABLES_LONGEST = 2, 64


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
    if _shows_variables(frame.f_code):
        return {}
    shown = frame.f_locals
    values = dict(shown)
    shown.clear()
    return values


@lru_cache(maxsize=1024)
def _shows_variables(code: CodeType) -> bool:
    """Return True if a function may call a function that hands out the dictionary of its variables."""
    if _SHOWING.isdisjoint(code.co_names):
        return False
    # ``model.eval()`` is a method of that name.
    return any(each.argval in _SHOWING and each.opname == "LOAD_GLOBAL" for each in dis.get_instructions(code))


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
        return [(f"{name}_{k}", item) for k, item in enumerate(value[:_VARIABLES_LONGEST])]
    if type(value) is dict:
        return [(key, item) for key, item in list(value.items())[:_VARIABLES_LONGEST] if isinstance(key, str)]
    return []


def is_of_user(value: Any) -> bool:
    """Return True for an object of a class that the user's code defines."""
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_users(file)
