"""padiff: where do two training runs that should be equal part?

Importing this package imports neither torch nor paddle, and changes nothing.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Where each public name comes from; looked up when first asked for.
_PUBLIC = {
    alias.name: str(line.module)
    for line in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(line, ast.ImportFrom)
    for alias in line.names
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'padiff' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
