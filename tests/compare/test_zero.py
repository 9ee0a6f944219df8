"""Gradients whose true value is zero: a fixed tolerance lets their rounding noise pass, says so, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from kit.records import info, linear, memory_run, record, root, step

from padiff import NoisePolicy, Tolerance, compare_runs
from padiff.compare.measure.pairs import measure_pair
from padiff.records import Diff, Figure, Pair
from padiff.report_formats import coverage_lines, to_json, verdict

RNG = np.random.default_rng(3)
STRICT = Tolerance(0.0, 1e-5, "strict")
MEAN = Tolerance(0.0, 1e-5)
#: A linear layer's gradients: its outputs' (rows, features), its matrix's, and noise.
OUTPUT = RNG.normal(size=(64, 8))
MATRIX = RNG.normal(size=(8, 16))


def noise(size: float, count: int = 8) -> np.ndarray:
    """Numbers of this root mean square."""
    values = RNG.normal(size=count)
    return values * size / np.sqrt(np.mean(values**2))


def two(stage: str, slot: str, r: np.ndarray, c: np.ndarray, dtype: str = "float32") -> Pair:
    return Pair(0, *(record("fc", stage, slot, np.asarray(v, np.float64), dtype=dtype) for v in (r, c)))


def judged(policy: Tolerance | NoisePolicy, *pairs: Pair) -> list[Diff]:
    return policy.judge([measure_pair(p, policy.elementwise) for p in pairs])


def bias(policy: Tolerance, r: np.ndarray, c: np.ndarray, matrix=MATRIX, output=None, dtype="float32") -> Diff:
    """The judged gradient of a bias, beside the layer's other gradients."""
    pairs = [] if output is None else [two("backward", "output.0", output, output, dtype)]
    pairs += [two("grad", "weight", matrix, matrix, dtype), two("grad", "bias", r, c, dtype)]
    return judged(policy, *pairs)[-1]


@pytest.mark.parametrize("policy", [MEAN, STRICT], ids=["mean", "strict"])
@pytest.mark.parametrize("output", [None, OUTPUT], ids=["gradients alone", "with those of the outputs"])
def test_noise_around_zero_passes_and_says_what_it_is(policy, output):
    diff = bias(policy, noise(1e-7), noise(1e-7), output=output)
    assert diff.passed
    assert diff.judgement.figure is Figure.AROUND_ZERO
    assert diff.excess <= 1


def test_the_same_gradient_on_both_sides_passes_as_any_other():
    values = noise(1e-7)
    diff = bias(MEAN, values, values)
    assert diff.passed
    assert diff.judgement.figure is Figure.MEAN_ABS


