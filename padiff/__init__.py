"""padiff: where do two training runs that should be equal part?

Importing this package imports neither torch nor paddle, and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Where each public name comes from; looked up when first asked for. A line of the stub is ``from M import N as N``.
with open(__file__ + "i", encoding="utf-8") as _stub:
    _PUBLIC = {words[3]: words[1] for words in map(str.split, _stub) if words[:1] == ["from"]}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'padiff' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
