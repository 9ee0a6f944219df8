"""Which lines of the user's own code a call comes from."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

# Lines that are kept of a call, and how long the name of a file is at most.
_LINES, _LETTERS = 4, 120
# Frames that are looked at: deeper recursion says no more.
_FRAMES = 200
_OWN = str(Path(__file__).resolve().parents[1])
# Folders of the callbacks and commands around it.
_AROUND = frozenset({"padiff_hooks", "padiff_lightning", "padiff_hapi"})
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def users_lines() -> tuple[str, ...]:
    """``file:line function`` of the frames of the user's own code under way, the innermost first; no frame is kept."""
    found: list[str] = []
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        name = _shown(frame.f_code.co_filename)
        if name:
            found.append(sys.intern(f"{name}:{frame.f_lineno} {frame.f_code.co_name}"))
        if len(found) == _LINES or frame.f_back is None:
            break
        frame = frame.f_back
    return tuple(found)


@lru_cache(maxsize=4096)
def _shown(file: str) -> str:
    """What a file is called: from the working folder, or by its last names; empty for libraries' and padiff's own."""
    if file.startswith((f"{_OWN}{os.sep}", *_LIBRARIES, "<")) or "-packages" in file:
        return ""
    if Path(file).parent.name in _AROUND:
        return ""
    try:
        here = os.path.relpath(file)
    except ValueError:  # on another drive
        here = file
    return (os.sep.join(Path(file).parts[-3:]) if here.startswith("..") else here)[-_LETTERS:]
