"""Limit of an error, and the rule that sets the limit."""

from __future__ import annotations

from typing import NamedTuple

from padiff.records import Rule


class Limit(NamedTuple):
    """Largest allowed error, and the rule that allows it."""

    value: float
    rule: Rule

    def times(self, scale: float) -> Limit:
        """Return the limit multiplied by a scale."""
        return Limit(self.value * scale, self.rule)


def value_of(limit: Limit) -> float:
    """Return the limit's value, as a sort key."""
    return limit.value
