"""Telling an older ``padiff`` distribution that is installed beside this one."""

from __future__ import annotations

import importlib.metadata
import warnings

#: The distribution that this package comes in; an older tool's is called ``padiff``, and so is its package.
OURS, OTHERS = "padiff-hooks", "padiff"


def warn_of_older() -> None:
    """Warn if another distribution brought a package of the same name, whose files would mix with these."""
    try:
        version = importlib.metadata.version(OTHERS)
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"the distribution {OTHERS!r} {version} is installed beside {OURS!r}: both bring a package 'padiff', and "
        f"their files mix. Run: pip uninstall -y {OTHERS} && pip install --force-reinstall --no-deps {OURS}",
        RuntimeWarning,
        stacklevel=3,
    )
