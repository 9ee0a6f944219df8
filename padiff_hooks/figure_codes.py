"""Figures as 16-bit codes on a logarithmic scale, true to 0.4 %: a third of what their digits take."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

# Codes that are no numbers; a number x > 0 is _NUMBERS + round((log2(x) + _LOWEST) * _EACH).
ZERO, ABSENT, _NONE, _INFINITE, _NEGATIVE = range(5)
_NUMBERS, _LOWEST, _EACH = 16, 300, 109
_SPECIAL = {None: _NONE, "inf": _INFINITE, "-inf": _NEGATIVE}
#: What stands for a figure that a diff has not.
NO_FIGURE = -1.0


def codes(values: Iterable[float | str | None]) -> np.ndarray:
    """Figures as JSON holds them (`NO_FIGURE`: there is none), as 16-bit codes."""
    given = list(values)
    numbers = np.array([v if isinstance(v, (int, float)) else 0.0 for v in given], float)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.rint((np.log2(np.abs(numbers)) + _LOWEST) * _EACH)
    found = np.where(numbers == 0, ZERO, _NUMBERS + np.clip(scaled, 0, 2 * _LOWEST * _EACH))
    found[numbers == NO_FIGURE] = ABSENT
    found[np.isnan(numbers)] = _NONE
    for k, value in enumerate(given):
        if not isinstance(value, (int, float)):
            found[k] = _SPECIAL.get(value, _NONE)
    return found.astype("<u2")


def numbers_of(some: np.ndarray) -> np.ndarray:
    """What codes stand for; NaN where there is no number."""
    found = np.exp2((some.astype(float) - _NUMBERS) / _EACH - _LOWEST)
    for code, value in ((ZERO, 0.0), (_INFINITE, math.inf), (_NEGATIVE, -math.inf)):
        found[some == code] = value
    found[(some == ABSENT) | (some == _NONE)] = math.nan
    return found


def as_json(code: int, value: float) -> float | str | None:
    """A code's number as JSON holds it, with the digits that are true."""
    if code in (_INFINITE, _NEGATIVE):
        return "inf" if code == _INFINITE else "-inf"
    return None if math.isnan(value) else float(f"{value:.4g}")
