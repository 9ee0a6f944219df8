"""Gradients that hold a few rows of a large embedding only."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH

import padiff

from .training import OPTIONS, Training, assert_neutral, train

ROWS = 90


class Sparse(Training):
    """An embedding with sparse gradients; the fault scales the loss."""

    def build(self):
        make = torch.nn.Embedding if self.kit.name == "torch" else paddle.nn.Embedding
        return self.kit.Sequential(make(ROWS, 8, sparse=True), self.kit.Linear(8, 3))

    def step(self, number, log):
        words = np.random.default_rng(number).integers(0, ROWS, (4, 5))
        loss = (self.model(self.kit.tensor(words, "int64")) ** 2).mean() * (1.5 if self.fault and number else 1)
        loss.backward()
        log(loss)
        self.update()
        return float(loss.detach())


@pytest.fixture(params=["its optimizer is known", "it is not"])
def more(request):
    return {} if request.param == "its optimizer is known" else {"optimizer": None}


def test_are_recorded_with_the_shape_of_the_whole(kit, level, more, tmp_path):
    plain = train(Sparse(kit))
    recorded = train(Sparse(kit), tmp_path / "run", level, **more)
    assert_neutral(plain, recorded)
    for number in recorded.run.numbers():
        shapes = {
            r.stage: r.shape for r in recorded.run.steps(number)[0].records if (r.layer, r.slot) == ("0", "weight")
        }
        assert shapes == dict.fromkeys(["weight", "grad", "update"], (ROWS, 8))


@pytest.mark.parametrize("other", OPTIONS)
def test_match_each_other_at_any_level_but_for_a_mistake(kit, level, other, more, tmp_path):
    train(Sparse(TORCH), tmp_path / "torch", level, **more)
    train(Sparse(PADDLE), tmp_path / "paddle", OPTIONS[other], **more)
    train(Sparse(kit, fault=True), tmp_path / "wrong", OPTIONS[other], **more)
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle")
    assert report.passed, report.first_diff.message
    first = padiff.compare_runs(tmp_path / "torch", tmp_path / "wrong").first_diff
    assert first.step == 1
