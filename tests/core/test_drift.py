"""What a compared step tells the next one, and what the limits make of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from padiff.compare.drift import Drift, doubted, drift, inherited
from padiff.compare.measure import measure
from padiff.compare.noise import NoisePolicy
from padiff.records import Coverage, Diff, Figures, FirstDiff, Pair

from .test_tolerance import near, two

RNG = np.random.default_rng(0)
KEY = ("fc", "weight")


def judged(*pairs: Pair, before: Drift | None = None) -> list[Diff]:
    diffs = [measure(pair) for pair in pairs]
    return NoisePolicy().judge(diffs) if before is None else NoisePolicy().judge(diffs, before)


def figures(l2: float, norm: float) -> Figures:
    return Figures(l2=l2, reference_l2=norm, candidate_l2=norm, size=4)


def test_a_weight_is_off_by_what_it_was_off_before_and_by_what_its_update_was_off():
    before = Drift(step=4, weights={KEY: 0.3}, updates={KEY: (0.2, 5.0)})
    assert before.weight_error(KEY, 5, None) == (0.5, True)
    assert before.weight_error(KEY, 4, None) == (0.0, False)
    assert before.weight_error(("fc", "bias"), 5, None) == (0.0, False)


def test_of_the_steps_between_nothing_is_known_but_how_far_off_updates_are_at_either_end():
    before = Drift(step=4, weights={KEY: 0.3}, updates={KEY: (0.2, 5.0)})
    # A tenth of themselves in the later step: five times that, in each of three steps, of the larger update.
    error, explained = before.weight_error(KEY, 7, figures(0.1, 1.0))
    assert not explained
    assert error == pytest.approx(0.3 + 3 * 0.5 * 5.0)
    # At most unrelated.
    assert before.weight_error(KEY, 7, figures(0.9, 1.0))[0] == pytest.approx(0.3 + 3 * 2.5 * 5.0)


def test_updates_of_one_step_add_up():
    u = RNG.normal(size=(8, 8))
    pairs = [replace(two("update", "weight", u, near(u, 1e-3), step=3)) for _ in range(2)]
    norm = float(np.linalg.norm(u))
    error, size = drift(judged(*pairs)).updates[KEY]
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


def test_where_samples_are_all_that_is_known_updates_may_have_left_more_than_is_seen():
    # An update of a hundredth of the weight, a hundredth of which rounding may turn over between the samples.
    first = drift([sampled("weight", 0.0, 100.0, 0), sampled("update", 0.0, 1.0, 0)])
    assert first.unseen == 0.0
    assert first.unseen_in(1) == pytest.approx(1e-4)
    assert first.unseen_in(3) == pytest.approx(3e-4)
    second = [sampled("weight", 0.0, 100.0, 1), sampled("update", 0.0, 1.0, 1)]
    assert inherited(second, first.unseen_in(1)) == pytest.approx(1e-4)
    assert drift(second, first).unseen_in(2) == pytest.approx(2e-4)
    # Whole tensors show all there is.
    w = RNG.normal(size=(8, 8))
    assert inherited(judged(two("weight", "weight", w, w, step=1)), first.unseen_in(1)) == 0.0


def test_a_first_diff_after_rounding_has_grown_large_may_be_more_of_that():
    first = FirstDiff(9, "forward", "fc", "fc", "output.0", 1.0, 1.0, "The runs part at step 9.")
    told = doubted(first, Coverage(amplified=7)).message
    assert told.startswith("The runs part at step 9. But from step 7 on") and told.endswith("may be more of that.")
    for one, coverage in ((first, Coverage()), (first, Coverage(amplified=9))):
        assert doubted(one, coverage) is one
    # A weight is explained by the step before, wherever that is.
    weight = replace(first, stage="weight")
    assert doubted(weight, Coverage(amplified=7)) is weight


def test_growth_does_not_forget_what_an_estimate_was_allowed_beyond_its_limit():
    """An estimate's limit is wider by chance's share: that it then is above 3 is no reason to leave it out."""
    diff = replace(sampled("grad", 2.5, 1.0, 5), judged=("rel_l2", 2.5), limit=3.0 * (1 + 3 * 0.09))
    assert drift([diff]).stages == {"grad": 2.5}
    assert drift([replace(diff, limit=math.inf)]).stages == {}


def signs(flipped: bool, elsewhere: bool = False) -> list[Diff]:
    """A bias of 32 elements and its update by Adam; in one element rounding turns the sign of a small gradient over."""
    weight = RNG.normal(size=(40, 40))
    gradient = np.where(np.arange(32) % 2, 1.0, -1.0) * RNG.uniform(0.5, 1.5, 32)
    gradient[5] = 1e-4
    other = gradient.copy()
    other[5] = -1e-4 if flipped else 1e-4
    updates = [1e-3 * np.sign(g) for g in (gradient, other)]
    if elsewhere:
        updates[1][9] *= -1
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
