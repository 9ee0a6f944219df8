"""Counts of an optimizer's steps, which paddle keeps as powers of its betas alone, rounded at every step.

The count is found by doing the same multiplications again; so what is written back for a count is what paddle would
have, to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# paddle's class -> its accumulators that hold the power of a value: which, and the power that they begin with.
POWERS: dict[str, tuple[tuple[str, str, int], ...]] = {
    **dict.fromkeys(("Adam", "AdamW", "Lamb"), (("beta1_pow_acc", "beta1", 1), ("beta2_pow_acc", "beta2", 1))),
    "Adamax": (("beta1_pow_acc", "beta1", 1),),
    "NAdam": (("beta2_pow", "beta2", 0),),
    "RAdam": (("beta1_pow", "beta1", 0), ("beta2_pow", "beta2", 0)),
}
_MOST_STEPS = 1 << 24
# Steps whose roundings are done again one by one; beyond them RAdam is Adam.
_MOST_ROUNDED = 1 << 16


def _powers(value: float, most: int, dtype: np.dtype[Any]) -> np.ndarray:
    """The powers of a value from the first one on, rounded after each multiplication as paddle does."""
    powers: np.ndarray = np.multiply.accumulate(np.full(most, value, dtype), dtype=dtype)
    return powers


def steps_of(kind: str, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    """How many steps the powers tell of. Of powers that are too small to tell, so many that they are that small: what
    is corrected by them is corrected by nothing then.

    Args:
        values: what the optimizer is set to.
        arrays: its accumulators of a parameter.
    """
    found = 0
    for name, value, ahead in POWERS[kind]:
        beta, power = float(values[value]), arrays[name].reshape(-1)[0]
        smallest = float(np.finfo(power.dtype).tiny)
        if not 0 < beta < 1:
            continue
        if float(power) >= 1:
            return 0
        near = int(math.log(max(float(power), smallest)) / math.log(beta))
        if near >= _MOST_STEPS:
            found = max(found, near)
            continue
        powers = _powers(beta, near + near // 50 + 8, power.dtype)
        count = int(np.argmin(np.abs(powers.astype(np.float64) - float(power)))) + 1 - ahead
        if float(power) > 2 * smallest:
            return count
        found = max(found, count)
    return found


def power_of(value: float, count: int, dtype: np.dtype[Any]) -> float:
    """The power of a value after so many steps, as paddle has it."""
    if count <= 0:
        return 1.0
    return float(_powers(value, count, dtype)[-1]) if count < _MOST_STEPS else value**count


def rho_of(beta: float, count: int) -> float:
    """What RAdam carries on from step to step, ``count * beta**count / (1 - beta**count)``, as paddle rounds it:
    float32 is coarse here, and the next step amplifies it.
    """
    if count > _MOST_ROUNDED:
        return count * beta**count / (1 - beta**count)
    one, value = np.float32(1), np.float32(beta)
    power, rho = one, one
    for _ in range(count):
        power = power * value
        rho = (rho * (value - power) + power) / (one - power)
    return float(rho)
