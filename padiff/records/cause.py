"""The cause of a first diff, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """Explanation of a first diff.

    Attributes:
        kind: a machine-readable name that is stable across versions, e.g. ``learning_rate``; ``unknown`` if nothing
            explains the diff.
        sentence: the cause in words, without a full stop; `str` returns it.
        proven: True if a computation with the cause reproduces the recorded values, and one without it does not.
            Otherwise the cause is likely.
        evidence: the evidence in words: what was computed, and how close the result is. May be empty.
        fix: the line of code that fixes the cause, in the candidate's framework. May be empty.
        excluded: causes that were computed as well, and do not explain the recorded values.
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
        """Return the cause, its evidence and its fix as sentences that follow a message."""
        certainty = "Cause" if self.kind == "unknown" else "Cause, proven" if self.proven else "Likely cause"
        text = f"{certainty}: {self.sentence}{f' ({self.evidence})' if self.evidence else ''}."
        text += f" Fix: {self.fix}." if self.fix else ""
        if self.excluded and not self.proven:
            text += f" Tried and excluded: {', '.join(self.excluded)}."
        return text
