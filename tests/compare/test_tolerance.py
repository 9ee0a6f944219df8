from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kit.records import pair, planted, record, toy_run

from padiff import NoisePolicy, Tolerance, check_report, compare_runs
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import UsageError
from padiff.records import LOOP, Diff, Figure, Pair, Rule

RNG = np.random.default_rng(7)


def judged(policy: NoisePolicy | Tolerance, *pairs: Pair) -> list[Diff]:
    return policy.judge([measure_pair(p, policy.elementwise) for p in pairs])


def passes(policy: NoisePolicy | Tolerance, *pairs: Pair) -> bool:
    return all(diff.passed for diff in judged(policy, *pairs))


def near(values: np.ndarray, relative: float) -> np.ndarray:
    """Values whose relative L2 distance from the given ones is exactly so much."""
    noise = np.random.default_rng(1).normal(size=values.shape)
    return values + relative * np.linalg.norm(values) / np.linalg.norm(noise) * noise


def two(stage: str, slot: str, r: np.ndarray, c: np.ndarray, dtype: str = "float32", step: int = 0, layer: str = "fc"):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    # The values stay wide, so that a distance asked for is the distance judged; the dtype is what was recorded.
    assert np.asarray(r, kind).shape == np.asarray(c, kind).shape
    sides = [record(layer, stage, slot, np.asarray(v), dtype=dtype) for v in (r, c)]
    return Pair(step, *sides)


# -- Tolerance ---------------------------------------------------------------------------------------------------


def test_mean_mode_judges_the_mean_of_the_error_so_a_permuted_tensor_fails():
    values = np.asarray([1.0, 2.0, 3.0, 4.0])
    assert np.mean(values) == np.mean(values[::-1])
    [diff] = judged(Tolerance(), pair(values, values[::-1].copy()))
    assert not diff.passed
    found = diff.judgement
    assert (found.figure, found.value, found.rule) == (Figure.MEAN_ABS, 2.0, Rule.TOLERANCE)  # (3 + 1 + 1 + 3) / 4
    assert found.limit == pytest.approx(1e-4 + 1e-7 * 2.5)


def test_mean_modes_limit_is_atol_and_rtol_of_the_mean_reference():
    r = np.asarray([1.0, 3.0])
    assert passes(Tolerance(atol=0.1, rtol=0.2), pair(r, r + 0.5))  # 0.1 + 0.2 * 2 = 0.5
    assert not passes(Tolerance(atol=0.1, rtol=0.2), pair(r, r + 0.5001))


def test_mean_mode_forgives_one_outlier_that_strict_does_not():
    r = np.zeros(1000)
    c = r.copy()
    c[17] = 0.05
    assert passes(Tolerance(atol=1e-4, mode="mean"), pair(r, c))
    assert not passes(Tolerance(atol=1e-4, mode="strict"), pair(r, c))


@pytest.mark.parametrize("seed", range(20))
def test_strict_mode_is_numpys_isclose(seed):
    rng = np.random.default_rng(seed)
    r = rng.normal(size=6)
    c = r + rng.normal(size=6) * 0.06
    expected = bool(np.isclose(c, r, atol=0.1, rtol=0.05).all())
    assert passes(Tolerance(atol=0.1, rtol=0.05, mode="strict"), pair(r, c)) is expected


def test_strict_mode_meets_both_answers_over_those_seeds():
    answers = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        r = rng.normal(size=6)
        answers.add(bool(np.isclose(r + rng.normal(size=6) * 0.06, r, atol=0.1, rtol=0.05).all()))
    assert answers == {True, False}


def test_strict_modes_relative_tolerance_is_of_the_reference():
    assert passes(Tolerance(atol=0, rtol=0.5, mode="strict"), pair([2.0], [1.0]))
    assert not passes(Tolerance(atol=0, rtol=0.5, mode="strict"), pair([1.0], [2.0]))


def test_zero_tolerance_passes_equal_tensors_only():
    exact = Tolerance(atol=0, rtol=0)
    assert passes(exact, pair([1.0, 2.0], [1.0, 2.0]))
    assert not passes(exact, pair([1.0, 2.0], [1.0, np.nextafter(np.float32(2), np.float32(3))]))


def test_no_tolerance_is_so_wide_that_a_lone_nan_passes():
    assert not passes(Tolerance(atol=1e30, rtol=1e30), pair([1.0, 2.0], [1.0, np.nan]))


