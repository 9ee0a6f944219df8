"""Find the first difference between two training runs.

Importing this package imports neither torch nor paddle, and changes nothing.
"""

from __future__ import annotations

from padiff.system import lazily as _start_folder  # noqa: F401  # before a script leaves its folder
from padiff.system.lazily import names_from

__version__ = "0.1.0"

# Module of each public name, for lazy imports. A line of the stub is ``from M import N as N``.
with open(__file__ + "i", encoding="utf-8") as _stub:
    _PUBLIC = {words[3]: words[1] for words in map(str.split, _stub) if words[:1] == ["from"]}

__all__ = sorted([*_PUBLIC, "__version__"])


__getattr__ = names_from(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return __all__
