"""Measuring all pairs of a step: those that are alike together, the others one by one."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.compare.measure.rows import measured_in_rows
from padiff.compare.measure.together import measured_together
from padiff.records import Diff, Pair


def measured_at_once(pairs: Sequence[Pair]) -> dict[int, Diff]:
    """The diffs, not judged yet, of the pairs that can be measured together, by their places."""
    return {**measured_together(pairs), **measured_in_rows(pairs)}
