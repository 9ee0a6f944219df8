"""Averages of weights: moving averages, momentum encoders, target networks; clean pairs, and faults that are named."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff

STEPS = 8
X = np.random.default_rng(0).normal(size=(STEPS, 32, 8)).astype("float32")
Y = X.sum(2, keepdims=True)


class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.frozen = torch.nn.Linear(8, 16)
        self.frozen.requires_grad_(False)
        self.ema = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.ema.load_state_dict(self.net.state_dict())
        self.ema.requires_grad_(False)


class PaddleBoth(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.net = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.ReLU(), paddle.nn.Linear(16, 1))
        self.frozen = paddle.nn.Linear(8, 16)
        self.ema = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.ReLU(), paddle.nn.Linear(16, 1))
        for parameter in [*self.frozen.parameters(), *self.ema.parameters()]:
            parameter.stop_gradient = True


def _torch(folder, decay=0.999, lr=1e-3, place="after", steps=STEPS, part=None):
    """A moving average in a loop; ``decay`` is a number or a function of the step, None: no update."""
    torch.manual_seed(0)
    model = Both()
    optimizer = torch.optim.Adam(model.net.parameters(), lr)

    @torch.no_grad()
    def average(step):
        m = decay(step) if callable(decay) else decay
        for copy, source in zip(model.ema.parameters(), model.net.parameters()):
            if m is not None:
                copy.mul_(m).add_(source, alpha=1 - m if part is None else part)

    with padiff.record(model, folder, optimizer=optimizer) as rec:
        for step in range(steps):
            loss = torch.nn.functional.mse_loss(model.net(torch.tensor(X[step])), torch.tensor(Y[step]))
            loss.backward()
            if place == "before":
                average(step)
            optimizer.step()
            optimizer.zero_grad()
            if place == "after":
                average(step)
            rec.try_dump()
    return folder


def _paddle(folder, start, decay=0.999):
    model = PaddleBoth()
    padiff.start_from(start, model)
    optimizer = paddle.optimizer.Adam(1e-3, parameters=model.net.parameters())
    with padiff.record(model, folder, optimizer=optimizer) as rec:
        for step in range(STEPS):
            loss = paddle.nn.functional.mse_loss(model.net(paddle.to_tensor(X[step])), paddle.to_tensor(Y[step]))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            with paddle.no_grad():
                for copy, source in zip(model.ema.parameters(), model.net.parameters()):
                    copy.set_value(copy * decay + source * (1 - decay))
            rec.try_dump()
    return folder


def _warm(step):
    return min(1 - 1 / (step + 1), 0.99)


@pytest.mark.parametrize(("right", "wrong"), [(0.999, 0.99), (0.999, 0.9999), (0.99, 0.995), (0.5, 0.9)])
def test_another_decay_is_proven(right, wrong, tmp_path):
    reference = _torch(tmp_path / "right", right)
    first = padiff.compare_runs(reference, _torch(tmp_path / "wrong", wrong)).first_diff
    assert (first.step, first.stage) == (1, "weight")
    assert first.reference.startswith("ema")
    assert (first.cause.kind, first.cause.proven) == ("average_decay", True), first.message
    assert f"has a decay of {wrong} for the reference's {right}" in first.cause.text


def test_shares_that_are_not_1_together_are_proven(tmp_path):
    reference = _torch(tmp_path / "right", 0.9)
    first = padiff.compare_runs(reference, _torch(tmp_path / "wrong", 0.9, part=0.05)).first_diff
    assert (first.step, first.cause.kind, first.cause.proven) == (1, "average_decay", True), first.message
    assert "takes 0.9 of itself and 0.05 of its source, the reference's 0.9 and 0.1" in first.cause.text


@pytest.mark.parametrize("wrong", [0.99, 0.9999])
def test_another_decay_is_proven_across_frameworks(wrong, tmp_path):
    reference = _torch(tmp_path / "right")
    first = padiff.compare_runs(reference, _paddle(tmp_path / "wrong", reference, wrong)).first_diff
    assert (first.cause.kind, first.cause.proven) == ("average_decay", True), first.message
    assert f"has a decay of {wrong} for the reference's 0.999" in first.cause.text


def test_an_average_that_is_not_updated_is_named(tmp_path):
    reference = _torch(tmp_path / "right", 0.99)
    first = padiff.compare_runs(reference, _torch(tmp_path / "wrong", None)).first_diff
    assert (first.step, first.cause.kind) == (1, "average_missing"), first.message


def test_an_average_before_the_optimizers_step_is_named(tmp_path):
    reference = _torch(tmp_path / "right", 0.9)
    first = padiff.compare_runs(reference, _torch(tmp_path / "wrong", 0.9, place="before")).first_diff
    # Before its first step the source is equal to the average: the candidate does not move it there.
    assert first.stage == "weight", first.message
    assert first.cause.kind in ("average_missing", "average_order"), first.message


def test_a_warm_up_that_is_missing_is_found(tmp_path):
    reference = _torch(tmp_path / "right", _warm)
    first = padiff.compare_runs(reference, _torch(tmp_path / "wrong", 0.99)).first_diff
    assert first.reference.startswith("ema"), first.message
    assert first.cause.kind == "average_decay", first.message


@pytest.mark.parametrize("decay", [0.999, 0.9, _warm], ids=["0.999", "0.9", "a warm-up"])
def test_equal_averages_match(decay, tmp_path):
    reference = _torch(tmp_path / "right", decay)
    report = padiff.compare_runs(reference, _torch(tmp_path / "same", decay))
    assert report.passed, report.first_diff.message


@pytest.mark.parametrize("decay", [0.999, 0.9])
def test_equal_averages_match_across_frameworks(decay, tmp_path):
    reference = _torch(tmp_path / "torch", decay)
    report = padiff.compare_runs(reference, _paddle(tmp_path / "paddle", reference, decay))
    assert report.passed, report.first_diff.message


def test_a_fault_of_the_source_is_not_the_averages(tmp_path):
    reference = _torch(tmp_path / "right")
    first = padiff.compare_runs(reference, _torch(tmp_path / "wrong", lr=2e-3)).first_diff
    assert first.cause.kind == "learning_rate", first.message


def test_a_decay_that_follows_a_schedule_on_one_side_is_named(tmp_path):
    """The decays are nearly equal at first: a later step shows that one is a schedule."""
    reference = _torch(tmp_path / "a", decay=lambda step: 0.99 + 1e-3 * step)
    first = padiff.compare_runs(reference, _torch(tmp_path / "b", decay=0.99)).first_diff
    assert (first.cause.kind, first.cause.proven) == ("average_decay", True), str(first.cause)
    assert "0.99 for the reference's 0.99" in str(first.cause)
    assert "only the reference's changes from step to step" in str(first.cause)