def test_a_failing_strict_diff_never_reads_as_within_its_limit():
    # The largest error (1 at 100) is allowed, the small one (0.5 at 0) is not.
    [diff] = judged(Tolerance(atol=0.1, rtol=0.1, mode="strict"), pair([100.0, 0.0], [101.0, 0.5]))
    assert not diff.passed
    assert diff.excess > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "loose"}, r"compare_mode is one of mean, strict, got 'loose'"),
        ({"atol": -1e-4}, r"atol has to be a number of at least 0, got -0.0001"),
        ({"rtol": float("nan")}, r"rtol has to be a number of at least 0, got nan"),
        ({"atol": float("inf")}, r"atol has to be a number of at least 0, got inf"),
        ({"rtol": "1e-3"}, r"rtol has to be a number of at least 0, got '1e-3'"),
        ({"atol": True}, r"atol has to be a number of at least 0, got True"),
        ({"atol": None}, r"atol has to be a number of at least 0, got None"),
    ],
)
def test_a_tolerance_that_cannot_be_meant_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Tolerance(**arguments)


def test_tolerance_takes_numpys_numbers_and_gives_plain_answers():
    [diff] = judged(Tolerance(atol=np.float64(1e-4)), pair([1.0], [1.0]))
    assert diff.passed is True


def test_a_cfg_once_given_changes_no_later_default():
    runs = toy_run(), toy_run(paddle=True, plant=planted("body.0/forward/output.0", lambda v: v + 0.01))
    assert not check_report(*runs)
    cfg = {"atol": 10.0}
    assert check_report(*runs, cfg)
    assert not check_report(*runs)
    assert cfg == {"atol": 10.0}
    assert Tolerance() == Tolerance(atol=1e-4, rtol=1e-7, mode="mean")


def test_both_policies_say_what_they_are():
    assert Tolerance(1e-3, 0.0, "strict").describe() == "strict, atol 0.001, rtol 0"
    assert "rounding noise" in NoisePolicy().describe()
    assert "times 3" in NoisePolicy(3).describe()


# -- NoisePolicy -------------------------------------------------------------------------------------------------


def test_equal_runs_pass_and_so_do_runs_apart_by_rounding_noise():
    assert compare_runs(toy_run(), toy_run()).passed
    report = compare_runs(toy_run(), toy_run(paddle=True))
    assert report.passed, report.first_diff
    assert report.coverage.complete


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan")])
def test_a_factor_that_cannot_be_meant_is_refused(factor):
    with pytest.raises(UsageError, match=r"factor has to be a number above 0"):
        NoisePolicy(factor)


def test_weights_that_differ_at_step_0_fail():
    r = RNG.normal(size=(8, 8))
    assert not passes(NoisePolicy(), two("weight", "weight", r, near(r, 1e-5)))
    assert passes(NoisePolicy(), two("weight", "weight", r, near(r, 1e-7)))


@pytest.mark.parametrize(
    ("dtype", "relative", "passed"),
    [
        ("float32", 1e-3, False),
        ("bfloat16", 1e-3, True),
        ("float16", 1e-3, True),
        ("float32", 1e-6, True),
        ("float64", 1e-6, False),
        ("bfloat16", 0.3, False),
    ],
)
def test_how_far_a_forward_may_be_apart_hangs_on_the_dtype(dtype, relative, passed):
    r = RNG.normal(size=(16, 8))
    assert passes(NoisePolicy(), two("forward", "output.0", r, near(r, relative), dtype)) is passed


def test_a_float32_output_after_a_bfloat16_one_is_judged_as_bfloat16():
    r = RNG.normal(size=(16, 8))
    coarse = two("forward", "output.0", r, r, "bfloat16", layer="a")
    assert passes(NoisePolicy(), coarse, two("forward", "output.0", r, near(r, 1e-3), "float32", layer="b"))


def test_a_bfloat16_gradient_does_not_widen_the_forward():
    r = RNG.normal(size=(16, 8))
    coarse = two("grad", "weight", r, r, "bfloat16", layer="a")
    assert not passes(NoisePolicy(), coarse, two("forward", "output.0", r, near(r, 1e-3), "float32", layer="b"))


def test_the_factor_widens_every_limit():
    r = RNG.normal(size=(16, 8))
    apart = two("forward", "output.0", r, near(r, 1e-4))
    assert not passes(NoisePolicy(), apart)
    assert passes(NoisePolicy(factor=10), apart)


def test_weights_may_drift_with_the_steps_but_not_at_step_0_and_not_without_end():
    r = RNG.normal(size=(8, 8))
    assert not passes(NoisePolicy(), two("weight", "weight", r, near(r, 5e-4), step=0))
    assert passes(NoisePolicy(), two("weight", "weight", r, near(r, 5e-4), step=10))
    assert not passes(NoisePolicy(), two("weight", "weight", r, near(r, 0.5), step=10))
    assert not passes(NoisePolicy(), two("weight", "weight", r, near(r, 0.5), step=100_000))


def test_a_forward_may_inherit_the_error_of_the_weights_it_started_from():
    r, w = RNG.normal(size=(16, 8)), RNG.normal(size=(8, 8))
    forward = two("forward", "output.0", r, near(r, 5e-3), step=10)
    assert passes(NoisePolicy(), two("weight", "weight", w, near(w, 4e-4), step=10), forward)
    assert not passes(NoisePolicy(), two("weight", "weight", w, w, step=10), forward)


