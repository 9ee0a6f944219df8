"""Gradients that come back to a call on one side only, clipping before unscaling, and dropout on both sides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import padiff
from padiff.compare.diagnose.hypotheses import clipping


def both(train, *faults):
    return padiff.compare_runs(train("", *faults[1:]), train(faults[0], *faults[1:]))


def judge_gradients(fault):
    """Train a net that a second, frozen net judges twice a step."""
    torch.manual_seed(0)
    maker, judge = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh()), torch.nn.Linear(7, 1)
    optimizer = torch.optim.SGD(maker.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    with padiff.record(maker, optimizer=optimizer) as rec:
        for _ in range(2):
            noise = torch.randn(6, 5, generator=generator)
            sample = maker(noise)
            if fault != "detach":
                sample = sample.detach()
            judge(sample).square().mean().backward()
            (judge(maker(noise)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("swapped", [False, True])
def test_a_missing_detach_is_named_with_its_side(swapped):
    runs = [judge_gradients(""), judge_gradients("detach")]
    sides = ["reference", "candidate"]
    first = padiff.compare_runs(*runs[:: -1 if swapped else 1]).first_diff
    assert first.stage == "grad" and first.cause.kind == "detached"
    detaching, other = sides[:: -1 if swapped else 1]
    assert first.cause.sentence == f"the {detaching} detaches what call 1 of `(root)` gives, the {other} does not"
    assert "sample.detach()" in getattr(first.cause.lines, detaching).code


def penalized(kit, graph):
    rng = np.random.default_rng(3)
    net = kit.Sequential(kit.Linear(6, 12), kit.Tanh(), kit.Linear(12, 1))
    state = kit.state(net)
    kit.load(net, {name: rng.normal(size=np.shape(value)).astype("float32") for name, value in state.items()})
    with padiff.record(net) as rec:
        x = kit.tensor(rng.normal(size=(5, 6)).astype("float32"))
        x.requires_grad_() if kit.name == "torch" else setattr(x, "stop_gradient", False)
        import paddle

        grad = torch.autograd.grad if kit.name == "torch" else paddle.grad
        (slope,) = grad(net(x).sum(), x, create_graph=graph)
        (net(x).mean() + 10 * (slope**2).mean()).backward()
        rec.try_dump()
    return rec.run


def test_a_penalty_without_its_graph_is_a_term_without_gradient(kit):
    first = padiff.compare_runs(penalized(kit, True), penalized(kit, False)).first_diff
    assert first.cause.kind == "second_order", first.cause.text
    assert "the candidate asks for gradients without create_graph=True, the reference with it" in first.cause.sentence


def scaled_loop(order, limit=0.5, scale=4096.0):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    generator = torch.Generator().manual_seed(1)
    with padiff.record(net, optimizer=optimizer) as rec:
        for _ in range(3):
            x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
            scaler.scale(torch.nn.functional.cross_entropy(net(x), y)).backward()
            if order == "unscaled":
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), limit)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("limit", [0.1, 100.0])
def test_clipping_before_unscaling_is_proven(limit):
    first = padiff.compare_runs(scaled_loop("unscaled", limit), scaled_loop("scaled", limit)).first_diff
    assert first.cause.kind == "clip_scaled" and first.cause.proven, first.cause.text
    assert f"multiplied by the loss scale of 4096, to a norm of {limit:g}: " in first.cause.sentence
    assert first.cause.fix == "scaler.unscale_(optimizer)"
    assert padiff.compare_runs(scaled_loop("unscaled", limit), scaled_loop("unscaled", limit)).passed


def test_a_ratio_that_is_true_is_not_excluded(monkeypatch):
    monkeypatch.setattr(clipping, "_while_scaled", lambda *_: iter(()))
    first = padiff.compare_runs(scaled_loop("unscaled", 100.0), scaled_loop("scaled", 100.0)).first_diff
    assert "a constant ratio" not in first.cause.excluded


def dropping(rate, functional=False):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop = torch.nn.Linear(32, 32), torch.nn.Dropout(rate)

        def forward(self, x):
            x = self.first(x)
            return torch.nn.functional.dropout(x, rate, self.training) if functional else self.drop(x)

    torch.manual_seed(0)
    net = Net()
    x = torch.randn(64, 32)
    torch.manual_seed(2)
    with padiff.record(net) as rec:
        net(x).square().mean().backward()
        rec.try_dump()
    return rec.run


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("rates", [(0.2, 0.1), (0.1, 0.4)])
def test_rates_of_dropout_come_from_the_declared_layer(rates, functional):
    first = padiff.compare_runs(*(dropping(rate, functional) for rate in rates)).first_diff
    assert "of the elements at random" not in first.cause.text
    assert f"{rates[0]}" in first.cause.text and f"{rates[1]}" in first.cause.text


def test_dropout_on_one_side_alone_is_measured_by_its_zeros():
    first = padiff.compare_runs(dropping(0.0), dropping(0.25)).first_diff
    assert first.cause.proven and first.cause.kind in ("dropout", "layer_setting"), first.cause.text
