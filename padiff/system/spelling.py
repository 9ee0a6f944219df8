"""What a mistyped name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known names nearest to a wrong one."""
    known = list(known)
    close = difflib.get_close_matches(name.replace("*", ""), known, n=3, cutoff=0.4) or known[:5]
    return f"Nearest: {', '.join(close)}" if close else "There are none."