@pytest.mark.parametrize("output", [None, OUTPUT], ids=["gradients alone", "with those of the outputs"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_gradient_of_normal_size_on_one_side_fails(turned, output):
    sides = (noise(1e-7), noise(0.1))
    assert not bias(MEAN, *(sides[::-1] if turned else sides), output=output).passed


@pytest.mark.parametrize("policy", [MEAN, STRICT], ids=["mean", "strict"])
@pytest.mark.parametrize("output", [None, OUTPUT], ids=["gradients alone", "with those of the outputs"])
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_small_gradient_that_is_wrong_by_1_percent_fails(policy, output, size, factor):
    values = noise(size)
    assert not bias(policy, values, values * factor, output=output).passed


@pytest.mark.parametrize("factor", [1.2, 2.0, -1.0])
def test_a_small_gradient_beside_that_of_large_inputs_is_judged_by_what_it_is_a_sum_of(factor):
    """Inputs of a million make a matrix's gradient a million times as large as the bias's, which is no noise."""
    real = OUTPUT.sum(0)
    assert not bias(MEAN, real, real * factor, matrix=MATRIX * 1e6, output=OUTPUT).passed


def test_noise_beside_the_gradients_of_tiny_inputs_is_known_by_what_it_is_a_sum_of():
    assert bias(MEAN, noise(1e-6), noise(1e-6), matrix=MATRIX * 1e-6, output=OUTPUT).passed
    assert not bias(MEAN, noise(1e-6), noise(1e-6), matrix=MATRIX * 1e-6).passed


def test_noise_is_what_the_dtype_rounds():
    assert not bias(MEAN, noise(1e-7), noise(1e-7), dtype="float64").passed
    assert bias(MEAN, noise(1e-13), noise(1e-13), dtype="float64").passed
    assert bias(MEAN, noise(1e-3), noise(1e-3), dtype="float16").passed


def test_only_gradients_of_parameters_are_looked_at():
    small = (noise(1e-7), noise(1e-7))
    for stage, slot in (("weight", "bias"), ("update", "bias"), ("backward", "output.1"), ("forward", "output.0")):
        pairs = [two("grad", "weight", MATRIX, MATRIX), two(stage, slot, *small)]
        assert not judged(MEAN, *pairs)[-1].passed


def test_a_missing_or_broken_gradient_is_never_noise():
    lone = Pair(0, record("fc", "grad", "bias", noise(1e-7)), None)
    assert not judged(MEAN, two("grad", "weight", MATRIX, MATRIX), lone)[-1].passed
    broken = noise(1e-7)
    broken[2] = np.nan
    assert not bias(MEAN, noise(1e-7), broken).passed


def test_the_default_policy_knows_noise_by_the_same_rule():
    """What an adaptive optimizer makes of noise passes; of a gradient that is real, it does not."""
    updates = two("update", "weight", MATRIX, MATRIX), two("update", "bias", noise(1.0), noise(1.0))
    real = OUTPUT.sum(0)
    for matrix in (MATRIX, MATRIX * 1e-6, MATRIX * 1e6):
        for gradients, known in (((noise(1e-6), noise(1e-6)), True), ((real, real * 1.0001), False)):
            pairs = (
                two("backward", "output.0", OUTPUT, OUTPUT),
                two("grad", "weight", matrix, matrix),
                two("grad", "bias", *gradients),
                *updates,
            )
            assert judged(NoisePolicy(), *pairs)[-1].passed is known


def run(gradients: np.ndarray):
    fc = linear("fc", 16, 8)
    records = [record("fc", "grad", "weight", MATRIX.astype("float32")), record("fc", "grad", "bias", gradients)]
    return memory_run(info(root(1), fc), step(0, records))


def test_a_report_names_the_gradients_that_passed_so():
    sides = [run(noise(1e-7).astype("float32")) for _ in range(2)]
    report = compare_runs(*sides, policy=MEAN, stages=("grad",))
    assert report
    assert report.coverage.zeros == ("fc/grad/bias",)
    assert "1 gradient is rounding noise around zero." in verdict(report)
    assert "1 gradient is rounding noise around zero: fc/grad/bias" in coverage_lines(report)
    assert to_json(report)["coverage"]["zeros"] == ["fc/grad/bias"]
    # The largest diff that a report names is one that means something.
    assert report.worst.pair.anchor.slot == "weight"
    wrong = compare_runs(sides[0], run(noise(0.1).astype("float32")), policy=MEAN, stages=("grad",))
    assert wrong.coverage.zeros == ()
    assert wrong.first_diff.slot == "bias"


@pytest.mark.parametrize(("size", "passes"), [(1e-29, True), (1e-16, True), (1e-12, False), (1e-3, False)])
def test_a_gradient_of_an_output_that_vanishes_beside_the_others_may_be_zero(size, passes):
    """A softmax over one choice that is left: its gradient is p - 1, zero or the product of two roundings."""
    output = two("forward", "output.0", OUTPUT, OUTPUT)
    gradients = [two("backward", "output.1", np.zeros(8), noise(size)), two("backward", "output.0", OUTPUT, OUTPUT)]
    _, first, _ = judged(NoisePolicy(), output, *gradients)
    assert first.passed is passes
