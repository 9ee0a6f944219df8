"""A small network in paddle.Model."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

import padiff
from padiff_hapi import PaDiffCallback


def weights(seed=0):
    data = np.random.default_rng(seed)
    shapes = [(4, 8), (8,), (8, 3), (3,)]
    return [data.uniform(-0.5, 0.5, shape).astype(np.float32) for shape in shapes]


class Net(nn.Layer):
    """Linear, ReLU, Linear; `fail_at` raises in that forward."""

    def __init__(self, seed=0, fail_at=None):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)
        for parameter, value in zip(self.parameters(), weights(seed)):
            parameter.set_value(value)
        self.calls, self.fail_at = 0, fail_at

    def forward(self, x):
        x = self.act(self.first(x))
        if self.calls == self.fail_at:
            raise ZeroDivisionError("in the network")
        self.calls += 1
        return self.second(x)


class Batches(paddle.io.Dataset):
    def __init__(self, batches=6, size=8, seed=0):
        data = np.random.default_rng(seed)
        self.x = data.normal(size=(batches * size, 4)).astype(np.float32)
        self.y = data.integers(0, 3, (batches * size, 1))

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


def fit(folder, network=None, optimizer=None, options=None, prepare=None, data=None, callbacks=(), **fit_options):
    """Fit one epoch, batches of 8 in order; without a folder without a callback."""
    network = network if network is not None else Net()
    make = optimizer or (lambda parameters: paddle.optimizer.SGD(0.1, parameters=parameters))
    model = paddle.Model(network)
    model.prepare(make(network.parameters()), nn.CrossEntropyLoss(), **(prepare or {}))
    callback = PaDiffCallback(folder, **(options or {})) if folder is not None else None
    given = [*callbacks] + ([callback] if callback else [])
    fit_options = {"epochs": 1, "shuffle": False, "verbose": 0, "batch_size": 8, **fit_options}
    model.fit(data if data is not None else Batches(), callbacks=given, **fit_options)
    return callback, model


def values(folder, number=0):
    (step,) = padiff.open_run(folder).steps(number)
    return {record.site: record.value for record in step.records}


def hooks(model):
    layers = model.network.sublayers(include_self=True)
    found = sum(len(layer._forward_post_hooks) + len(layer._forward_pre_hooks) for layer in layers)
    on_optimizer = [n for n in ("step", "minimize", "append_regularization_ops") if n in vars(model._optimizer)]
    return found + len(on_optimizer)
