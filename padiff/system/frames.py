"""Where in people's code something is called."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from padiff.system.start_folder import current_folder, start_folder

#: Lines of a stack that are kept: the innermost ones.
MOST = 12
# Letters of a line that are kept.
_LONGEST = 200
_PADIFF = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# Packages that call models, and are not their code.
_AROUND = ("padiff", "lightning", "pytorch_lightning", "_pytest", "pytest")
_INSTALLED = ("site-packages", "dist-packages")


class Frame(NamedTuple):
    """A line of a call stack.

    Attributes:
        file: its file; relative to the working directory at the start where it lies below that.
        line: its number, counted from 1.
        function: the function that it is in.
        code: the line itself, without what is before and after it; empty where the file can't be read.
    """

    file: str
    line: int
    function: str
    code: str


def is_users(file: str) -> bool:
    """Whether a file is neither padiff's, nor the standard library's, nor of an installed package."""
    return not (file.startswith((_PADIFF, *_LIBRARIES, "<")) or any(name in file for name in _INSTALLED))


def code_frames(framework: str) -> tuple[Frame, ...]:
    """The stack of whoever calls now, outermost line first: lines of the user's own code, and the line that calls.

    The latter's file may be an installed package's (a model zoo), though not the framework's or padiff's.

    Args:
        framework: its name, which its package has too.
    """
    found: list[Frame] = []
    for frame in _frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        users, model, short = _about(file, framework)
        if users or (model and not found):
            found.append(Frame(short, frame.f_lineno, frame.f_code.co_name, _code(file, frame.f_lineno)))
            if len(found) == MOST:
                break
    return tuple(reversed(found))


@lru_cache(maxsize=4096)
def _about(file: str, framework: str) -> tuple[bool, bool, str]:
    """Of a file: whether it is the user's, whether it may hold the code of a model, and what it is called."""
    return is_users(file), _is_model(file, framework), _short(file)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_model(file: str, framework: str) -> bool:
    """Whether an installed package's file may hold the code of a model."""
    if file.startswith((_PADIFF, "<")):
        return False
    parts = Path(file).parts
    package = next((parts[k + 1] for k, part in enumerate(parts[:-1]) if part in _INSTALLED), None)
    return package is not None and package != framework and not package.startswith(_AROUND)


def _short(file: str) -> str:
    for folder in (start_folder(), current_folder()):
        here = os.path.join(folder, "")
        if folder and file.startswith(here):
            return file[len(here) :]
    return file


@lru_cache(maxsize=4096)
def _code(file: str, line: int) -> str:
    return linecache.getline(os.path.join(start_folder(), file), line).strip()[:_LONGEST]
