"""What two atlases say differently, leaving out what rounding changes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from padiff.compare.diagnose.known import Atlas, AtlasRow
from padiff_atlas.table import difference_text

# Two sizes of one difference are within this factor on all processors; a ratio within this share.
_SIZE, _RATIO = 3.0, 1e-2


def changes(before: Atlas, now: Atlas) -> Iterator[str]:
    """Probes of which the two say something different, in words; those that only one has are left out."""
    old = {row.name: row for row in before.rows}
    for row in now.rows:
        known = old.get(row.name)
        if known is not None and (what := _change(known, row)):
            yield f"{row.name}: {what}"


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
