"""The plain arguments of a function's call: numbers, texts, and lists of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Limits of plain values: items of a list, letters of a text, levels of nesting. Larger values are no settings.
_ITEMS, _LETTERS, _DEEPEST = 16, 60, 4


class _OmittedError(Exception):
    """A value is not plain, so its argument is omitted."""


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain arguments as JSON values.

    Arguments that are `None`, private names (leading underscore) and ``name`` are left out.
    """
    plain = {}
    for name, value in arguments.items():
        if value is None or name == "name" or name.startswith("_"):
            continue
        try:
            plain[name] = _plain(value, 0)
        except _OmittedError:
            continue
    return plain


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    kind = type(value)
    if kind is int or kind is float or isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, str):
        if len(value) > _LETTERS:
            raise _OmittedError
        return value
    if value is Ellipsis:
        return "..."
    if isinstance(value, slice):
        parts = [value.start, value.stop] if value.step is None else [value.start, value.stop, value.step]
        return ":".join("" if part is None else str(_plain(part, depth + 1)) for part in parts)
    if isinstance(value, (list, tuple)):
        if len(value) > _ITEMS or depth >= _DEEPEST:
            raise _OmittedError
        return [_plain(item, depth + 1) for item in value]
    text = str(value) if kind.__name__ in ("dtype", "DataType", "VarType") else ""
    if text:
        return text.rpartition(".")[2]
    if hasattr(value, "item") and getattr(value, "shape", None) == () and kind.__module__ == "numpy":
        return _number(value.item())
    raise _OmittedError


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return int(value) if abs(int(value)) < 2**63 else str(int(value))
