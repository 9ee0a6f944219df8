"""What a compared step tells the next one, and what the limits make of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from padiff.compare.judge.block_facts import apart_at_start
from padiff.compare.judge.drift import Drift, Update, drift, with_caveat
from padiff.compare.judge.policy import NoisePolicy
from padiff.compare.measure.pairs import measure_pair
from padiff.records import Coverage, Diff, Figure, Figures, FirstDiff, Judgement, Pair, Rule
from padiff.records.step_diffs import StepDiffs

from .test_tolerance import near, two

RNG = np.random.default_rng(0)
KEY = ("fc", "weight")


def judged(*pairs: Pair, before: Drift | None = None) -> list[Diff]:
    diffs = [measure_pair(pair) for pair in pairs]
    return NoisePolicy().judge(diffs) if before is None else NoisePolicy().judge(diffs, before)


def figures(l2: float, norm: float) -> Figures:
    return Figures(l2=l2, reference_l2=norm, candidate_l2=norm, size=4)


#: Of a weight so large that a few elements do not count.
MANY = 10**9


def test_a_weight_is_off_by_what_it_was_off_before_and_by_what_its_update_was_off():
    before = Drift(step=4, weights={KEY: 0.3}, updates={KEY: Update(0.2, 5.0)})
    assert before.weight_error(KEY, 5, 5.0, MANY) == (0.5, True)
    assert before.weight_error(KEY, 4, 5.0, MANY) == (0.0, False)
    assert before.weight_error(("fc", "bias"), 5, 5.0, MANY) == (0.0, False)
    assert Drift(step=4, weights={KEY: 0.3}).weight_error(KEY, 5, 5.0, MANY) == (0.3, False)


def test_of_the_steps_between_the_step_before_them_tells_and_not_the_one_that_is_judged():
    before = Drift(step=4, weights={KEY: 0.3}, updates={KEY: Update(0.2, 5.0)})
    # An update was off by 0.04 of itself. In each of the two steps between it may be five times that, and a fifth more
    # for each step since; of the larger of the updates at either end.
    few = 2 * 2.5 * math.sqrt((4 + MANY // 20_000) / MANY)  # elements that are wholly different, in updates
    error, explained = before.weight_error(KEY, 7, 1.0, MANY)
    assert explained and error == pytest.approx(0.3 + 0.2 + (0.4 + 0.6 + few) * 5.0)
    assert before.weight_error(KEY, 7, 50.0, MANY)[0] == pytest.approx(0.3 + 0.2 + (1.0 + few) * 50.0)
    # At most unrelated, however long ago it was.
    assert 1000 * 2.5 * 5.0 * 0.9 < before.weight_error(KEY, 1004, 1.0, MANY)[0] < 1000 * 2.5 * 5.0 * 1.02


def test_of_a_small_weight_a_few_elements_may_be_all():
    before = Drift(step=4, weights={KEY: 0.0}, updates={KEY: Update(0.0, 1.0)})
    assert before.weight_error(KEY, 6, 1.0, 4)[0] == pytest.approx(0.2 + 2.5)
    assert before.weight_error(KEY, 6, 1.0, 400)[0] == pytest.approx(0.2 + 2.5 * 0.1)


def with_update(error: float, step: int, weight_error: float = 0.0):
    """A step in which an update of norm 1 is off by so much."""
    w, u = RNG.normal(size=(8, 8)), RNG.normal(size=(8, 8))
    return two("weight", "weight", w, near(w, weight_error), step=step), two(
        "update", "weight", u, near(u, error), step=step
    )


def test_a_fault_in_the_step_that_is_judged_does_not_excuse_its_weights():
    """Every third step is recorded, and updates are half as large from step 4 on."""
    w, u = RNG.normal(size=(256, 256)), RNG.normal(size=(256, 256)) * 1e-3
    third = drift(
        judged(two("weight", "weight", w, near(w, 1e-7), step=3), two("update", "weight", u, near(u, 1e-6), step=3))
    )
    wrong = w + 2 * 0.5 * u  # of steps 4 and 5
    weight, update = judged(
        two("weight", "weight", w, wrong, step=6), two("update", "weight", u, 0.5 * u, step=6), before=third
    )
    assert not weight.passed and not update.passed
    near_enough = judged(two("weight", "weight", w, w + 0.02 * u, step=6), before=third)
    assert near_enough[0].passed


def test_an_update_may_be_off_by_what_momentum_hands_on_to_it():
    before = drift(judged(*with_update(9e-3, 4)))
    assert judged(*with_update(1.8e-2, 5), before=before)[1].passed
    assert not judged(*with_update(6e-2, 5), before=before)[1].passed
    assert not judged(*with_update(1.8e-2, 5))[1].passed


def test_what_was_wrong_before_excuses_nothing():
    wrong = drift(judged(*with_update(0.5, 4)))
    assert not judged(*with_update(0.5, 5), before=wrong)[1].passed


def test_updates_of_one_step_add_up():
    u = RNG.normal(size=(8, 8))
    pairs = [replace(two("update", "weight", u, near(u, 1e-3), step=3)) for _ in range(2)]
    norm = float(np.linalg.norm(u))
    error, size, passed = drift(judged(*pairs)).updates[KEY]
    assert passed
    assert error == pytest.approx(2 * 1e-3 * norm, rel=1e-3)
    assert size == pytest.approx(2 * norm, rel=1e-2)


def test_a_weight_beyond_what_the_step_before_explains_fails_however_far_the_run_has_come():
    w, u = RNG.normal(size=(8, 8)), RNG.normal(size=(8, 8))
    first = drift(judged(two("weight", "weight", w, near(w, 1e-3), step=50), two("update", "weight", u, u, step=50)))
    assert judged(two("weight", "weight", w, near(w, 1.5e-3), step=51), before=first)[0].passed
    assert not judged(two("weight", "weight", w, near(w, 3e-3), step=51), before=first)[0].passed
    # Without a step before it, the weight of step 51 may have drifted as far.
    assert judged(two("weight", "weight", w, near(w, 3e-3), step=51))[0].passed


def test_a_running_mean_near_zero_is_judged_by_the_deviation_of_its_channels():
    variance, out = np.full(16, 4.0), RNG.normal(size=(2, 16, 4, 4))
    noise = RNG.normal(size=(2, 16)) * 1e-6

    def step(mean, other):
        pairs = (
            two("weight", "running_mean", mean, other, step=1),
            two("weight", "running_var", variance, variance, step=1),
            two("forward", "output.0", out, out, step=1),
        )
        return judged(*pairs)[0].passed

    assert step(noise[0], noise[1])
    assert not step(noise[0], noise[1] + 1e-2)


def test_an_output_may_be_off_by_all_that_the_bias_of_its_layer_is_off():
    # A softmax takes no gradient to the bias before it: Adam makes steps of any direction of the rounding noise.
    x, w, g, u = RNG.normal(size=(6, 8)), RNG.normal(size=(8, 1)), np.full(1, 1e-9), np.full((8, 1), 1e-3)

    def passes(shift: float, error: float) -> bool:
        rows = (
            ("weight", "weight", 100 * w, 100 * w),
            ("weight", "bias", np.full(1, 0.05), np.full(1, 0.05 + shift)),
            ("forward", "output.0", x @ w * 0.1, x @ w * 0.1 + error),
            ("grad", "weight", u, u),
            ("grad", "bias", g, -g),
            ("update", "weight", u, u),
            ("update", "bias", np.full(1, 1e-3), np.full(1, -1e-3)),
        )
        pairs = [two(*row, step=1) for row in rows]
        linear = [
            replace(pair, reference=replace(pair.reference, layer_type="Linear"),
                    candidate=replace(pair.candidate, layer_type="Linear"))
            for pair in pairs
        ]  # fmt: skip
        diffs = judged(*linear)
        assert diffs[1].passed
        return diffs[2].passed

    assert passes(2e-3, 2e-3)
    assert not passes(2e-3, 6e-3)
    assert not passes(0.0, 2e-3)


def test_the_gain_is_how_much_larger_outputs_are_off_than_what_the_step_started_from():
    r, w = RNG.normal(size=(16, 8)), RNG.normal(size=(8, 8))
    equal = drift(judged(two("weight", "weight", w, w), two("forward", "output.0", r, near(r, 1e-5))))
    assert equal.gain == pytest.approx(1e-5 * 2**24, rel=1e-3)
    apart = judged(
        two("weight", "weight", w, near(w, 1e-5), step=1), two("forward", "output.0", r, near(r, 1e-3), step=1)
    )
    assert drift(apart).gain == pytest.approx(1e-3 / (1e-5 + 2**-24), rel=1e-2)
    # The largest so far stays.
    assert drift(apart, equal).gain == equal.gain


@pytest.mark.parametrize(("gain", "passed"), [(3.0, False), (100.0, True)])
def test_outputs_may_come_apart_further_where_layers_were_seen_to_amplify(gain, passed):
    r, w = RNG.normal(size=(16, 8)), RNG.normal(size=(8, 8))
    before = Drift(step=8, gain=gain)
    weight, forward = (
        two("weight", "weight", w, near(w, 3e-3), step=9),
        two("forward", "output.0", r, near(r, 0.5), step=9),
    )
    assert judged(weight, forward, before=before)[1].passed is passed


def test_an_output_may_be_off_by_five_times_what_is_handed_on_to_it_but_not_the_first():
    r = RNG.normal(size=(16, 8))
    errors = [1.5e-5, 6e-5, 2.5e-4, 1e-3]
    diffs = judged(*(two("forward", "output.0", r, near(r, e), layer=f"l{k}") for k, e in enumerate(errors)))
    # In all it may be twenty times the limit of 2e-5.
    assert [diff.passed for diff in diffs] == [True, True, True, False]
    assert not judged(two("forward", "output.0", r, near(r, 6e-5)))[0].passed


def sampled(stage: str, l2: float, norm: float, step: int) -> Diff:
    values = np.zeros(1)
    own = Figures(l2=l2, reference_l2=norm, candidate_l2=norm, size=100_000, basis="sketches", spread=0.09)
    return Diff(two(stage, "weight", values, values, step=step), figures=own)


def apart(diffs: list[Diff], unseen: float) -> float:
    return apart_at_start(StepDiffs.from_diffs(diffs)).error(unseen)


def test_where_samples_are_all_that_is_known_updates_may_have_left_more_than_is_seen():
    # An update of a hundredth of the weight, a hundredth of which rounding may turn over between the samples.
    first = drift([sampled("weight", 0.0, 100.0, 0), sampled("update", 0.0, 1.0, 0)])
    assert first.unseen == 0.0
    assert first.unseen_in(1) == pytest.approx(1e-4)
    assert first.unseen_in(3) == pytest.approx(3e-4)
    second = [sampled("weight", 0.0, 100.0, 1), sampled("update", 0.0, 1.0, 1)]
    assert apart(second, first.unseen_in(1)) == pytest.approx(1e-4)
    assert drift(second, first).unseen_in(2) == pytest.approx(2e-4)
    # Whole tensors show all there is.
    w = RNG.normal(size=(8, 8))
    assert apart(judged(two("weight", "weight", w, w, step=1)), first.unseen_in(1)) == 0.0


def test_a_first_diff_after_rounding_has_grown_large_may_be_more_of_that():
    first = FirstDiff(9, "forward", "fc", "fc", "output.0", Diff(two("forward", "output.0", [1.0], [2.0], step=9)))
    reported = with_caveat(first, Coverage(amplified=7)).message
    assert "not measured. But from step 7 on" in reported and reported.endswith("may be more of that.")
    for one, coverage in ((first, Coverage()), (first, Coverage(amplified=9))):
        assert with_caveat(one, coverage) is one
    # A weight is explained by the step before, wherever that is.
    weight = replace(first, stage="weight")
    assert with_caveat(weight, Coverage(amplified=7)) is weight


def test_growth_does_not_forget_what_an_estimate_was_allowed_beyond_its_limit():
    """An estimate's limit is wider by chance's share: that it then is above 3 is no reason to leave it out."""
    diff = replace(
        sampled("grad", 2.5, 1.0, 5), judgement=Judgement(Figure.REL_L2, 2.5, 3.0 * (1 + 3 * 0.09), Rule.GROWN)
    )
    assert drift([diff]).stages == {"grad": 2.5}
    assert drift([replace(diff, judgement=replace(diff.judgement, limit=math.inf))]).stages == {}


def signs(flipped: bool, elsewhere: bool = False) -> list[Diff]:
    """A bias of 32 elements and its update by Adam; in one element rounding turns the sign of a small gradient over."""
    weight = RNG.normal(size=(40, 40))
    gradient = np.where(np.arange(32) % 2, 1.0, -1.0) * RNG.uniform(0.5, 1.5, 32)
    gradient[5] = 1e-4
    other = gradient.copy()
    other[5] = -1e-4 if flipped else 1e-4
    updates = [1e-3 * np.sign(g) for g in (gradient, other)]
    if elsewhere:
        updates[1][[9, 11, 14]] *= -1  # of one element alone rounding may make another
    return judged(
        two("grad", "weight", weight, near(weight, 1e-5)),
        two("grad", "bias", gradient, other),
        two("update", "weight", weight * 1e-3, weight * 1e-3),
        two("update", "bias", *updates),
    )


def test_an_update_may_be_another_where_its_gradient_is():
    assert [diff.passed for diff in signs(flipped=True)] == [True] * 4
    # The same update where the gradient is not.
    assert [diff.passed for diff in signs(flipped=False, elsewhere=True)] == [True, True, True, False]
    assert [diff.passed for diff in signs(flipped=True, elsewhere=True)] == [True, True, True, False]


# -- kinks -------------------------------------------------------------------------------------------------------


def off_in_a_few(values: np.ndarray, relative: float) -> np.ndarray:
    """Two elements of it are wholly different: rounding moved them across a ReLU's kink."""
    other = near(values, 1e-6)
    other.reshape(-1)[:2] += relative * np.linalg.norm(values) / math.sqrt(2)
    return other


