"""Parameters that only one side trains: norms that are affine by default in one framework, a bias."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff

X = np.random.default_rng(0).normal(size=(5, 4, 3, 8, 8)).astype("float32")


def _torch(folder, norm, linear=torch.nn.Linear):
    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(3, 4, 3), norm(), nn.ReLU(), nn.Flatten(), linear(144, 5))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for batch in X:
            nn.functional.mse_loss(net(torch.tensor(batch)), torch.ones(4, 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return folder


def _paddle(folder, start, norm):
    nn = paddle.nn
    net = nn.Sequential(nn.Conv2D(3, 4, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    padiff.start_from(start, net, partial=True)
    optimizer = paddle.optimizer.Adam(1e-2, parameters=net.parameters())
    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for batch in X:
            nn.functional.mse_loss(net(paddle.to_tensor(batch)), paddle.ones([4, 5])).backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()
    return folder


def test_a_norm_that_is_affine_in_paddle_is_named(tmp_path):
    right = _torch(tmp_path / "torch", lambda: torch.nn.InstanceNorm2d(4))
    first = padiff.compare_runs(right, _paddle(tmp_path / "a", right, lambda: paddle.nn.InstanceNorm2D(4))).first_diff
    assert first.step >= 1
    assert (first.cause.kind, first.cause.proven) == ("surplus_parameters", False), first.message
    assert (
        "the candidate trains 8 numbers that the reference has not: 1/scale, 1/bias (InstanceNorm2D)" in first.message
    )
    assert first.cause.fix == "paddle.nn.InstanceNorm2D(..., weight_attr=False, bias_attr=False)"
    plain = _paddle(tmp_path / "b", right, lambda: paddle.nn.InstanceNorm2D(4, weight_attr=False, bias_attr=False))
    assert padiff.compare_runs(right, plain).passed


@pytest.mark.parametrize(("affine", "side"), [(True, "candidate"), (False, "reference")])
def test_a_norm_that_is_affine_on_one_side_of_torch_is_named(affine, side, tmp_path):
    runs = [
        _torch(tmp_path / str(number), lambda value=value: torch.nn.GroupNorm(2, 4, affine=value))
        for number, value in enumerate((not affine, affine))
    ]
    first = padiff.compare_runs(*runs).first_diff
    assert first.cause.kind == "surplus_parameters", first.message
    assert f"the {side} trains 8 numbers" in first.message
    assert first.cause.fix == ("torch.nn.GroupNorm(..., affine=False)" if affine else "")
