"""What is done with tensors on another device, held to what is done on the CPU: these say that they are elsewhere."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.frameworks.torch import tensors


def torch_training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 40, 5),
        torch.nn.BatchNorm2d(40),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.Linear(640, 9),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(number):
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(6, 3, 8, 8, generator=generator)).square().mean().backward()
        if number == 2:  # in other memory from here on
            model[4].weight.data = model[4].weight.data.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)

    return model, optimizer, step


def paddle_training():
    paddle.seed(0)
    model = paddle.nn.Sequential(
        paddle.nn.Conv2D(3, 40, 5),
        paddle.nn.BatchNorm2D(40),
        paddle.nn.ReLU(),
        paddle.nn.Flatten(),
        paddle.nn.Linear(640, 9),
    )
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())

    def step(number):
        images = np.random.default_rng(number).standard_normal((6, 3, 8, 8), np.float32)
        model(paddle.to_tensor(images)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    return model, optimizer, step


def elsewhere_of_torch(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False))
    monkeypatch.setattr(tensors, "device", lambda tensor: "cuda")
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # what comes from a device is a copy


def elsewhere_of_paddle(monkeypatch):
    monkeypatch.setattr(type(paddle.zeros([1]).place), "is_cpu_place", lambda place: False)
    monkeypatch.setattr(paddle.Tensor, "pin_memory", paddle.Tensor.clone)


TRAININGS = {
    "torch": (torch_training, elsewhere_of_torch),
    "paddle": (paddle_training, elsewhere_of_paddle),
}


def recorded(training):
    model, optimizer, step = training()
    with padiff.record(model, detail="sketch", optimizer=optimizer) as rec:
        for number in range(5):
            step(number)
            rec.try_dump()
    steps = [rec.run.steps(number)[0] for number in range(5)]
    return [[(record.site, record.stage, record.source) for record in step.records] for step in steps]


@pytest.mark.parametrize("framework", TRAININGS)
def test_samples_from_another_device_are_those_of_the_cpu(framework, monkeypatch):
    training, elsewhere = TRAININGS[framework]
    expected = recorded(training)
    with monkeypatch.context() as patched:
        elsewhere(patched)
        found = recorded(training)
    sketched = 0
    for step, other in zip(expected, found):
        assert [site for site, _, _ in step] == [site for site, _, _ in other]
        for (site, _, one), (_, _, another) in zip(step, other):
            assert one.sketched == another.sketched, site
            sketched += one.sketched
            values = [source.row if source.sketched else source.read() for source in (one, another)]
            np.testing.assert_array_equal(*values, err_msg=site)
    assert sketched > 60


def test_what_layers_own_is_copied_together_on_another_device(monkeypatch):
    """As few kernels as can be: of the tensors here, 7 parameters and buffers, two are large."""
    elsewhere_of_torch(monkeypatch)
    model, optimizer, step = torch_training()
    asked = {"cat": 0, "index_select": 0, "clone": 0}

    def counted(owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            asked[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    with padiff.record(model, detail="sketch", optimizer=optimizer) as rec:
        for number in (4, 6):
            step(number)
            rec.try_dump()
        counted(torch, "cat")
        counted(torch.Tensor, "index_select")
        counted(torch.Tensor, "clone")
        step(8)
        rec.try_dump()
    # Weights and buffers in one copy for each of two dtypes, gradients and what the parameters became in one each; what
    # layers give and are given, and large gradients, one by one. Then all of it comes over at once: of each dtype.
    assert asked["cat"] == 2 + 1 + 1 + 1 + 2  # with the loss
    assert asked["index_select"] <= 2 + 2 * 5 + 1


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="this torch scales on GPUs only")
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_loss_of_a_scaled_backward_is_recorded(monkeypatch, scale):
    elsewhere_of_torch(monkeypatch)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    losses = []
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(3):
            loss = torch.nn.functional.mse_loss(model(torch.ones(4, 5)), torch.zeros(4, 3))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
            rec.try_dump()
    steps = [rec.run.steps(number)[0] for number in range(3)]
    assert [step.loss_scale for step in steps] == [scale or 1.0] * 3
    recorded = [[record.value.item() for record in step.records if record.slot == "loss"] for step in steps]
    assert recorded == [[loss] for loss in losses]