def test_however_much_is_inherited_a_forward_far_off_fails():
    r, w = RNG.normal(size=(16, 8)), RNG.normal(size=(8, 8))
    diffs = judged(
        NoisePolicy(),
        two("weight", "weight", w, near(w, 9e-3), step=99),
        two("forward", "output.0", r, near(r, 0.2), step=99),
    )
    assert [diff.passed for diff in diffs] == [True, False]


def noisy_bias() -> list[Pair]:
    """A convolution before a BatchNorm: its weight's gradient is large, its bias' is nothing but noise."""
    big = RNG.normal(size=(8, 8))
    noise = RNG.normal(size=(2, 8)) * 1e-7
    steered = np.sign(RNG.normal(size=(2, 8))) * 1e-3  # what Adam makes of each
    return [
        two("grad", "weight", big, near(big, 1e-6)),
        two("grad", "bias", noise[0], noise[1]),
        two("update", "weight", big * 1e-3, near(big * 1e-3, 1e-6)),
        two("update", "bias", steered[0], steered[1]),
    ]


def test_a_bias_gradient_of_pure_noise_beside_a_large_weight_gradient_passes_and_so_does_its_update():
    assert passes(NoisePolicy(), *noisy_bias())


def test_the_same_noise_without_a_large_gradient_beside_it_fails():
    _, grad, _, update = noisy_bias()
    assert not any(diff.passed for diff in judged(NoisePolicy(), grad, update))


def test_the_update_of_a_noisy_gradient_fails_if_it_is_of_another_size():
    weight, grad, weight_update, update = noisy_bias()
    ten = two("update", "bias", update.reference.value, 10 * update.candidate.value)
    diffs = judged(NoisePolicy(), weight, grad, weight_update, ten)
    assert [diff.passed for diff in diffs] == [True, True, True, False]


def test_a_bias_gradient_as_large_as_the_weights_is_judged():
    big, bias = RNG.normal(size=(8, 8)), RNG.normal(size=8)
    diffs = judged(NoisePolicy(), two("grad", "weight", big, big), two("grad", "bias", bias, 1.05 * bias))
    assert [diff.passed for diff in diffs] == [True, False]


def test_an_update_8_percent_off_fails():
    big = RNG.normal(size=(8, 8))
    grad = two("grad", "weight", big, near(big, 1e-6))
    assert not passes(NoisePolicy(), grad, two("update", "weight", big, 1.08 * big))


def batchnorm(ratio: np.ndarray | float, step: int) -> list[Pair]:
    """A running variance over 4 x 5 x 5 = 100 values for each of 3 channels."""
    out, variance = RNG.normal(size=(4, 3, 5, 5)), np.asarray([0.5, 1.0, 2.0])
    return [
        two("weight", "running_var", variance, variance * ratio, step=step),
        two("forward", "output.0", out, out, step=step),
    ]


def test_a_running_variance_may_be_n_over_n_minus_1_apart_after_step_0():
    # torch feeds it var * n / (n - 1), paddle var.
    assert passes(NoisePolicy(), *batchnorm(99 / 100, step=1))
    assert not passes(NoisePolicy(), *batchnorm(99 / 100, step=0))


def test_a_running_variance_fed_with_another_momentum_fails():
    # From 1, towards a variance of 2 (0.5, 4): momentum 0.1 gives 1.1, momentum 0.9 gives 1.9.
    assert not passes(NoisePolicy(), *batchnorm(1.9 / 1.1, step=1))


def test_integers_are_compared_exactly():
    r = np.arange(1000, dtype=np.int64) + 10**6
    c = r.copy()
    c[3] += 1
    assert not passes(NoisePolicy(factor=1e6), pair(r, c, stage="input", slot="input.ids"))
    assert passes(NoisePolicy(), pair(r, r.astype(np.int32), stage="input", slot="input.ids"))


def test_a_learning_rate_that_differs_fails_and_one_that_is_rounded_does_not():
    def rates(r: float, c: float) -> Pair:
        return two("update", "learning_rate", np.asarray(r), np.asarray(c), layer=LOOP)

    assert not passes(NoisePolicy(), rates(1e-3, 1.001e-3))
    assert passes(NoisePolicy(), rates(0.1, float(np.float32(0.1))))


def test_a_loss_near_zero_is_not_judged_by_its_own_size():
    def losses(r: float, c: float) -> Pair:
        return two("loss", "loss", np.asarray(r), np.asarray(c), layer=LOOP)

    assert passes(NoisePolicy(), losses(1e-9, 2e-9))
    assert not passes(NoisePolicy(), losses(1.0, 1.01))


