"""The cause of a first diff, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records.both import Both
from padiff.system.frames import Frame

#: Stands for lines of code that are not known.
UNKNOWN_LINES: Both[Frame | None] = Both(None, None)


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
        lines: the lines of both sides' code that the cause is about; `None` where not known.
        remaining: error that is left with the cause, as a multiple of the rounding noise; `None` if not computed.
    """

    kind: str
    sentence: str
    proven: bool = False
    evidence: str = ""
    fix: str = ""
    excluded: tuple[str, ...] = ()
    lines: Both[Frame | None] = UNKNOWN_LINES
    remaining: float | None = None

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
