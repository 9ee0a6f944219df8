"""Warnings to the user of a training."""

from __future__ import annotations

import sys
import warnings

from padiff.system.switches import say


def warn(text: str) -> None:
    """Warn at the line of the user's code that called padiff.

    If warnings are errors (``python -W error``), the text is printed on standard error, as padiff must not end a
    training.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("padiff"):
        level, frame = level + 1, frame.f_back
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=level + 1)
    except RuntimeWarning:
        say(text.removeprefix("padiff: "))
