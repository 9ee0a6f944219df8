"""Result of a second computation of the first diff, in float64."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records.both import SIDES, Both


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Agreement of both sides with float64, at a place that each side's own recorded values allow to recompute.

    Attributes:
        what: the recomputed object: ``layer``, ``loss``, ``update``, or ``weight`` (from the previous step and its
            update).
        rules: the formula of each side, from its own settings: ``LayerNorm``, ``cross_entropy``, ``AdamW``. Empty: the
            side runs code without a known formula, and was compared with the other side's formula.
        errors: relative L2 error of each side.
        wrong: the side that does not agree: ``reference`` or ``candidate``; empty: both agree, and the runs' settings
            differ.
    """

    what: str
    rules: Both[str]
    errors: Both[float]
    wrong: str = ""

    @property
    def text(self) -> str:
        """Return the result as a sentence."""
        if not self.wrong:
            return self._both()
        right, wrong = SIDES if self.wrong == SIDES.candidate else SIDES.swapped()
        near, far = _share(getattr(self.errors, right)), _share(getattr(self.errors, wrong))
        if self.what == "weight":
            return (
                f"The {right}'s weight is that of the step before with its update added (to {near}), the {wrong}'s is "
                f"off by {far}."
            )
        if self.what == "update":
            rules = getattr(self.rules, right), getattr(self.rules, wrong)
            return (
                f"The {right}'s update agrees with its own declared {rules[0]} in float64 to {near}, the {wrong} "
                f"departs from its own declared {rules[1]} by {far}."
            )
        if not all(self.rules):
            rule = self.rules.reference or self.rules.candidate
            return f"The {right} agrees with a {rule} in float64 to {near}, the {wrong} is off by {far}."
        return f"The {right} agrees with float64 to {near}, the {wrong} is off by {far}."

    def _both(self) -> str:
        near = " and ".join(map(_share, self.errors))
        if self.what == "update":
            return (
                f"Each side's update agrees with its own declared optimizer in float64 (to {near}): the runs are set "
                "differently."
            )
        return f"Both sides agree with float64 by their own settings (to {near}): the runs are set differently."


def _share(error: float) -> str:
    return f"{error:.2g}"
