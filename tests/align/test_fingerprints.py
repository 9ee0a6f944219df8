"""What is the same of two tensors that hold the same values in another order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from padiff.align.matching.parameterless import _fingerprint


@pytest.mark.parametrize("size", [2, 1000, 70_001])
def test_a_fingerprint_is_sum_squares_least_and_largest_in_any_order(size):
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    wide = values.astype(np.float64)
    wanted = (wide.sum(), np.square(wide).sum(), wide.min(), wide.max())
    # Prints are held against each other to 1e-4 of the norm.
    for found in (_fingerprint(values), _fingerprint(values[::-1]), _fingerprint(wide)):
        assert found[0] == pytest.approx(wanted[0], abs=1e-5 * wanted[1] ** 0.5)
        assert found[1:] == pytest.approx(wanted[1:], rel=1e-6)


@pytest.mark.parametrize("factor", [1e-30, 1e-24, 1e25])
def test_squares_that_float32_does_not_hold_are_added_up_all_the_same(factor):
    values = (np.random.default_rng(0).normal(size=70_001) * factor).astype(np.float32)
    assert _fingerprint(values)[1] == pytest.approx(np.square(values.astype(np.float64)).sum(), rel=1e-6)


@pytest.mark.parametrize("place", [0, 40_000, 70_000])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_what_is_no_number_anywhere_has_none(place, dtype):
    values = np.ones(70_001, dtype)
    assert _fingerprint(values) is None  # a constant
    values[0] = 2
    assert _fingerprint(values) is not None
    values[place] = np.nan
    assert _fingerprint(values) is None