def test_a_parameter_missing_on_one_side_of_paired_layers_fails():
    r = RNG.normal(size=(4, 4))
    lone = Pair(0, record("fc", "weight", "bias", r[0]), None)
    for policy in (NoisePolicy(), Tolerance()):
        weight, bias = judged(policy, two("weight", "weight", r, r), lone)
        assert weight.passed and not bias.passed
        assert str(bias.problem) == "missing on the candidate"


@pytest.mark.parametrize("policy", [NoisePolicy(), Tolerance()])
def test_a_stage_that_one_side_did_not_record_at_all_is_a_gap_not_a_diff(policy):
    r = RNG.normal(size=(4, 4))
    grad = Pair(0, record("fc", "grad", "weight", r), None)
    assert passes(policy, two("weight", "weight", r, r), grad)


def test_a_gradient_missing_on_one_side_only_fails_where_others_were_recorded():
    r = RNG.normal(size=(4, 4))
    lone = Pair(0, None, record("fc", "grad", "bias", r[0]))
    assert [diff.passed for diff in judged(NoisePolicy(), two("grad", "weight", r, r), lone)] == [True, False]


def test_the_parameters_of_a_layer_without_a_partner_do_not_fail():
    r = RNG.normal(size=(4, 4))
    lone = Pair(0, record("extra", "weight", "weight", r), None)
    assert passes(NoisePolicy(), two("weight", "weight", r, r), lone)


def test_a_complex_output_is_judged_by_the_noise_of_its_halves():
    r = (RNG.normal(size=(8, 8)) + 1j * RNG.normal(size=(8, 8))).astype(np.complex64)
    c = (r * (1 + 1e-7)).astype(np.complex64)
    assert passes(NoisePolicy(), pair(r, c))
    assert not passes(NoisePolicy(), pair(r, (r * 1.01).astype(np.complex64)))


def test_running_variances_apart_do_not_excuse_a_forward_that_is_5_percent_off():
    out = RNG.normal(size=(16, 8))
    assert passes(NoisePolicy(), *batchnorm(99 / 100, step=3), two("forward", "output.0", out, out, step=3, layer="b"))
    wrong = two("forward", "output.0", out, near(out, 0.05), step=3, layer="b")
    assert not passes(NoisePolicy(), *batchnorm(99 / 100, step=3), wrong)


# -- overflow ----------------------------------------------------------------------------------------------------

BOTH = (np.asarray([1.0, np.inf, 2.0]), np.asarray([1.0, np.nan, 2.0]))
ONE = (np.asarray([1.0, 0.0, 2.0]), np.asarray([1.0, np.nan, 2.0]))
LIKE = (np.asarray([1.0, np.inf, 2.0]), np.asarray([1.0, np.inf, 2.0]))


def stages_judged(policy, *sides):
    """Whether each of (stage, its two sides), in causal order, passes."""
    pairs = [two(stage, "output.0", *both, layer=f"l{k}") for k, (stage, both) in enumerate(sides)]
    return [diff.passed for diff in judged(policy, *pairs)]


@pytest.mark.parametrize("policy", [NoisePolicy(), Tolerance()], ids=["noise", "fixed"])
@pytest.mark.parametrize("later", ["backward", "grad", "update"])
def test_what_becomes_of_gradients_that_overflowed_on_both_sides_is_no_diff(policy, later):
    assert stages_judged(policy, ("backward", LIKE), (later, ONE)) == [True, True]
    # The overflow itself has to be on both sides, and come first.
    assert stages_judged(policy, ("backward", ONE), (later, LIKE)) == [False, True]
    assert stages_judged(policy, ("backward", BOTH), (later, ONE)) == [False, True]
    assert stages_judged(policy, ("backward", ONE), (later, ONE)) == [False, False]
    diff = judged(policy, two("backward", "output.0", *LIKE, layer="a"), two(later, "w", *ONE, layer="b"))[1]
    assert str(diff.problem) == "1 of 3 values are NaN or infinite on one side only; gradients had overflowed on both"


@pytest.mark.parametrize("policy", [NoisePolicy(), Tolerance()], ids=["noise", "fixed"])
def test_infinities_of_an_attention_mask_excuse_nothing(policy):
    mask = (np.asarray([0.0, -np.inf, 0.0]),) * 2
    assert stages_judged(policy, ("forward", mask), ("forward", ONE)) == [True, False]
    assert stages_judged(policy, ("forward", mask), ("backward", ONE)) == [True, False]


@pytest.mark.parametrize("policy", [NoisePolicy(), Tolerance()], ids=["noise", "fixed"])
def test_finite_gradients_are_judged_after_an_overflow_too(policy):
    other = (np.asarray([1.0, 2.0]), np.asarray([1.0, 3.0]))
    assert stages_judged(policy, ("backward", LIKE), ("backward", other)) == [True, False]
