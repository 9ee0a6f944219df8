"""A layer that computes one function more than the other author's, whose code computes it after the layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import padiff
from padiff import compare_runs

X = torch.tensor(np.random.default_rng(0).normal(size=(3, 6, 4)), dtype=torch.float32)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.second(torch.relu(self.first(x)))
        return x / x.norm(dim=1, keepdim=True)


class Outside(nn.Module):
    """Normalises what a plain body gives."""

    def __init__(self, temperature=0.2):
        super().__init__()
        self.body, self.temperature = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)), temperature

    def embedded(self, x):
        return nn.functional.normalize(self.body(x), dim=1)

    def forward(self, x, y):
        return self.embedded(x) @ self.embedded(y).T / self.temperature


class Inside(Outside):
    """Has a body that normalises."""

    def __init__(self):
        super().__init__()
        self.body = Body()

    def embedded(self, x):
        return self.body(x)


class Nowhere(Outside):
    """Does not normalise what the body gives for its first input."""

    def forward(self, x, y):
        return self.body(x) @ self.embedded(y).T / self.temperature


def trained(model):
    return run_of(model, lambda model, x: model(x).square().sum(1).sqrt().mean())


def contrasted(model, x):
    return nn.functional.cross_entropy(model(x, x.flip(1)), torch.arange(6))


def run_of(model, loss_of=contrasted):
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with padiff.record(model, optimizer=optimizer) as rec:
        for x in X:
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.log_loss(loss)
            rec.try_dump()
    return rec.run


def test_a_norm_inside_of_the_encoder_or_after_it_is_no_difference():
    report = compare_runs(run_of(Outside()), run_of(Inside()))
    assert report.passed
    assert ("body", "body") in [tuple(pair.split(" / ")) for pair in report.coverage.cut_elsewhere]


@pytest.mark.parametrize("fault", [lambda: Outside(0.25), Nowhere])
def test_a_fault_after_it_is_found(fault):
    assert not compare_runs(run_of(Inside()), run_of(fault())).passed


class Scaled(nn.Module):
    """A branch whose output is halved; what calls it adds the residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.nn.functional.silu(self.first(self.norm(x)))) * 0.5


class Halves(nn.Module):
    def __init__(self, kind=Scaled):
        super().__init__()
        self.one, self.two, self.end = kind(), kind(), nn.LayerNorm(4)

    def forward(self, x):
        x = self.one(x) + x
        return self.end(self.two(x) + x)


class Residual(Scaled):
    factor = 0.5

    def forward(self, x):
        return x + self.factor * self.second(torch.nn.functional.silu(self.first(self.norm(x))))


class Whole(Residual):
    factor = 1.0


class Chain(Halves):
    def forward(self, x):
        return self.end(self.two(self.one(x)))


def test_a_residual_inside_of_a_block_or_around_it_is_no_difference_and_its_scale_is_named():
    assert compare_runs(trained(Halves()), trained(Chain(Residual))).passed
    first = compare_runs(trained(Halves()), trained(Chain(Whole))).first_diff
    assert (first.cause.kind, first.cause.proven) == ("scale_missing", True)
    assert "nothing is scaled by 0.5" in first.cause.sentence
