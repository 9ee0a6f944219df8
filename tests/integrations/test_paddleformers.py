"""PaDiffCallback in PaddleFormers' Trainer, which runs in a process of its own (`trainers.pf_cases`)."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from .trainers.running import run

WHY = "PaddleFormers is not installed: .ci/run says how it is"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("paddleformers") is None, reason=WHY),
]


@pytest.mark.timeout(600)
def test_what_the_callback_does(tmp_path):
    # One test: the process that it takes needs seconds to begin.
    (facts,) = run("pf_cases", tmp_path)

    neutral = facts["neutral"]
    assert neutral["same"] and neutral["hooks"] == 0 and neutral["finished"]
    assert neutral["numbers"] == [0, 2, 4]
    # The Trainer logs the mean of a step's micro-batches, and divides gradients once both are there.
    assert np.mean(neutral["losses"]) == pytest.approx(neutral["logged"][2], rel=1e-6)
    assert neutral["scale"] == 2

    for event, (raised, left, after, finished) in facts["exceptions"].items():
        assert raised and finished and left == after == 0, event
    assert facts["added_later"] == {"raised": True, "hooks": [0, 0], "finished": True}

    differing = facts["differing"]
    assert differing["stopped"] == 1 and differing["stage"] == "grad" and differing["hooks"] == [0, 0]
    assert "clip limit 1.0 against 0.5" in " ".join(differing["said"][0].replace("likely", "").split())
    assert "beta2 0.95 against 0.9" in " ".join(differing["raised"].replace("likely", "").split())

    replayed = facts["replayed"]
    assert replayed["passed"] and replayed["back"] and replayed["hooks"] == 0, replayed["text"]
    assert replayed["steps"] == [0, 2, 4]

    measured = facts["measured"]
    assert measured["passed"] and measured["units"] == [[1, 16]] * 3 and measured["hooks"] == 0, measured["text"]
    assert min(measured["exact"]) > 50 and measured["notes"] == []

    # Five batches in an epoch: the last one's gradients are still there when the next epoch begins.
    assert facts["carried"]["micro_batches"] == [2, 2, 3, 2]
    assert facts["carried"]["left_over"] == [None, None, "of 1 micro-batch before the step", None]
