"""Warnings to the user of a training, also of an older distribution beside this one."""

from __future__ import annotations

import importlib.metadata

from padiff.system.terminal import say


def warn(text: str, lines: bool = False) -> None:
    """Print a warning on standard error, behind ``padiff:``.

    Args:
        text: the warning.
        lines: True if the text has several lines.

    Not through `warnings`: the training's filters would hide it, or raise it and end the training.
    """
    say(text, alarming=True, lines=lines)


#: Name of this package's distribution, and of the distribution of an older tool whose package is also ``padiff``.
NAME, OLDER = "padiff-hooks", "padiff"


def warn_of_older() -> None:
    """Warn if the older distribution is installed, because the files of both packages mix in one folder."""
    try:
        version = importlib.metadata.version(OLDER)
    except importlib.metadata.PackageNotFoundError:
        return
    warn(
        f"the distribution {OLDER!r} {version} is installed beside {NAME!r}: both bring a package 'padiff', and "
        f"their files mix. Run: pip uninstall -y {OLDER} && pip install --force-reinstall --no-deps {NAME}"
    )
