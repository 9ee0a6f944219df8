"""Warnings to the user of a training."""

from __future__ import annotations

from padiff.system.switches import say


def warn(text: str, lines: bool = False) -> None:
    """Print a warning on standard error, behind ``padiff:``.

    Args:
        text: the warning.
        lines: True if the text has several lines.

    Not through `warnings`: the training's filters would hide it, or raise it and end the training.
    """
    say(text, alarming=True, lines=lines)
