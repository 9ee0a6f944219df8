"""Hypotheses, and the measure that decides for each if it explains the candidate's tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.records import SIDES, Both
from padiff.records.compared import UNKNOWN_LINES, factor_text
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
        values: as in `Cause`.
        read: True if the code of both sides, which was computed again, shows the difference: few numbers are enough.
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
    values: Both[Any] | None = None
    read: bool = False

    @property
    def lines_text(self) -> str:
        """Return the lines of code as text; empty if none is known."""
        named = [f"{side} {frame.file}:{frame.line}" for side, frame in zip(SIDES, self.lines) if frame is not None]
        return f"in the code: {', '.join(named)}" if named else ""

    @property
    def fix_line(self) -> str:
        """Return the line of code that fixes the fault; empty if there is none."""
        return self.fix if isinstance(self.fix, str) else self.fix()


#: Largest error of a prediction at the level of rounding, as a multiple of the rounding noise: of all tensors together,
#: and of the worst tensor. Chosen: noise is estimated to a factor of two or so.
NEAR, WORST = 3.0, 8.0
#: Least gain of a proven and of a likely cause: the error of the reference, divided by the error of the prediction.
#: Chosen: the best of a few hundred wrong values gains a small factor, and never reaches the level of rounding.
PROVEN, LIKELY = 10.0, 4.0
#: Largest residual of a likely cause, as a multiple of the rounding noise: room for an underestimated noise, not for a
#: second error. Chosen.
CLOSE = 30.0
#: Count of independent numbers that have to agree, besides two for each number that was solved for. Chosen: chance
#: removes nine tenths of the error once in ``10 ** numbers`` times.
NUMBERS = 8
#: Least gain of a cause that few numbers show, for each form that was tried. Chosen: chance comes as near once in so
#: many trials.
EXACT = 30.0
#: Rounding noise, as a share of the values, above which a number that is solved for proves nothing in a step in which
#: rows chose otherwise: these rows are part of it. Chosen: bfloat16 rounds to 0.004.
VAGUE = 0.01
#: Share of a tensor's error above which a prediction counts as wrong, so that the trial ends early.
_HOPELESS = 0.7


@dataclass(frozen=True, slots=True)
class Fit:
    """Measurements of a hypothesis's predictions against the candidate's record.

    Attributes:
        residual: error of the predictions, as a multiple of the rounding noise (root of the mean square).
        without: error of the reference, in the same unit.
        size: size of the recorded or predicted values in the same unit; values near zero explain nothing.
        worst: residual of the worst tensor.
        tensors: count of predicted tensors.
        elements: count of elements of the predicted tensors.
        numbers: count of elements that differ from the reference by more than rounding, and agree with the prediction.
        within: True if the policy would pass every prediction, and not all of them without the hypothesis.
        noise: the rounding noise, as a share of the recorded values.
    """

    residual: float = math.inf
    without: float = 0.0
    size: float = 0.0
    worst: float = math.inf
    tensors: int = 0
    elements: int = 0
    numbers: int = 0
    within: bool = False
    noise: float = 0.0

    @property
    def gain(self) -> float:
        """Return the error of the reference (or of zeros, if smaller) divided by the residual."""
        # Below half the noise a smaller residual means nothing.
        return min(self.without, self.size) / max(self.residual, 0.5)


#: Measurements of a hypothesis that predicts nothing, or is plainly wrong.
NOTHING = Fit()


def weigh(predictions: Iterable[Prediction]) -> Fit:
    """Measure predictions against the record; return `NOTHING` at the first tensor that shows them to be wrong."""
    squares = squares_without = sizes = worst = noises = recorded = 0.0
    tensors = elements = numbers = 0
    within, needless = True, True
    for prediction in predictions:
        if not prediction.actual.size:
            continue
        with np.errstate(all="ignore"):
            residuals = np.abs(prediction.actual - prediction.predicted) / prediction.noise
            errors = np.abs(prediction.actual - prediction.without) / prediction.noise
            sizes += max(
                _square(np.abs(prediction.actual) / prediction.noise),
                _square(np.abs(prediction.predicted) / prediction.noise),
            )
        square, square_without = _square(residuals), _square(errors)
        if not math.isfinite(square) or not math.isfinite(square_without):
            return NOTHING
        squares, squares_without = squares + square, squares_without + square_without
        noises += _square(np.broadcast_to(prediction.noise, prediction.actual.shape))
        recorded += _square(np.abs(prediction.actual))
        numbers += int(np.count_nonzero((errors > PROVEN) & (residuals <= errors / LIKELY)))
        worst = max(worst, math.sqrt(square / residuals.size))
        tensors, elements = tensors + 1, elements + residuals.size
        # Without a limit any error passes, also of a tensor of zeros.
        norm = max(_norm(prediction.predicted), _norm(prediction.without))
        room = prediction.limit * norm if math.isfinite(prediction.limit) else math.inf
        within = within and _norm(prediction.actual - prediction.predicted) <= room
        needless = needless and math.isfinite(room) and _norm(prediction.actual - prediction.without) <= room
        if square > square_without * _HOPELESS**2 and square > residuals.size * WORST**2:
            return NOTHING
    if not elements:
        return NOTHING
    root = math.sqrt(elements)
    residual, without, size = (math.sqrt(total) / root for total in (squares, squares_without, sizes))
    noise = math.sqrt(noises / recorded) if recorded else math.inf
    return Fit(residual, without, size, worst, tensors, elements, numbers, within and not needless, noise)


def is_enough(fit: Fit, hypothesis: Hypothesis) -> bool:
    """Return True if too many numbers agree for chance to explain them."""
    return fit.numbers >= NUMBERS + 2 * hypothesis.free + math.log2(max(hypothesis.tried, 1)) / 2


def explains(fit: Fit, hypothesis: Hypothesis) -> bool:
    """Return True if the predictions reach the level of rounding, and the reference does not."""
    near = fit.residual <= NEAR and fit.worst <= WORST and fit.within
    enough = is_enough(fit, hypothesis) or (hypothesis.read and _is_exact(fit, hypothesis))
    return near and fit.gain >= PROVEN and enough


def is_vague(fit: Fit, hypothesis: Hypothesis) -> bool:
    """Return True if a number was solved for, and the noise is so large that wrong hypotheses find one, too."""
    return hypothesis.free > 0 and fit.noise > VAGUE


def is_likely(fit: Fit, hypothesis: Hypothesis) -> bool:
    """Return True if the hypothesis explains most of the error, and not by chance."""
    near = fit.residual <= CLOSE and fit.gain >= LIKELY
    return near and (is_enough(fit, hypothesis) or _is_exact(fit, hypothesis))


def _is_exact(fit: Fit, hypothesis: Hypothesis) -> bool:
    """Return True if code without numbers that were solved for gives few numbers, such as a loss, to many digits."""
    return hypothesis.code and not hypothesis.free and fit.numbers > 0 and fit.gain >= EXACT * hypothesis.tried


def evidence(fit: Fit, hypothesis: Hypothesis) -> str:
    """Return the evidence for a hypothesis in words."""
    many = f"{fit.tensors} {hypothesis.what}" if fit.tensors > 1 else f"{fit.elements} elements"
    exact = fit.residual == 0
    with_it = "exactly" if exact else f"to {fit.residual:.2g} times the rounding noise"
    without = "" if exact or not math.isfinite(fit.without) else f", instead of {factor_text(fit.without)} times"
    solved = f"; {hypothesis.free} number{'s' if hypothesis.free > 1 else ''} solved for" if hypothesis.free else ""
    return f"explains the difference: {many} then agree {with_it}{without}{solved}"


def _square(values: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        return float(np.sum(np.square(values)))


def _norm(values: np.ndarray) -> float:
    return math.sqrt(_square(np.abs(values)))
