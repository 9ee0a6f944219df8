"""Gradients that are tiny beside their layer's largest one: rounding noise, unless one is a multiple of the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import padiff

RNG = np.random.default_rng(4)
X = torch.tensor(RNG.normal(0, 1e-7, (4, 8, 6)), dtype=torch.float32)
MATRIX = torch.tensor(RNG.normal(0, 0.5, (5, 6)), dtype=torch.float32)
NOISE = torch.tensor(RNG.normal(0, 1e-8, (5, 6)), dtype=torch.float32)


def train(change=None, **options):
    """Inputs of 1e-7 make the gradient of the matrix some 1e-7 of that of the bias."""
    layer = torch.nn.Linear(6, 5)
    layer.weight.data, layer.bias.data = MATRIX.clone(), torch.zeros(5)
    if change is not None:
        layer.weight.register_hook(change)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with padiff.record(layer, optimizer=optimizer, **options) as rec:
        for x in X:
            (layer(x) + 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("options", [{}, {"detail": "sketch"}])
@pytest.mark.parametrize("factor", [1 / 256, 0.25, 4.0])
def test_a_tiny_gradient_that_is_scaled_differs(factor, options):
    first = padiff.compare_runs(train(**options), train(lambda gradient: factor * gradient, **options)).first_diff
    assert first is not None and (first.step, first.stage) == (0, "grad"), first


def test_a_tiny_gradient_with_rounding_noise_agrees():
    assert padiff.compare_runs(train(), train(lambda gradient: gradient + NOISE)).first_diff is None


def scaled_by_hand(scale, clip_first=False):
    """The loss is multiplied, and the gradients are divided again, before or after they are clipped."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with padiff.record(layer, optimizer=optimizer) as rec:
        for x in X:
            loss = (layer(1e7 * x) + 3).square().mean() * scale
            loss.backward()
            if clip_first:
                torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            for parameter in layer.parameters():
                parameter.grad.div_(scale)
            if not clip_first:
                torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


def test_a_loss_scaled_by_hand_is_no_difference_where_the_norms_before_clipping_agree():
    report = padiff.compare_runs(scaled_by_hand(1.0), scaled_by_hand(1024.0))
    assert report.passed, report.first_diff.message
    cause = padiff.compare_runs(scaled_by_hand(1.0), scaled_by_hand(1024.0, clip_first=True)).first_diff.cause
    assert cause.kind == "clip_scaled" and cause.proven and "the loss scale of 1024, to a norm of 1" in cause.sentence
    assert not cause.fix  # no scaler undoes it
