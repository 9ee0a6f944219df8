"""Weights of 16 bits on one side, whose small updates are rounded away."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import padiff


def _train(folder, dtype, optimizer, lr=1e-3, autocast=False, steps=3):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))  # the same start on both sides
    step = optimizer(net.parameters(), lr)
    data = np.random.default_rng(0)
    with padiff.record(net, folder, optimizer=step) as rec:
        for _ in range(steps):
            x = torch.tensor(data.normal(size=(32, 16)), dtype=torch.bfloat16).to(dtype)
            y = torch.tensor(data.integers(0, 8, 32))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = net(x)
            torch.nn.functional.cross_entropy(out.float(), y).backward()
            step.step()
            step.zero_grad()
            rec.try_dump()
    return folder


def _adamw(parameters, lr):
    return torch.optim.AdamW(parameters, lr)


def _sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


@pytest.mark.parametrize(("optimizer", "lr"), [(_adamw, 1e-4), (_adamw, 3e-5), (_sgd, 1e-2)])
def test_weights_of_16_bits_are_the_cause(optimizer, lr, tmp_path):
    full = _train(tmp_path / "float32", torch.float32, optimizer, lr)
    half = _train(tmp_path / "bfloat16", torch.bfloat16, optimizer, lr)
    first = padiff.compare_runs(full, half).first_diff
    assert (first.step, first.stage) == (0, "update")
    assert first.cause.kind == "half_weights"
    assert first.cause.proven
    assert "the candidate keeps its weights in bfloat16" in first.cause.text


def test_autocast_keeps_the_weights(tmp_path):
    full = _train(tmp_path / "float32", torch.float32, _adamw)
    cast = _train(tmp_path / "autocast", torch.float32, _adamw, autocast=True)
    report = padiff.compare_runs(full, cast)
    assert report.passed, report.first_diff.message


def test_another_rate_beside_it_is_not_explained_by_rounding(tmp_path):
    full = _train(tmp_path / "float32", torch.float32, _adamw, 1e-4)
    half = _train(tmp_path / "bfloat16", torch.bfloat16, _adamw, 1e-3)
    first = padiff.compare_runs(full, half).first_diff
    assert "learning rate" in first.message, first.message