def backwards(*errors: float, kink: float = 0.0) -> list[bool]:
    """Whether gradients of outputs pass that are off by so much, after one that is off in a few elements."""
    shape = (4, 8, 8, 8)  # fewer than eight samples: no whole sample may be off
    r = [RNG.normal(size=shape) for _ in range(len(errors) + 1)]
    pairs = [two("backward", "output.0", r[0], off_in_a_few(r[0], kink), layer="relu")]
    pairs += [two("backward", "output.0", v, near(v, e), layer=f"l{k}") for k, (v, e) in enumerate(zip(r[1:], errors))]
    return [diff.passed for diff in judged(*pairs)]


def test_a_kink_is_handed_on_to_the_layers_before():
    """One flipped ReLU is off in two elements; the convolution and the BatchNorm before it spread that over all."""
    assert backwards(0.04, kink=0.03) == [True, True]
    assert backwards(0.04, 0.08, 0.1, kink=0.03) == [True, True, True, True]
    # Without it, the same is a diff; and so is one that is much larger than what came.
    assert backwards(0.04) == [True, False]
    assert backwards(0.25, kink=0.03) == [True, False]


def test_a_kink_excuses_no_gradient_that_has_little_in_common_with_the_other_side():
    assert backwards(0.15, 0.6, kink=0.04) == [True, True, False]


