"""Updates of a few units in the last place of their weight: how they are rounded is no fault, another update is."""

from __future__ import annotations

import numpy as np
import pytest

from padiff.compare.judge.noise import NoisePolicy
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


@pytest.mark.parametrize("other", [{"rate": np.float32(1.5e-6)}, {"decay": np.float32(1.0)}, {"rate": np.float32(0)}])
def test_an_update_that_is_another_is_one(other):
    assert not judged(**other).passed
