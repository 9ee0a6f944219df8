"""A diff, held against its limit."""

from __future__ import annotations

from typing import NamedTuple

from padiff.compare.judge import limits
from padiff.compare.judge.step_figures import bulk_of
from padiff.records import Diff, Figure, Rule


class Limit(NamedTuple):
    """How large an error may be, and which rule allows it."""

    value: float
    rule: Rule

    def times(self, scale: float) -> Limit:
        """The same share, of so much."""
        return Limit(self.value * scale, self.rule)


def value_of(limit: Limit) -> float:
    """By what limits are ordered."""
    return limit.value


def verdict(diff: Diff, limit: Limit) -> Diff:
    """The diff, held against its limit; of a gradient or an update, a few elements may be left out."""
    figures = diff.figures
    assert figures is not None
    scale = figures.reference_l2
    bulk = bulk_of(diff)
    # An estimate is reported only where chance does not explain it.
    most, rule = limit.value * (1 + limits.SURE * figures.spread), limit.rule
    few = limits.FEW_OF_UPDATES if diff.pair.stage == "update" else limits.FEW_AT_MOST
    if bulk is not None and bulk <= most < figures.l2 <= few * scale:
        return diff.judged(True, Figure.BULK, bulk / scale, most / scale, rule)
    if scale > 0:
        return diff.judged(figures.l2 <= most, Figure.REL_L2, figures.rel_l2, most / scale, rule)
    return diff.judged(figures.l2 <= most, Figure.L2, figures.l2, most, rule)
