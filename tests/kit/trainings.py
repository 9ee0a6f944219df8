"""Small trainings of both frameworks that start alike; each is written in its framework's own words."""

from __future__ import annotations

import numpy as np
import paddle
import torch

import padiff

STEPS = 3
X = np.random.RandomState(0).randn(8, 6, 5).astype("float32")
Y = np.random.RandomState(1).randn(8, 6, 3).astype("float32")
_WEIGHTS = np.random.RandomState(2)
W1, B1, W2, B2 = (_WEIGHTS.randn(*shape).astype("float32") * 0.5 for shape in ((7, 5), (7,), (3, 7), (3,)))


def torch_net(norm=False):
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7) if norm else torch.nn.Tanh())
    net.append(torch.nn.Linear(7, 3))
    with torch.no_grad():
        for parameter, value in zip((*net[0].parameters(), *net[2].parameters()), (W1, B1, W2, B2)):
            parameter.copy_(torch.tensor(value))
    return net


def paddle_net(norm=False, attr=None):
    first = paddle.nn.Linear(5, 7, bias_attr=attr)
    net = paddle.nn.Sequential(first, paddle.nn.BatchNorm1D(7) if norm else paddle.nn.Tanh(), paddle.nn.Linear(7, 3))
    for parameter, value in zip((*net[0].parameters(), *net[2].parameters()), (W1.T, B1, W2.T, B2)):
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(value)))
    return net


def trained(framework, make, *, net=None, each=None, steps=STEPS, first=0, folder=None, **options):
    """A run of a training.

    Args:
        make: ``make(net)`` gives its optimizer, or several.
        each: ``each(step, net, optimizer)`` is called before a step.
        options: of `padiff.record`.
    """
    tensor = torch.tensor if framework == "torch" else paddle.to_tensor
    net = (torch_net() if framework == "torch" else paddle_net()) if net is None else net
    optimizer = make(net)
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    with padiff.record(net, folder, optimizer=optimizer, start_step=first, **options) as rec:
        for step in range(first, first + steps):
            if each is not None:
                each(step, net, optimizer)
            loss = ((net(tensor(X[step])) - tensor(Y[step])) ** 2).mean()
            loss.backward()
            rec.log_loss(loss)
            for one in several:
                one.step()
            for one in several:
                one.zero_grad() if framework == "torch" else one.clear_grad()
            rec.try_dump()
    return rec.run


def optimizer_of(framework, kind, options):
    """``make`` for one optimizer over all parameters, in the framework's own words."""
    if framework == "torch":
        return lambda net: getattr(torch.optim, kind)(net.parameters(), **options)
    return lambda net: getattr(paddle.optimizer, kind)(parameters=net.parameters(), **options)
