"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the three known names that are most similar to a wrong name, or else the first five."""
    known = list(known)
    close = difflib.get_close_matches(name.replace("*", ""), known, n=3, cutoff=0.4) or known[:5]
    return f"Nearest: {', '.join(close)}" if close else "There are none."
