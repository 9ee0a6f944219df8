"""Figures as 16-bit codes on a logarithmic scale, exact to 0.4 % and a third as long as decimal digits."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

# Codes below _NUMBERS are special values; a number x > 0 has the code _NUMBERS + round((log2(x) + _LOWEST) * _EACH).
ZERO, ABSENT, _NONE, _INFINITE, _NEGATIVE = range(5)
_NUMBERS, _LOWEST, _EACH = 16, 300, 109
_SPECIAL = {None: _NONE, "inf": _INFINITE, "-inf": _NEGATIVE}
#: Placeholder of a figure that a diff does not have.
NO_FIGURE = -1.0


def codes(values: Iterable[float | str | None]) -> np.ndarray:
    """Return the 16-bit codes of figures in JSON form; `NO_FIGURE` marks a figure that is absent."""
    figures = list(values)
    numbers = np.array([v if isinstance(v, (int, float)) else 0.0 for v in figures], float)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.rint((np.log2(np.abs(numbers)) + _LOWEST) * _EACH)
    encoded = np.where(numbers == 0, ZERO, _NUMBERS + np.clip(scaled, 0, 2 * _LOWEST * _EACH))
    encoded[numbers == NO_FIGURE] = ABSENT
    encoded[np.isnan(numbers)] = _NONE
    for k, value in enumerate(figures):
        if not isinstance(value, (int, float)):
            encoded[k] = _SPECIAL.get(value, _NONE)
    return encoded.astype("<u2")


def numbers_of(some: np.ndarray) -> np.ndarray:
    """Return the numbers that codes stand for; NaN for a code without a number."""
    numbers = np.exp2((some.astype(float) - _NUMBERS) / _EACH - _LOWEST)
    for code, value in ((ZERO, 0.0), (_INFINITE, math.inf), (_NEGATIVE, -math.inf)):
        numbers[some == code] = value
    numbers[(some == ABSENT) | (some == _NONE)] = math.nan
    return numbers


def as_json(code: int, value: float) -> float | str | None:
    """Return a code's number in JSON form, rounded to four significant digits."""
    if code in (_INFINITE, _NEGATIVE):
        return "inf" if code == _INFINITE else "-inf"
    return None if math.isnan(value) else float(f"{value:.4g}")
