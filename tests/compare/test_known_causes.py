"""What the frameworks are known to do differently is offered where nothing computed explains a diff."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff

IMAGES = np.random.default_rng(0).normal(size=(2, 3, 5, 5)).astype("float32")
GRID = np.random.default_rng(1).uniform(-1, 1, size=(2, 4, 4, 2)).astype("float32")


def net_of(module, call):
    class Net(module):
        def forward(self, images, grid):
            return call(images, grid) * 2

    return Net()


def run_of(net, tensor):
    with padiff.record(net) as rec:
        net(tensor(IMAGES), tensor(GRID))
        rec.try_dump()
    return rec.run


def of_torch(call):
    return run_of(net_of(torch.nn.Module, call), torch.tensor)


def of_paddle(call):
    return run_of(net_of(paddle.nn.Layer, call), paddle.to_tensor)


def torch_grid(x, grid, **more):
    return torch.nn.functional.grid_sample(x, grid, **more)


@pytest.mark.filterwarnings("ignore:Default grid_sample")
def test_a_known_difference_is_offered_with_the_call_that_agrees():
    def sampled(function):
        return lambda x, grid: function(x, grid, padding_mode="reflection")  # which padiff does not compute

    runs = of_torch(sampled(torch_grid)), of_paddle(sampled(paddle.nn.functional.grid_sample))
    first = padiff.compare_runs(*runs).first_diff
    assert (first.cause.kind, first.cause.proven) == ("known_difference", False), first.cause.text
    assert "grid_sample: corners are aligned by default in paddle" in first.cause.sentence
    assert "align_corners=False" in first.cause.fix


@pytest.mark.filterwarnings("ignore:Default grid_sample")
def test_another_default_of_a_function_that_is_computed_is_proven():
    first = padiff.compare_runs(of_torch(torch_grid), of_paddle(paddle.nn.functional.grid_sample)).first_diff
    assert (first.cause.kind, first.cause.proven) == ("align_corners", True), first.cause.text
    assert first.cause.fix == "paddle.nn.functional.grid_sample(..., align_corners=False)"


@pytest.mark.filterwarnings("ignore:Default grid_sample")
def test_between_runs_of_one_framework_nothing_is_known():
    one, other = of_torch(torch_grid), of_torch(lambda x, grid: torch_grid(x, grid, align_corners=True))
    assert padiff.compare_runs(one, other).first_diff.cause.kind != "known_difference"


def test_what_is_computed_stands_before_what_is_known():
    class Pool(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = torch.nn.AvgPool2d(3, 2, 1)

        def forward(self, images, grid):
            return self.pool(images)

    class Theirs(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.pool = paddle.nn.AvgPool2D(3, 2, 1)

        def forward(self, images, grid):
            return self.pool(images)

    cause = padiff.compare_runs(run_of(Pool(), torch.tensor), run_of(Theirs(), paddle.to_tensor)).first_diff.cause
    assert (cause.kind, cause.proven) == ("pooling_exclusive", True), cause.text


def test_an_operation_that_agreed_in_an_earlier_step_differs_for_another_reason():
    noise = np.random.default_rng(2).normal(size=IMAGES.shape).astype("float32")

    class LeakyReLU(paddle.nn.LeakyReLU):
        steps = 0

        def forward(self, x):
            self.steps += 1
            return super().forward(x) + paddle.to_tensor(noise * (self.steps > 1))

    def of_steps(net, tensor):
        with padiff.record(net) as rec:
            for _ in range(2):
                net(tensor(IMAGES))
                rec.try_dump()
        return rec.run

    reference = of_steps(torch.nn.Sequential(torch.nn.LeakyReLU(0.01)), torch.tensor)
    first = padiff.compare_runs(reference, of_steps(paddle.nn.Sequential(LeakyReLU(0.01)), paddle.to_tensor)).first_diff
    assert first.step == 1 and first.cause.kind != "known_difference", first.cause.text


def padded(framework, slope=0.2, shift=0.0):
    """One step on a batch whose rows of padding are zeros, which a layer without bias hands on as exact zeros."""
    is_torch = framework is torch
    layers, tensor = (torch.nn, torch.tensor) if is_torch else (paddle.nn, paddle.to_tensor)

    class Net(layers.Module if is_torch else layers.Layer):
        def __init__(self):
            super().__init__()
            self.first = layers.Linear(3, 4, bias=False) if is_torch else layers.Linear(3, 4, bias_attr=False)
            self.last = layers.Linear(4, 2)

        def forward(self, x):
            return self.last(layers.functional.leaky_relu(self.first(x), slope))

    net, rng = Net(), np.random.default_rng(0)
    first, last, bias = (rng.normal(size=shape).astype("float32") for shape in [(3, 4), (4, 2), (2,)])
    for parameter, weight in zip(net.parameters(), (first, last, bias)):
        parameter.data = tensor(weight.T.copy() if is_torch else weight)
    x = np.random.default_rng(1).normal(size=(6, 3)).astype("float32")
    x[4:] = shift
    with padiff.record(net) as rec:
        (net(tensor(x)) ** 2).sum().backward()
        rec.try_dump()
    return rec.run


def test_exact_zeros_that_go_into_leaky_relu_are_the_proven_cause():
    """At 0, torch's slope is that below zero, paddle's that above: 0.2 and 1."""
    first = padiff.compare_runs(padded(torch), padded(paddle)).first_diff
    assert (first.stage, first.cause.kind, first.cause.proven) == ("backward", "known_difference", True), first
    assert "torch's 0.2: 8 elements of what goes in are 0" in first.cause.sentence
    assert first.cause.fix == "paddle.where(x > 0, x, 0.2 * x)"
    first = padiff.compare_runs(padded(paddle), padded(torch)).first_diff
    assert first.cause.proven and "torch's 0.2" in first.cause.sentence


def test_leaky_relu_without_exact_zeros_agrees():
    assert padiff.compare_runs(padded(torch, shift=0.1), padded(paddle, shift=0.1)).passed


def vector(reduce):
    """A loss for each of 6 samples; paddle's backward takes the sum of what is not reduced."""
    paddle.seed(0)
    net = paddle.nn.Linear(4, 3)
    net.weight.set_value(np.random.default_rng(2).normal(size=(4, 3)).astype("float32"))
    with padiff.record(net) as rec:
        out = net(paddle.to_tensor(np.random.default_rng(3).normal(size=(6, 4)).astype("float32")))
        reduce(out.abs().sum(-1)).backward()
        rec.try_dump()
    return rec.run


def test_a_loss_that_is_not_reduced_is_proven_by_its_mean():
    first = padiff.compare_runs(vector(paddle.mean), vector(lambda x: x)).first_diff
    assert first.cause.kind == "reduction" and first.cause.proven, first.cause.text
    assert "begins at a tensor of shape (6,)" in first.cause.sentence


def test_a_loss_of_which_the_other_side_takes_the_sum_is_reduced():
    assert padiff.compare_runs(vector(paddle.sum), vector(lambda x: x)).passed