def test_what_comes_after_a_gradient_that_failed_is_judged_as_before():
    assert backwards(0.5, 0.04) == [True, False, False]


def dead(error: float) -> bool:
    """Whether a ReLU's output passes that lets a hundredth of its input through, whose error is 1e-5 of the input."""
    x = RNG.normal(size=(16, 8))
    y = x * 0.01
    off = RNG.normal(size=y.shape)
    before = replace(two("forward", "output.0", x, near(x, 1e-5), layer="bn"))
    after = two("forward", "output.0", y, y + off * (error * np.linalg.norm(x) / np.linalg.norm(off)), layer="relu")
    records = [replace(record, layer_type="ReLU") for record in (after.reference, after.candidate)]
    return judged(before, replace(after, reference=records[0], candidate=records[1]))[1].passed


def test_an_activation_that_lets_little_through_is_judged_by_what_went_in():
    # A thousandth of its own norm: fifty times what an output may be off by.
    assert dead(1e-5)
    assert not dead(2e-5)


@pytest.mark.parametrize(("ratio", "step", "passed"), [(8e-6, 2, True), (0.0, 2, False), (0.0, 0, True)])
def test_weights_that_began_at_zero_have_the_ratio_of_their_updates(ratio, step, passed):
    """A framework rounds Adam's bias correction in float32: every update, also of steps that were not compared, is
    larger by the same share.
    """
    biases = {(f"fc{k}", "bias"): RNG.normal(size=64) for k in range(4)}
    before = Drift(
        step=step,
        ratio=ratio,
        began=dict.fromkeys(biases, 0.0),
        weights={key: 1e-5 * float(np.linalg.norm(bias)) for key, bias in biases.items()},
    )
    pairs = [two("weight", "bias", bias, bias * (1 + 6e-6), step=3, layer=layer) for (layer, _), bias in biases.items()]
    assert [diff.passed for diff in judged(*pairs, before=before)] == [passed] * 4


