"""What counts as proof, on predictions made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction, evidence, explains, is_likely, weigh

NOISE = 1e-6


def hypothesis(**rest) -> Hypothesis:
    return Hypothesis("kind", "name", "sentence", lambda: (), **rest)


def prediction(size: int = 100, left: float = 0.0, apart: float = 1.0, seed: int = 0, **rest) -> Prediction:
    """A tensor that is predicted to ``left`` times the noise, and that the reference misses by ``apart``."""
    rng = np.random.default_rng(seed)
    actual = rng.normal(size=size)
    without = actual + apart * rng.normal(size=size)
    return Prediction("a/grad/w", actual, actual + left * NOISE * rng.normal(size=size), without, NOISE, **rest)


def test_what_comes_to_the_noise_explains():
    weight = weigh([prediction(left=1.0), prediction(left=1.0, seed=1)])
    assert weight.residual == pytest.approx(1, rel=0.2) and weight.without == pytest.approx(1e6, rel=0.2)
    assert (weight.tensors, weight.elements, weight.numbers) == (2, 200, 200)
    assert explains(weight, hypothesis()) and is_likely(weight, hypothesis())
    assert "2 tensors then agree to" in evidence(weight, hypothesis())


@pytest.mark.parametrize(
    ("predictions", "rest"),
    [
        ([prediction(left=10.0)], {}),  # ten times the noise is left
        ([prediction(apart=3 * NOISE)], {}),  # the reference explains it nearly as well
        ([prediction(size=4)], {}),  # four numbers
        ([prediction(size=20)], {"free": 10}),  # twenty, of which ten were solved for
        ([prediction(limit=1e-9, left=1.0)], {}),  # the policy would not pass it
        ([prediction(), prediction(apart=1.0, left=1e5, seed=1)], {}),  # one of two tensors is wrong
        ([], {}),
        ([prediction(size=0)], {}),
    ],
)
def test_what_is_not_proven(predictions, rest):
    assert not explains(weigh(predictions), hypothesis(**rest))


def test_what_is_left_of_a_likely_cause_is_near_the_noise():
    assert is_likely(weigh([prediction(left=20)]), hypothesis())
    # A hundredth of the error is left: thousands of times the noise, which something else has to explain.
    assert not is_likely(weigh([prediction(left=1e4)]), hypothesis())


def test_zeros_explain_nothing_that_is_small():
    """A candidate near zero is near to zeros; that says nothing."""
    rng = np.random.default_rng(0)
    actual, reference = 1e-3 * rng.normal(size=100), rng.normal(size=100)
    weight = weigh([Prediction("a", actual, np.zeros(100), reference, NOISE)])
    assert not is_likely(weight, hypothesis()) and not explains(weight, hypothesis())


def test_numbers_that_are_not_finite_explain_nothing():
    one = prediction()
    for field in ("actual", "predicted", "without"):
        values = getattr(one, field).copy()
        values[3] = np.nan
        parts = {name: getattr(one, name) for name in ("actual", "predicted", "without")} | {field: values}
        weight = weigh([Prediction("a", noise=NOISE, **parts)])
        assert not explains(weight, hypothesis()) and not is_likely(weight, hypothesis())


def test_the_first_tensor_that_is_wrong_ends_it():
    seen = []

    def tensors():
        for seed in range(5):
            seen.append(seed)
            yield prediction(left=1e6 if seed == 1 else 0.0, seed=seed)

    assert not explains(weigh(tensors()), hypothesis()) and seen == [0, 1]


def test_a_fit_of_noise_is_no_proof():
    """A straight line through few random points never is, whatever the draw."""
    proven = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        reference, actual = rng.normal(size=12), rng.normal(size=12)
        columns = np.stack([reference, np.ones(12), reference**2, reference**3], axis=1)
        made = columns @ np.linalg.lstsq(columns, actual, rcond=None)[0]
        weight = weigh([Prediction("a", actual, made, reference, NOISE)])
        proven += explains(weight, hypothesis(free=4)) or is_likely(weight, hypothesis(free=4))
    assert not proven
