"""Telling an older ``padiff`` distribution that is installed beside this one."""

from __future__ import annotations

import importlib.metadata

from padiff.system.warn import warn

#: The distribution that this package comes in; an older tool's is called ``padiff``, and so is its package.
NAME, OLDER = "padiff-hooks", "padiff"


def warn_of_older() -> None:
    """Warn if another distribution brought a package of the same name, whose files would mix with these."""
    try:
        version = importlib.metadata.version(OLDER)
    except importlib.metadata.PackageNotFoundError:
        return
    warn(
        f"the distribution {OLDER!r} {version} is installed beside {NAME!r}: both bring a package 'padiff', and "
        f"their files mix. Run: pip uninstall -y {OLDER} && pip install --force-reinstall --no-deps {NAME}"
    )
