"""Tensors without elements: no box was found, an expert got no tokens."""

from __future__ import annotations

import numpy as np
import pytest
from kit.frameworks import PADDLE, TORCH

import padiff

from .training import Training, assert_neutral, train


class Selecting(Training):
    """A head that gets the rows that pass a threshold: none in step 1; with the fault, some in every step."""

    steps = 3

    def build(self):
        kit = self.kit

        class Net(kit.Layer):
            limit = 0.0

            def __init__(self):
                super().__init__()
                self.body, self.head = kit.Linear(4, 8), kit.Linear(8, 3)

            def forward(self, x):
                hidden = self.body(x)
                return hidden.sum() + self.head(hidden[x[:, 0] > self.limit]).sum()

        return Net()

    def step(self, number, log):
        self.model.limit = 1e9 if number == 1 and not self.fault else 0.0
        loss = self.model(self.batch(number)[0])
        loss.backward()
        log(loss)
        self.update()
        return float(loss.detach())


def test_are_recorded_and_change_nothing(kit, level, tmp_path):
    plain, recorded = train(Selecting(kit)), train(Selecting(kit), tmp_path / "run", level)
    assert_neutral(plain, recorded)
    records = {r.site: r for r in recorded.run.steps(1)[0].records}
    for site in ("head/forward/output.0", "head/backward/output.0"):
        assert records[site].shape == (0, 3)
    assert (records["head/grad/bias"].shape, records["head/forward/output.0"].dtype) == ((3,), "float32")


@pytest.mark.parametrize("other", [{}, {"detail": "sketch"}], ids=["full", "sketch"])
def test_match_each_other_and_differ_from_others_in_shape(kit, level, other, tmp_path):
    train(Selecting(TORCH), tmp_path / "torch", level)
    train(Selecting(PADDLE), tmp_path / "paddle", other)
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle")
    assert report.passed, report.first_diff.message
    train(Selecting(kit, fault=True), tmp_path / "wrong", other)
    first = padiff.compare_runs(tmp_path / "torch", tmp_path / "wrong").first_diff
    assert (first.step, first.stage, first.reference) == (1, "forward", "head")
    # What the code of the model selects goes into the head.
    assert (first.slot, first.inside) == ("input.input", False)
    assert "shapes differ: (0, 8) against" in first.message


def test_in_memory(kit, level):
    training = Selecting(kit)
    with padiff.record(training.model, optimizer=training.optimizers, **level) as rec:
        for number in range(training.steps):
            training.step(number, rec.log_loss)
            rec.try_dump()
    (step,) = rec.run.steps(1)
    assert 0 in {np.prod(r.shape) for r in step.records}
    assert padiff.compare_runs(rec.run, rec.run).passed
