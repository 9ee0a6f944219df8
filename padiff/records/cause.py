"""Why two runs part, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the runs part at their first diff.

    Attributes:
        kind: a machine-readable name that stays as it is from version to version, e.g. ``learning_rate``; ``unknown``
            where nothing explains it.
        sentence: the cause in words, without a full stop; `str` gives it.
        proven: whether computing with it explains what was recorded, and computing without it does not. Else it is
            likely.
        evidence: what speaks for it, in words: what was computed, and how near it comes. May be empty.
        fix: the line that mends it, in the candidate's framework. May be empty.
        excluded: what was computed as well, and does not explain what was recorded.
    """

    kind: str
    sentence: str
    proven: bool = False
    evidence: str = ""
    fix: str = ""
    excluded: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.sentence

    @property
    def text(self) -> str:
        """All of it, as the sentences that follow a message."""
        known = "Cause" if self.kind == "unknown" else "Cause, proven" if self.proven else "Likely cause"
        found = f"{known}: {self.sentence}{f' ({self.evidence})' if self.evidence else ''}."
        found += f" To mend it: {self.fix}." if self.fix else ""
        if self.excluded and not self.proven:
            found += f" Tried and excluded: {', '.join(self.excluded)}."
        return found
