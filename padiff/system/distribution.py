"""Detection of an older ``padiff`` distribution that is installed beside this one."""

from __future__ import annotations

import importlib.metadata

from padiff.system.warn import warn

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
