"""A limit, and the rule that sets it."""

from __future__ import annotations

from typing import NamedTuple

from padiff.records import Rule


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
