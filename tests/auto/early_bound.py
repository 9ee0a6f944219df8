"""Models whose functions were bound before anything was recorded, in all the ways that people bind them.

Both frameworks' are written alike: each line calls one function, whose name it stands for.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import paddle
import torch
from paddle import matmul as paddle_matmul
from paddle.nn.functional import gelu as paddle_gelu
from paddle.nn.functional import softmax as paddle_softmax
from torch import matmul as torch_matmul
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import softmax as torch_softmax

#: What the models call, in their order.
CALLS = ["softmax", "gelu", "matmul", "tanh", "sigmoid", "log_softmax", "relu", "exp", "mean", "add", "mul", "norm"]


def by_default(x, function=torch.tanh):
    return function(x)


def by_default_paddle(x, function=paddle.tanh):
    return function(x)


class TorchModel(torch.nn.Module):
    activation = staticmethod(torch.sigmoid)
    table: ClassVar = {"log_softmax": torch.nn.functional.log_softmax}
    bound = partial(torch.nn.functional.relu, inplace=False)

    def __init__(self):
        super().__init__()
        self.exp, self.mean, self.add = torch.exp, torch.Tensor.mean, torch.add

    def forward(self, x):
        x = torch_softmax(x, -1)
        x = torch_gelu(x)
        x = torch_matmul(x, x.t())
        x = by_default(x)
        x = self.activation(x)
        x = self.table["log_softmax"](x, -1)
        x = TorchModel.bound(x)
        x = self.exp(x)
        y = self.mean(x)
        x = self.add(x, y)
        x = x * 2
        return torch.linalg.norm(x) + 0 * x[:1]


class PaddleModel(paddle.nn.Layer):
    activation = staticmethod(paddle.nn.functional.sigmoid)
    table: ClassVar = {"log_softmax": paddle.nn.functional.log_softmax}
    bound = partial(paddle.nn.functional.relu, name=None)

    def __init__(self):
        super().__init__()
        self.exp, self.mean, self.add = paddle.exp, paddle.Tensor.mean, paddle.add

    def forward(self, x):
        x = paddle_softmax(x, -1)
        x = paddle_gelu(x)
        x = paddle_matmul(x, x.t())
        x = by_default_paddle(x)
        x = self.activation(x)
        x = self.table["log_softmax"](x, -1)
        x = PaddleModel.bound(x)
        x = self.exp(x)
        y = self.mean(x)
        x = self.add(x, y)
        x = x * 2
        return paddle.linalg.norm(x) + 0 * x[:1]
