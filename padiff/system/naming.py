"""Short lists of names in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(names: Sequence[object], most: int) -> str:
    """Return the first `most` names and the number of the others: ``a, b and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
