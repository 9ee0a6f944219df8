"""What computing a place again in float64 shows, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records.both import SIDES, Both


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Whose figures agree with float64, where a place can be computed from what that side recorded itself.

    Attributes:
        what: what was computed: ``layer``, ``loss``, ``update``, or ``weight`` (of the step before, and its update).
        rules: what each side's was computed as, by its own settings: ``LayerNorm``, ``cross_entropy``, ``AdamW``.
            Empty: it is code of the side's own, and was held against the other's.
        errors: what each side is off by (relative L2).
        wrong: the side whose figures do not agree: ``reference`` or ``candidate``; empty: both agree, and the runs are
            set differently.
    """

    what: str
    rules: Both[str]
    errors: Both[float]
    wrong: str = ""

    @property
    def text(self) -> str:
        """It in words, as a sentence."""
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
