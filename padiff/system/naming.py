"""Naming a few of many in a sentence."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(names: Sequence[object], most: int) -> str:
    """The first names, and how many there are beside them: ``a, b and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
