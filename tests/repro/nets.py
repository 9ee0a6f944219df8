"""One small net in both frameworks, and trainings of it with a fault in its code, its loss, or its optimizer."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as paddle_f
import torch
import torch.nn.functional as torch_f

import padiff

_RNG = np.random.default_rng(0)
IDS = _RNG.integers(1, 12, size=(4, 6)).astype("int64")
LABELS = _RNG.integers(0, 5, size=(4,)).astype("int64")
_SHAPES = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "up": (8, 16), "head": (16, 5)}
WEIGHTS = {name: (_RNG.normal(size=shape) * 0.4).astype("float32") for name, shape in _SHAPES.items()}
TABLE, KERNEL = (_RNG.normal(size=shape).astype("float32") for shape in ((12, 8), (8, 8, 3)))
STEPS = 3


def train(framework: str, folder, fault: str = "", **options) -> str:
    """Records a training; returns its folder."""
    run = _torch if framework == "torch" else _paddle
    run(str(folder), fault, {"existing": "overwrite", **options})
    return str(folder)


class _Norm(torch.nn.Module):
    """Somebody's own class: with the fault ``own_norm`` its epsilon is another one."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _PaddleNorm(paddle.nn.Layer):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = self.create_parameter([8], default_initializer=paddle.nn.initializer.Constant(1.0))
        self.eps = eps

    def forward(self, x):
        return x * paddle.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _Torch(torch.nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, nn = fault, torch.nn
        self.table = nn.Embedding(12, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, bias=False, dilation=1)
        for name, shape in WEIGHTS.items():
            setattr(self, name, nn.Linear(*shape.shape))
            getattr(self, name).weight.data = torch.tensor(shape.T.copy())
            nn.init.constant_(getattr(self, name).bias, 0.1)
        self.table.weight.data, self.conv.weight.data = torch.tensor(TABLE), torch.tensor(KERNEL)
        self.batch = nn.BatchNorm1d(8, momentum=0.9 if fault == "momentum" else 0.1)
        self.norm = nn.LayerNorm(8, eps=1e-3 if fault == "eps" else 1e-5)
        self.own = _Norm(1e-2 if fault == "own_norm" else 1e-6)
        self.act = nn.GELU(approximate="tanh" if fault == "gelu" else "none")
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, ids):
        x = self.batch(self.conv(self.table(ids).transpose(1, 2))).transpose(1, 2)
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(1, 2) / (8.0 if self.fault == "attention" else 8**0.5)
        x = self.norm(x + torch.softmax(scores, 1 if self.fault == "axis" else -1) @ v)
        y = self.own(x)
        x = x + (y.detach() if self.fault == "detach" else y)
        x = x * self.scale * 0.5 + x * (self.scale.detach() if self.fault == "parameter" else self.scale) * 0.5
        return self.head(self.act(self.up(x)).mean(1))


class _Paddle(paddle.nn.Layer):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, nn = fault, paddle.nn
        self.table = nn.Embedding(12, 8, padding_idx=0)
        self.conv = nn.Conv1D(8, 8, 3, padding=1, bias_attr=False, dilation=1)
        for name, shape in WEIGHTS.items():
            setattr(self, name, nn.Linear(*shape.shape))
            getattr(self, name).weight.set_value(shape)
            getattr(self, name).bias.set_value(np.full(shape.shape[1], 0.1, "float32"))
        self.table.weight.set_value(TABLE)
        self.conv.weight.set_value(KERNEL)
        self.batch = nn.BatchNorm1D(8, momentum=0.1 if fault == "momentum" else 0.9)
        self.norm = nn.LayerNorm(8, epsilon=1e-3 if fault == "eps" else 1e-5)
        self.own = _PaddleNorm(1e-2 if fault == "own_norm" else 1e-6)
        self.act = nn.GELU(approximate=fault == "gelu")
        self.scale = self.create_parameter([8], default_initializer=paddle.nn.initializer.Constant(1.0))

    def forward(self, ids):
        x = self.batch(self.conv(self.table(ids).transpose([0, 2, 1]))).transpose([0, 2, 1])
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = paddle.matmul(q, k, transpose_y=True) / (8.0 if self.fault == "attention" else 8**0.5)
        x = self.norm(x + paddle_f.softmax(scores, axis=1 if self.fault == "axis" else -1) @ v)
        y = self.own(x)
        x = x + (y.detach() if self.fault == "detach" else y)
        x = x * self.scale * 0.5 + x * (self.scale.detach() if self.fault == "parameter" else self.scale) * 0.5
        return self.head(self.act(self.up(x)).mean(axis=1))


def _torch(folder: str, fault: str, options: dict) -> None:
    net, scale = _Torch(fault), options.pop("scale", 1.0)
    decay = 0.2 if fault == "decay" else 0.01
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=decay)
    with padiff.record(net, folder, optimizer=optimizer, **options) as rec:
        for _ in range(STEPS):
            loss = torch_f.cross_entropy(
                net(torch.tensor(IDS)), torch.tensor(LABELS), reduction="sum" if fault == "loss" else "mean"
            )
            (loss * 2.0 if fault == "scaled" else loss * scale).backward()
            rec.loss_scale = scale
            for parameter in net.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad / scale
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()


def _paddle(folder: str, fault: str, options: dict) -> None:
    net = _Paddle(fault)
    decay = 0.2 if fault == "decay" else 0.01
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=net.parameters(), weight_decay=decay)
    with padiff.record(net, folder, optimizer=optimizer, **options) as rec:
        for _ in range(STEPS):
            loss = paddle_f.cross_entropy(
                net(paddle.to_tensor(IDS)), paddle.to_tensor(LABELS), reduction="sum" if fault == "loss" else "mean"
            )
            (loss * 2.0 if fault == "scaled" else loss).backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()
