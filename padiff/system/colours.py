"""Decision on coloured output."""

from __future__ import annotations

import os
from typing import IO

_NO = ("", "0", "false", "no", "off")


def coloured(stream: IO[str]) -> bool:
    """Return True if the stream is a terminal that can show colours.

    ``NO_COLOR`` (any value) forces False, and ``FORCE_COLOR`` forces True, except for values such as 0 or ``off``.
    ``NO_COLOR`` has precedence.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "").lower() not in _NO:
        return True
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except (ValueError, AttributeError):  # the stream is closed, or is no real stream
        return False
