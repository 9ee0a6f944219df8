"""Containers of the same matrices: told apart by the layers without parameters inside, and by their siblings."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH

import padiff

X = np.random.default_rng(0).normal(size=(5, 2)).astype("float32")


class Flow(torch.nn.Module):
    """The shifts first, all of them, then the scales, which end with a tanh."""

    def __init__(self):
        super().__init__()
        self.t = torch.nn.ModuleList([self.net() for _ in range(3)])
        self.s = torch.nn.ModuleList([self.net(torch.nn.Tanh()) for _ in range(3)])

    @staticmethod
    def net(*last):
        return torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2), *last)

    def forward(self, x):
        for scale, shift in zip(self.s, self.t):
            x = x * scale(x).exp() + shift(x)
        return x


class Coupling(paddle.nn.Layer):
    """The scale first, then the shift."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = self.net(paddle.nn.Tanh()), self.net()

    @staticmethod
    def net(*last):
        return paddle.nn.Sequential(paddle.nn.Linear(2, 6), paddle.nn.ReLU(), paddle.nn.Linear(6, 2), *last)

    def forward(self, x):
        return x * self.scale(x).exp() + self.shift(x)


def couplings():
    return paddle.nn.Sequential(*[Coupling() for _ in range(3)])


class Block(torch.nn.Module):
    """A block of a stack, whose first one holds the table of all."""

    def __init__(self, table):
        super().__init__()
        self.up, self.down = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)
        self.table = torch.nn.Embedding(3, 2) if table else None

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(k == 0) for k in range(3)])

    def forward(self, x):
        x = x + self.blocks[0].table.weight[0]
        for block in self.blocks:
            x = block(x)
        return x


class Plain(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = paddle.nn.Linear(2, 4), paddle.nn.Linear(4, 2)

    def forward(self, x):
        return x + self.down(paddle.nn.functional.relu(self.up(x)))


class Tower(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.e1, self.e2, self.e3 = Plain(), Plain(), Plain()
        self.offsets = paddle.nn.Embedding(3, 2)

    def forward(self, x):
        return self.e3(self.e2(self.e1(x + self.offsets.weight[0])))


@pytest.mark.parametrize(("first", "second"), [(Flow, couplings), (Stack, Tower)])
@pytest.mark.parametrize("from_torch", [True, False])
def test_equal_weights_give_equal_outputs(first, second, from_torch):
    torch.manual_seed(1)
    paddle.seed(2)
    ours, theirs = first(), second()
    assert padiff.assign_weight(ours, theirs) if from_torch else padiff.assign_weight(theirs, ours)
    outputs = TORCH.numpy(ours(torch.tensor(X))), PADDLE.numpy(theirs(paddle.to_tensor(X)))
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
