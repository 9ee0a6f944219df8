"""Whether what is written to a stream may be coloured."""

from __future__ import annotations

import os
from typing import IO

_NO = ("", "0", "false", "no", "off")


def coloured(stream: IO[str]) -> bool:
    """Whether colours may be written: on a terminal that knows them; ``NO_COLOR`` and ``FORCE_COLOR`` decide otherwise.

    ``NO_COLOR`` (set to anything) wins. ``FORCE_COLOR=0`` does not force.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "").lower() not in _NO:
        return True
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except (ValueError, AttributeError):  # it is closed, or something else in a stream's place
        return False
