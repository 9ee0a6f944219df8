"""Differences between two atlases, rounding aside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from padiff.compare.diagnose.known_differences import Atlas, AtlasRow
from padiff_atlas.table import difference_text

# Sizes of a difference vary by at most this factor between processors, ratios by at most this share.
_SIZE, _RATIO = 3.0, 1e-2


class Change(NamedTuple):
    """A probe with another result in the newer atlas.

    Attributes:
        old, new: its rows.
        what: what changed, in words.
    """

    old: AtlasRow
    new: AtlasRow
    what: str


def changes(before: Atlas, now: Atlas) -> Iterator[Change]:
    """Yield the probes with different results in the two atlases; probes of only one atlas are skipped."""
    old = {row.name: row for row in before.rows}
    for row in now.rows:
        previous = old.get(row.name)
        if previous is not None and (what := _change(previous, row)):
            yield Change(previous, row, what)


def changed_framework(before: Atlas, now: Atlas) -> str:
    """Return the framework that is of another version in the two atlases; empty if both or none are."""
    names = [name for name, old, new in zip(("torch", "paddle"), before.versions, now.versions) if old != new]
    return names[0] if len(names) == 1 else ""


def _change(old: AtlasRow, new: AtlasRow) -> str:
    if (old.torch, old.paddle, old.mended, old.mended_torch) != (new.torch, new.paddle, new.mended, new.mended_torch):
        return "another call"
    text = f"{difference_text(new)}, it was {difference_text(old)}"
    if old.kind != new.kind or (new.kind in ("shapes", "raises") and old.at != new.at):
        return text
    if new.differs and (not _same_size(old, new) or {old.direction, new.direction} == {"+", "-"}):
        return text
    if old.wrong != new.wrong:
        return "the call that should agree " + ("does not" if new.wrong else "does now")
    if old.agrees != new.agrees:
        return f"float64 agrees with {new.agrees}, it was {old.agrees}"
    return ""


def _same_size(old: AtlasRow, new: AtlasRow) -> bool:
    if old.rel_l2 is None or new.rel_l2 is None or math.isinf(old.rel_l2) or math.isinf(new.rel_l2):
        return old.rel_l2 == new.rel_l2
    if (old.ratio is None) != (new.ratio is None):
        return False
    if old.ratio is not None and new.ratio is not None:
        return math.isclose(old.ratio, new.ratio, rel_tol=_RATIO)
    return 1 / _SIZE < new.rel_l2 / old.rel_l2 < _SIZE
