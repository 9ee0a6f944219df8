"""A layer scale that the first step takes away: what is left of it, and all that it multiplies, is rounding."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff

SCALE, WIDTH = 1e-6, 8
DATA = np.random.default_rng(0).uniform(0.5, 1.5, (3, 4, WIDTH)).astype("float32")


def net(framework, factor=1.0):
    """A block with a layer scale of its own, and a drop path that does nothing, as ConvNeXt has it."""
    nn = framework.nn

    class Block(nn.Module if framework is torch else nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner, self.act, self.drop = nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Identity()
            if framework is torch:
                self.gamma = nn.Parameter(torch.full((WIDTH,), SCALE))
            else:
                start = nn.initializer.Constant(SCALE)
                self.gamma = self.create_parameter([WIDTH], default_initializer=start)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            inside = self.act(self.inner(x))
            return x + self.drop(self.gamma * inside * (factor if self.calls > 1 else 1.0))

    return nn.Sequential(Block(), nn.Linear(WIDTH, 2))


def trained(framework, start, factor=1.0):
    made = net(framework, factor)
    for parameter, value in zip(made.parameters(), start):
        if framework is torch:
            parameter.data = torch.from_numpy(value.copy())
        else:
            parameter.set_value(paddle.to_tensor(value.T if value.ndim == 2 else value))
    # Adam's first step is as large as its learning rate, whatever the gradient.
    optimizer = (
        torch.optim.Adam(made.parameters(), lr=SCALE)
        if framework is torch
        else paddle.optimizer.Adam(SCALE, parameters=made.parameters())
    )
    with padiff.record(made, optimizer=optimizer) as rec:
        for batch in DATA:
            made(torch.from_numpy(batch) if framework is torch else paddle.to_tensor(batch)).sum().backward()
            optimizer.step()
            optimizer.zero_grad() if framework is torch else optimizer.clear_grad()
            rec.try_dump()
    return rec.run


@pytest.fixture(scope="module")
def start():
    values = np.random.default_rng(1)
    # All positive: so are all gradients. The scales are a few units in the last place apart.
    scales = SCALE * (1 + 2e-7 * values.normal(size=WIDTH))
    others = [values.uniform(0.1, 1, p.shape) for p in list(net(torch).parameters())[1:]]
    return [value.astype("float32") for value in (scales, *others)]


def test_what_is_multiplied_by_rounding_is_no_diff(start):
    runs = trained(torch, start), trained(paddle, start)
    gamma = [next(r.value for r in run.steps(1)[0].records if r.slot == "gamma") for run in runs]
    assert np.abs(gamma[0]).max() < SCALE / 1000 and not np.allclose(*gamma, rtol=0.05, atol=0)
    report = padiff.compare_runs(*runs)
    assert report.passed, report.first_diff.message


def test_what_is_multiplied_by_more_is_one(start):
    first = padiff.compare_runs(trained(torch, start), trained(paddle, start, factor=1e6)).first_diff
    assert (first.step, first.stage, first.reference) == (1, "forward", "0.drop")


class Scaled(torch.nn.Module):
    def __init__(self, leaves_out=False):
        super().__init__()
        self.inner, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2)
        self.gamma = torch.nn.Parameter(torch.full((WIDTH,), 0.1))
        self.leaves_out = leaves_out

    def forward(self, x):
        return self.head(x + (self.inner(x) if self.leaves_out else self.gamma * self.inner(x)))


def test_a_factor_that_is_left_out_is_no_number_that_the_code_does_not_have():
    runs = []
    for leaves_out in (False, True):
        torch.manual_seed(0)
        model = Scaled(leaves_out)
        with padiff.record(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as rec:
            model(torch.from_numpy(DATA[0])).sum().backward()
            rec.try_dump()
        runs.append(rec.run)
    cause = padiff.compare_runs(*runs).first_diff.cause
    # All factors are 0.1: ten times the inner output is the same, but the candidate's code has no ten.
    assert "mul()" in cause.sentence and "10" not in cause.sentence, cause.text
