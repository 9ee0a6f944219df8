"""Text on the difference of two runs' learning rates."""

from __future__ import annotations

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.parameter_history import ParameterHistories
from padiff.records import Both

# Count of steps before and after the first diff, and at the start, whose learning rates are compared.
_AROUND = 12
# Most steps that a schedule may be late or early.
_LATE = 3


def rates_text(scene: DiffContext, tracks: ParameterHistories) -> str:
    """Return text on the first step whose learning rates differ, and on the difference of the schedules."""
    at = tracks.at
    sides = tracks.rates.map(lambda rates: list(rates[at]))
    if _equal(sides):
        rows = zip(*tracks.rates)
        at = next((k for k, row in enumerate(rows) if not _equal(Both(*map(list, row)))), at)
        sides = tracks.rates.map(lambda rates: list(rates[at]))
    step = "" if at == tracks.at else f" in step {tracks.numbers[at]}"
    return f"the learning rates differ{step}: {rates_list(sides)}{_schedule(scene)}"


def rates_list(sides: Both[list[float]]) -> str:
    """Return the learning rates of both runs by parameter group, as text."""
    by_group = " (by parameter group)" if max(map(len, sides)) > 1 else ""
    return " against ".join(", ".join(f"{rate:.6g}" for rate in side) for side in sides) + by_group


def _equal(sides: Both[list[float]]) -> bool:
    return len(sides.reference) == len(sides.candidate) and np.allclose(
        sides.reference, sides.candidate, rtol=1e-6, atol=0
    )


def _schedule(scene: DiffContext) -> str:
    """Return text on how the candidate's schedule follows from the reference's; empty if it does not."""
    near = [n for n in scene.numbers if abs(n - scene.number) <= _AROUND or n <= _AROUND]
    rates = {n: scene.rates(n) for n in near}
    first = {n: r.map(lambda side: side[0]) for n, r in rates.items() if all(r)}
    if len(first) < 2:
        return ""
    reference = {n: r.reference for n, r in first.items()}
    candidate = {n: r.candidate for n, r in first.items()}
    if np.ptp([*reference.values()]) <= 1e-9 * max(reference.values()):
        return (
            _ratio(candidate, reference)
            if np.ptp([*candidate.values()]) <= 1e-9 * max(candidate.values())
            else ", by a schedule"
        )
    if np.ptp([*candidate.values()]) <= 1e-9 * max(candidate.values()):
        return "; the candidate's schedule never steps (or once an epoch)"
    for late in (1, -1, *(sign * k for k in range(2, _LATE + 1) for sign in (1, -1))):
        if _follows(candidate, reference, lambda n, late=late: n - late):
            steps = "one step" if abs(late) == 1 else f"{abs(late)} steps"
            return f"; the candidate's schedule is shifted: it is {steps} {'late' if late > 0 else 'early'}"
    for pace in (2, 3, 4, 8):
        if _follows(candidate, reference, lambda n, pace=pace: n // pace):
            return f"; the candidate's schedule goes on every {pace} steps" + (": half as fast" if pace == 2 else "")
        if _follows(candidate, reference, lambda n, pace=pace: n * pace):
            return f"; the candidate's schedule goes {pace} times as fast: it steps {pace} times a step"
    return _ratio(candidate, reference)


def _follows(candidate: dict[int, float], reference: dict[int, float], of) -> bool:  # type: ignore[no-untyped-def]
    """Return True if the candidate's rate of step ``n`` equals the reference's of step ``of(n)`` at least thrice."""
    rates = [(candidate[n], reference[of(n)]) for n in candidate if of(n) in reference]
    return len(rates) >= 3 and len({b for _, b in rates}) >= 2 and all(np.isclose(a, b, rtol=1e-6) for a, b in rates)


def _ratio(candidate: dict[int, float], reference: dict[int, float]) -> str:
    ratios = [candidate[n] / reference[n] for n in candidate if reference[n]]
    if not ratios or np.ptp(ratios) > 1e-6 * max(map(abs, ratios)) or abs(ratios[0] - 1) < 1e-6:
        return ""
    return f"; the candidate's is {ratios[0]:.6g} times the reference's"
