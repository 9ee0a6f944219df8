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


def run_of(model):
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with padiff.record(model, optimizer=optimizer) as rec:
        for x in X:
            scores = model(x, x.flip(1))
            loss = nn.functional.cross_entropy(scores, torch.arange(6))
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
