"""Step counts of paddle's optimizers, which paddle stores only as powers of the betas, rounded at every step.

Repeating the same multiplications gives the count. For the same reason, the powers that are written for a count equal
paddle's own, to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from padiff.frameworks.optimizer_catalog import classes

# paddle's class -> its accumulators that hold a power: name, the base (a setting's name), and the initial exponent.
POWERS = {name: known.powers for name, (_, known) in classes("paddle").items() if known.powers}
_MOST_STEPS = 1 << 24
# The most steps whose roundings `rho_of` repeats one by one; with more steps, RAdam equals Adam.
_MOST_ROUNDED = 1 << 16


def _powers(value: float, most: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the powers of a value with exponents 1 to ``most``, rounded after each multiplication as in paddle."""
    powers: np.ndarray = np.multiply.accumulate(np.full(most, value, dtype), dtype=dtype)
    return powers


def steps_of(kind: str, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    """Return the number of steps, computed from the stored powers.

    If the powers are too small to determine the number, the result is a number of steps with powers that small: the
    bias correction has no effect then.

    Args:
        kind: paddle's class of the optimizer.
        values: the optimizer's settings.
        arrays: the parameter's accumulators.
    """
    steps = 0
    for name, value, ahead in POWERS[kind]:
        beta, power = float(values[value]), arrays[name].reshape(-1)[0]
        smallest = float(np.finfo(power.dtype).tiny)
        if not 0 < beta < 1:
            continue
        if float(power) >= 1:
            return 0
        near = int(math.log(max(float(power), smallest)) / math.log(beta))
        if near >= _MOST_STEPS:
            steps = max(steps, near)
            continue
        powers = _powers(beta, near + near // 50 + 8, power.dtype)
        count = int(np.argmin(np.abs(powers.astype(np.float64) - float(power)))) + 1 - ahead
        if float(power) > 2 * smallest:
            return count
        steps = max(steps, count)
    return steps


def power_of(value: float, count: int, dtype: np.dtype[Any]) -> float:
    """Return the power of a value after ``count`` steps, rounded as in paddle."""
    if count <= 0:
        return 1.0
    return float(_powers(value, count, dtype)[-1]) if count < _MOST_STEPS else value**count


def rho_of(beta: float, count: int) -> float:
    """Return the value that RAdam stores between steps, ``count * beta**count / (1 - beta**count)``, rounded as paddle.

    The rounding matters: float32 is coarse here, and the next step amplifies the error.
    """
    if count > _MOST_ROUNDED:
        return count * beta**count / (1 - beta**count)
    unit, value = np.float32(1), np.float32(beta)
    power, rho = unit, unit
    for _ in range(count):
        power = power * value
        rho = (rho * (value - power) + power) / (unit - power)
    return float(rho)
