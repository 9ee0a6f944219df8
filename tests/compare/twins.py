"""One training in both frameworks, from equal weights, with the mistakes that people make in one of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import paddle
import torch

import padiff
from padiff.records import Run

BATCH, SIDE, CLASSES = 16, 12, 10
#: Sides and paths of what a fault is in.
FAULTS = ("learning rate", "weight decay", "momentum of a BatchNorm", "loss", "a layer's output", "not transposed")


def torch_net() -> Any:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 36, 80),
        nn.GELU(),
        nn.Linear(80, 80),
        nn.ReLU(),
        nn.Linear(80, CLASSES),
    )


def paddle_net() -> Any:
    nn = paddle.nn
    return nn.Sequential(
        nn.Conv2D(3, 8, 3, padding=1),
        nn.BatchNorm2D(8),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Linear(8 * 36, 80),
        nn.GELU(),
        nn.Linear(80, 80),
        nn.ReLU(),
        nn.Linear(80, CLASSES),
    )


def batches(seed: int, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    data = np.random.default_rng(seed)
    return [
        (data.normal(size=(BATCH, 3, SIDE, SIDE)).astype(np.float32), data.integers(0, CLASSES, BATCH))
        for _ in range(steps)
    ]


@lru_cache(maxsize=8)
def torch_run(seed: int = 0, steps: int = 6, **options: Any) -> Run:
    """A training in torch, recorded in memory."""
    torch.manual_seed(seed)
    model = torch_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with padiff.record(model, optimizer=optimizer, name="torch", **options) as rec:
        for x, y in batches(seed, steps):
            loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
            loss.backward()
            rec.log_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


@lru_cache(maxsize=16)
def paddle_run(seed: int = 0, steps: int = 6, fault: str = "", **options: Any) -> Run:
    """The same training in paddle, recorded in memory."""
    torch.manual_seed(seed)
    twin, model = torch_net(), paddle_net()
    padiff.assign_weight(twin, model)
    if fault == "momentum of a BatchNorm":
        model[1]._momentum = 0.1
    if fault == "not transposed":
        model[7].weight.set_value(model[7].weight.numpy().T)
    if fault == "a layer's output":
        model[6].register_forward_post_hook(lambda layer, inputs, output: output * 1.001)
    optimizer = paddle.optimizer.Momentum(
        0.051 if fault == "learning rate" else 0.05,
        0.9,
        parameters=model.parameters(),
        weight_decay=0.1 if fault == "weight decay" else None,
    )
    with padiff.record(model, optimizer=optimizer, name="paddle", **options) as rec:
        for number, (x, y) in enumerate(batches(seed, steps)):
            loss = paddle.nn.functional.cross_entropy(model(paddle.to_tensor(x)), paddle.to_tensor(y))
            if fault == "loss" and number >= 2:
                loss = loss * 1.05
            loss.backward()
            rec.log_loss(loss)
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()
    return rec.run
