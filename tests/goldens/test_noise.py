"""Errors of a tensor between two runs, and the limits that measured noise sets."""

from __future__ import annotations

import numpy as np
import pytest

from padiff.golden.folder import NOTHING, UNITS, Errors, errors_between, limits_of, measured, unit_of
from padiff.records import InMemory, Record, Step
from padiff.sketches.sketch import sketch_of

ULP = 2.0**-23


def tensor(seed=0, size=4000):
    return np.random.default_rng(seed).normal(size=size).astype("float32")


def step(**arrays):
    records = tuple(
        Record(name, "forward", "output.0", InMemory(array), str(array.dtype), array.shape)
        for name, array in arrays.items()
    )
    return Step(0, records)


def test_a_factor_shows_in_the_norm_where_noise_hides_it():
    values = tensor()
    noisy = values + 1e-3 * tensor(1)
    before, factor = sketch_of(values), sketch_of((noisy * np.float32(1.0003)).astype("float32"))
    errors = errors_between(before, factor)
    plain = errors_between(before, sketch_of(noisy))
    assert errors.l2 == pytest.approx(1e-3, rel=0.3) and plain.l2 == pytest.approx(1e-3, rel=0.3)
    assert errors.size - plain.size == pytest.approx(3e-4, rel=0.05)


def test_a_shift_shows_in_the_mean():
    values = tensor()
    errors = errors_between(sketch_of(values), sketch_of(values + np.float32(0.01)))
    assert errors.mean == pytest.approx(0.01, rel=0.05)  # the standard deviation is 1


def test_equal_tensors_have_no_errors_and_zeros_that_stay_zeros_neither():
    values = sketch_of(tensor())
    assert errors_between(values, values) == NOTHING
    zeros = sketch_of(np.zeros(100, "float32"))
    assert errors_between(zeros, zeros) == NOTHING
    assert errors_between(zeros, values) is None  # of another size


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_of_numbers_that_are_not_finite_a_sketch_does_not_tell(value):
    values = tensor(size=500)
    values[3] = value
    assert errors_between(sketch_of(tensor(size=500)), sketch_of(values)) is None


def test_noise_is_the_largest_of_the_moved_runs():
    base = step(a=tensor(), n=np.arange(5))
    noise = measured(base, [step(a=tensor() * np.float32(1 + 1e-3)), step(a=tensor() * np.float32(1 + 2e-3))])
    assert set(noise) == {"a/forward/output.0"}  # integers have none
    assert noise["a/forward/output.0"].l2 == pytest.approx(2e-3, rel=0.3)


def test_a_limit_is_a_multiple_of_the_noise_and_never_below_some_units():
    noise = Errors(1e-3, 1e-5, 0.0)
    limits = limits_of(noise, "float32", False, 4000)
    assert limits.l2 > noise.l2 and limits.size > noise.size
    # The norm and the mean are each one direction of one error: one of them may be small by chance.
    assert limits.mean == limits.size == limits_of(Errors(1e-3, 0.0, 1e-5), "float32", False, 4000).mean
    least = limits_of(Errors(1e-3, 0.0, 0.0), "float32", False, 4000)
    assert least.mean == limits_of(NOTHING, "float32", False, 4000).mean
    assert limits_of(NOTHING, "float32", False, 1).mean == limits_of(NOTHING, "float32", False, 1).l2  # nothing cancels
    assert 4 * ULP <= least.mean < 1e-5  # a fault of 1e-4 is beyond, whatever the noise of the mean is
    assert limits_of(noise, "bfloat16", False, 4000).size > 1e-2
    assert limits_of(Errors(1.0, 1.0, 1.0), "float32", True, 4000).l2 < 1e-6  # the moved runs move it themselves


def test_a_unit_is_the_error_after_a_move_by_one_unit():
    assert unit_of(Errors(UNITS * 1e-5, 0, 0), "float32") == pytest.approx(1e-5)
    assert unit_of(NOTHING, "float32") == 2.0**-24


def test_an_update_has_the_rounding_of_its_weight_at_least():
    values, change = tensor(), tensor(2) * np.float32(1e-3)
    records = tuple(
        Record("a", stage, "weight", InMemory(array), "float32", array.shape)
        for stage, array in (("weight", values), ("update", change))
    )
    noise = measured(Step(0, records), [Step(0, records)])["a/update/weight"]
    # (w + u) - w in float32: an error of up to half a unit of w in each number
    real = (values + change) - values
    actual = np.linalg.norm(real.astype(float) - change.astype(float)) / np.linalg.norm(change)
    assert actual < noise.l2 < 10 * actual
    assert noise.size < noise.l2 / 30


def test_a_running_mean_near_zero_has_the_rounding_of_what_it_is_a_mean_of():
    values = np.random.default_rng(0).normal(size=(300_000, 4)).astype("float32")
    mean = (0.1 * values.mean(0)).astype("float32")
    one_by_one = np.float32(0) + np.add.accumulate(values, dtype=np.float32)[-1] / np.float32(300_000)
    actual = np.linalg.norm(0.1 * one_by_one - 0.1 * values.mean(0, dtype=np.float64)) / np.linalg.norm(mean)
    arrays = {"running_mean": mean, "running_var": np.ones(4, "float32")}
    records = tuple(
        Record("norm", "weight", slot, InMemory(array), "float32", array.shape) for slot, array in arrays.items()
    )
    noise = measured(Step(1, records), [Step(1, records)])["norm/weight/running_mean"]
    assert limits_of(NOTHING, "float32", False, 4000).l2 < actual < limits_of(noise, "float32", False, 4000).l2 < 1e-3
