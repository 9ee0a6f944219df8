"""Inputs that another model makes, which drift as outputs do; and batches, which do not."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff

STEPS = 12
X = np.random.default_rng(0).normal(size=(STEPS, 16, 8)).astype("float32")
Y = X.mean(2, keepdims=True)


def _torch(folder, detach=False, spoil=None):
    """A first model, whose output goes into a second one, in two recordings."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    second = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (first, second)]
    with (
        padiff.record(first, folder / "first", optimizer=optimizers[0]) as one,
        padiff.record(second, folder / "second", optimizer=optimizers[1]) as two,
    ):
        for number, (x, y) in enumerate(zip(X, Y)):
            hidden = first(torch.tensor(x))
            given = hidden.detach() if detach else hidden
            given = given if spoil is None else spoil(number, given)
            loss = ((second(given) - torch.tensor(y)) ** 2).mean() + (hidden.square().mean() if detach else 0)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            one.try_dump()
            two.try_dump()
    return folder


def _paddle(folder, reference, detach=False):
    first = paddle.nn.Sequential(paddle.nn.Linear(8, 64), paddle.nn.Tanh(), paddle.nn.Linear(64, 16))
    second = paddle.nn.Sequential(paddle.nn.Linear(16, 16), paddle.nn.Tanh(), paddle.nn.Linear(16, 1))
    padiff.start_from(reference / "first", first)
    padiff.start_from(reference / "second", second)
    optimizers = [paddle.optimizer.Adam(1e-2, parameters=model.parameters()) for model in (first, second)]
    with (
        padiff.record(first, folder / "first", optimizer=optimizers[0]) as one,
        padiff.record(second, folder / "second", optimizer=optimizers[1]) as two,
    ):
        for x, y in zip(X, Y):
            hidden = first(paddle.to_tensor(x))
            given = hidden.detach() if detach else hidden
            loss = ((second(given) - paddle.to_tensor(y)) ** 2).mean() + (hidden.square().mean() if detach else 0)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.clear_grad()
            one.try_dump()
            two.try_dump()
    return folder


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("model", ["first", "second"])
def test_an_input_of_another_model_may_drift(model, detach, tmp_path):
    reference = _torch(tmp_path / "torch", detach)
    candidate = _paddle(tmp_path / "paddle", reference, detach)
    report = padiff.compare_runs(reference / model, candidate / model)
    assert report.passed, report.first_diff.message


SPOILT = {
    "another batch": lambda number, given: given if number < 4 else given.flip(0),
    "another scale": lambda number, given: given if number < 4 else given * 1.05,
    "a shift": lambda number, given: given if number < 4 else given + 0.02,
}


@pytest.mark.parametrize("fault", SPOILT)
def test_another_input_from_a_step_on_is_found_there(fault, tmp_path):
    reference = _torch(tmp_path / "right")
    candidate = _torch(tmp_path / "wrong", spoil=SPOILT[fault])
    first = padiff.compare_runs(reference / "second", candidate / "second").first_diff
    assert (first.step, first.stage) == (4, "input"), first.message


def test_a_small_difference_in_the_first_step_is_found(tmp_path):
    reference = _torch(tmp_path / "right")
    candidate = _torch(tmp_path / "wrong", spoil=lambda number, given: given * (1 + 1e-4))
    first = padiff.compare_runs(reference / "second", candidate / "second").first_diff
    assert (first.step, first.stage) == (0, "input"), first.message


class Sine(torch.nn.Module):
    """Computes with weights that the loop hands in, as torch lays them out."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x, w):
        return torch.tanh(torch.nn.functional.linear(x, w))


class Wave(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.inner = paddle.nn.Linear(8, 8)

    def forward(self, x, w):
        return paddle.tanh(x @ w)


def _adapted(folder, model, optimizer, tensor, grad, other=None):
    """Each step descends once from the weight, and trains through that step; `other` is done to what is handed in."""
    with padiff.record(model, folder, optimizer=optimizer) as recorder:
        for x in X[:3]:
            x = tensor(x)
            fast = model.inner.weight
            (change,) = grad((model(x, fast) ** 2).mean(), [fast])
            fast = fast - 0.5 * change
            loss = (model(x, fast if other is None else other(fast)) ** 2).mean()
            loss = loss + (model.inner.bias**2).sum()
            loss.backward()
            optimizer.step()
            recorder.try_dump()
            getattr(optimizer, "zero_grad" if hasattr(optimizer, "zero_grad") else "clear_grad")()


@pytest.mark.parametrize(("other", "passes"), [(None, True), (lambda w: w.t(), False), (lambda w: 1.1 * w, False)])
def test_weights_that_a_loop_hands_in_are_compared_in_their_layout(other, passes, tmp_path):
    torch.manual_seed(0)
    reference, candidate = Sine(), Wave()
    candidate.inner.weight.set_value(reference.inner.weight.detach().numpy().T)
    candidate.inner.bias.set_value(reference.inner.bias.detach().numpy())
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    _adapted(
        tmp_path / "a", reference, optimizer, torch.tensor, lambda y, xs: torch.autograd.grad(y, xs, create_graph=True)
    )
    optimizer = paddle.optimizer.SGD(0.1, parameters=candidate.parameters())
    grad = lambda y, xs: paddle.grad(y, xs, create_graph=True)  # noqa: E731
    _adapted(tmp_path / "b", candidate, optimizer, paddle.to_tensor, grad, other)
    report = padiff.compare_runs(tmp_path / "a", tmp_path / "b")
    assert report.passed is passes, report.first_diff and report.first_diff.message
    if not passes:
        assert report.first_diff.stage in ("input", "forward") and report.first_diff.step == 0


def _by_statistics(folder, model, optimizer, tensor):
    """The normalisation uses its running statistics from step 2 on."""
    with padiff.record(model, folder, optimizer=optimizer) as recorder:
        for number, x in enumerate(X[:4]):
            if number == 2:
                model[1].eval()
            (model(tensor(x)) ** 2).mean().backward()
            optimizer.step()
            recorder.try_dump()
            getattr(optimizer, "zero_grad" if hasattr(optimizer, "zero_grad") else "clear_grad")()


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
def test_running_variances_that_a_layer_uses_are_named(epsilon, tmp_path):
    reference = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    bn = paddle.nn.BatchNorm1D(6, epsilon=epsilon)
    candidate = paddle.nn.Sequential(paddle.nn.Linear(8, 6), bn, paddle.nn.Linear(6, 1))
    _by_statistics(tmp_path / "a", reference, torch.optim.SGD(reference.parameters(), 0.01), torch.tensor)
    padiff.start_from(tmp_path / "a", candidate)
    optimizer = paddle.optimizer.SGD(0.01, parameters=candidate.parameters())
    _by_statistics(tmp_path / "b", candidate, optimizer, paddle.to_tensor)
    first = padiff.compare_runs(tmp_path / "a", tmp_path / "b").first_diff
    assert (first.step, first.stage) == (2 if epsilon == 1e-5 else 0, "forward")
    assert first.cause.proven and ("unbiased variance" in first.cause.sentence) is (epsilon == 1e-5), first.cause