@pytest.mark.parametrize(("stage", "other"), [("grad", -1e-4), ("input", 1.0001e-4), ("forward", 1.001e-4)])
@pytest.mark.parametrize(("lately", "passed"), [(0.05, True), (0.0, False)])
def test_one_number_is_held_against_what_it_was_lately(stage, other, lately, passed):
    """A sum of many terms passes zero: then its rounding is larger than the sum."""
    before = Drift(step=2, numbers={KEY: lately})
    pair = two(stage, "weight", np.array([1e-4]), np.array([other]), step=3)
    assert judged(pair, before=before)[0].passed is passed


def test_one_number_is_held_against_what_it_is_in_other_calls_of_the_step():
    near_zero, other = (two("input", "x", np.array([x]), np.array([x + 1e-8])) for x in (1e-4, 0.02))
    other = replace(other, **{side: replace(getattr(other, side), call=1) for side in ("reference", "candidate")})
    assert [diff.passed for diff in judged(near_zero, other)] == [True, True]
    assert not judged(near_zero)[0].passed


def test_the_gradient_of_one_number_is_forgotten_by_half_a_step():
    first = drift(judged(two("grad", "weight", np.array([0.8]), np.array([0.8]), step=0)))
    assert first.numbers == {KEY: pytest.approx(0.8)}
    pair = two("grad", "weight", np.array([0.1]), np.array([0.1]), step=1)
    assert drift(judged(pair, before=first), first).numbers == {KEY: pytest.approx(0.4)}
