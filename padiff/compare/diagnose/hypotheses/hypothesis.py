"""The classes of a hypothesis: a cause, and the tensors that the candidate would record if the cause were true."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from padiff.records import SIDES, Both
from padiff.records.cause import UNKNOWN_LINES
from padiff.system.frames import Frame


@dataclass(frozen=True, slots=True)
class Prediction:
    """A tensor of the candidate under a hypothesis, beside the recorded one; all arrays are float64 of the same shape.

    Attributes:
        site: name of the tensor in the reference.
        actual: the values that the candidate recorded.
        predicted: the values that the candidate would have recorded if the hypothesis were true.
        without: the values that the candidate would have recorded without any fault: mostly the reference's tensor.
        noise: absolute rounding error of an element: one number, or one for each element.
        limit: largest error that the policy passes, as a share of the tensor's norm.
    """

    site: str
    actual: np.ndarray
    predicted: np.ndarray
    without: np.ndarray
    noise: np.ndarray | float
    limit: float = math.inf


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A possible cause of a diff, with a function that predicts its effect on recorded tensors.

    Attributes:
        kind: machine-readable name, which never changes between versions.
        name: one or two words that name the cause in the list of excluded causes.
        sentence: the cause in words, without a full stop.
        predict: yields a prediction per tensor, largest differences first, as the first wrong one ends the trial.
        what: the kind of the predicted tensors, a plural noun.
        free: count of numbers that were solved for; as many of the explained numbers are no evidence.
        tried: count of values or forms that were searched to find this hypothesis.
        changes: count of separate faults that the hypothesis assumes; of equal explanations, fewest faults win.
        fix: the line of code that fixes the fault, in the candidate's framework, or a function that returns the line.
        telling: True if a true hypothesis is the cause; False if several causes have the same effect, so that the
            hypothesis is never called proven.
        code: True if the hypothesis names a difference in the code; a hypothesis that describes only the difference
            of the outcome is then not reported beside it.
        lines: the lines of both sides' code that it is about; `None` where not known.
    """

    kind: str
    name: str
    sentence: str
    predict: Callable[[], Iterable[Prediction]]
    what: str = "tensors"
    free: int = 0
    tried: int = 1
    changes: int = 1
    fix: str | Callable[[], str] = ""
    telling: bool = True
    code: bool = False
    lines: Both[Frame | None] = UNKNOWN_LINES

    @property
    def lines_text(self) -> str:
        """Return the lines of code as text; empty if none is known."""
        named = [f"{side} {frame.file}:{frame.line}" for side, frame in zip(SIDES, self.lines) if frame is not None]
        return f"in the code: {', '.join(named)}" if named else ""

    @property
    def fix_line(self) -> str:
        """Return the line of code that fixes the fault; empty if there is none."""
        return self.fix if isinstance(self.fix, str) else self.fix()
