"""Updates of a few units in the last place of their weight: how they are rounded is no fault, another update is."""

from __future__ import annotations

import numpy as np
import pytest

from padiff.compare.judge.policy import NoisePolicy
from padiff.compare.measure.pairs import measure_pair
from padiff.records import Figure, Rule

from .test_tolerance import two

RATE, DECAY = np.float32(1e-6), np.float32(0.1)


def stepped(weight, step, rate=RATE, decay=DECAY, at_once=False):
    """A weight after a step of AdamW, as torch rounds it, first decay and then the step, or both at once."""
    one = np.float32(1)
    if at_once:
        return weight - rate * (step + decay * weight)
    return weight * (one - rate * decay) - rate * step


def judged(**other):
    random = np.random.default_rng(0)
    weight, step = (random.normal(size=(200, 64)).astype(np.float32) for _ in range(2))
    step = np.sign(step)
    updates = [stepped(weight, step) - weight, stepped(weight, step, at_once=True, **other) - weight]
    pairs = [two("weight", "weight", weight, weight), two("update", "weight", *updates)]
    (_, update) = NoisePolicy().judge([measure_pair(pair) for pair in pairs])
    return update


def test_how_an_update_is_rounded_into_its_weight_is_no_diff():
    update = judged()
    assert update.figures.rel_l2 > 0.03  # more than updates may be off by else
    assert update.passed
    assert (update.judgement.figure, update.judgement.rule) == (Figure.BEYOND_LAST_PLACE, Rule.LAST_PLACE)


def test_three_roundings_of_either_side_are_no_diff():
    # As measured: a weight of one, decayed and stepped by a few units of the numbers below one.
    weight = np.full((64,), 1 - 2.0**-22, np.float32)
    before, step = weight - np.float32(0), np.full((64,), -(2.0**-20), np.float32)
    other = step.copy()
    other[:6] += 3 * np.float32(2.0**-24)
    pairs = [two("weight", "weight", before, before), two("update", "weight", step, other)]
    (_, update) = NoisePolicy().judge([measure_pair(pair) for pair in pairs])
    assert update.figures.rel_l2 > 0.05 and update.passed and update.judgement.rule == Rule.LAST_PLACE
    other[:6] += np.float32(2.0**-24)
    pairs = [two("weight", "weight", before, before), two("update", "weight", step, other)]
    (_, update) = NoisePolicy().judge([measure_pair(pair) for pair in pairs])
    assert not update.passed


@pytest.mark.parametrize("other", [{"rate": np.float32(1.5e-6)}, {"decay": np.float32(1.0)}, {"rate": np.float32(0)}])
def test_an_update_that_is_another_is_one(other):
    assert not judged(**other).passed
