"""A small transformer and a small convolutional net of one's own style, in torch, with faults in the code."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

import padiff

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 6, 4


class Norm(torch.nn.Module):
    def __init__(self, eps=1e-5, unbiased=False, centred=True):
        super().__init__()
        self.gain, self.eps, self.unbiased, self.centred = torch.nn.Parameter(torch.ones(WIDTH)), eps, unbiased, centred

    def forward(self, x):
        mean = x.mean(-1, keepdim=True) if self.centred else 0.0
        return (x - mean) / torch.sqrt(x.var(-1, keepdim=True, unbiased=self.unbiased) + self.eps) * self.gain


class Block(torch.nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.norm = Norm(1e-2 if fault == "eps" else 1e-5, fault == "unbiased", fault != "uncentred")
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.gate, self.down = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, mask):
        fault, (b, n, w) = self.fault, x.shape
        y = x if fault == "no norm" else self.norm(x)
        if fault == "heads by reshape":
            q, k, v = (f(y).view(b * HEADS, n, -1).view(b, HEADS, n, -1) for f in (self.q, self.k, self.v))
        else:
            q, k, v = (f(y).view(b, n, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if fault == "parts swapped":
            q, v = v, q
        size = w if fault == "scale of the width" else q.shape[-1]
        scores = q @ k.transpose(-1, -2) / math.sqrt(size)
        kept = (~mask if fault == "mask inverted" else mask)[:, None, None]
        if fault != "no mask":
            scores = scores.masked_fill(~kept, -1e9)
        y = F.softmax(scores, -2 if fault == "softmax axis" else -1) @ v
        y = (y if fault == "heads not turned back" else y.transpose(1, 2)).reshape(b, n, w)
        y = self.o(y)
        x = y if fault == "no residual" else x + (2 * y if fault == "branch twice" else y)
        if fault == "gate and up":
            return x + self.down(F.silu(self.up(x)) * self.gate(x))
        acts = {"gelu": F.gelu, "no activation": lambda z: z, "two at once": lambda z: 1.2 * F.gelu(z)}
        act = acts.get(fault, F.silu)
        return x + self.down(act(self.gate(x)) * self.up(x))


class Net(torch.nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.words = torch.nn.Embedding(20, WIDTH)
        self.places = torch.nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.block = Block(fault)
        self.head = torch.nn.Linear(WIDTH, 5)

    def forward(self, ids, mask):
        fault, x = self.fault, self.words(ids)
        x = x * (1.0 if fault == "no embedding scale" else 4.0)
        places = self.places.roll(1, 0) if fault == "places rolled" else self.places
        x = x if fault == "no places" else x + places
        x = self.block(x, mask)
        if fault == "rounded":
            x = x.bfloat16().float()
        if fault == "mean over pads":
            x = x.mean(1)
        elif fault == "squares":
            x = x.square().mean(1).sqrt()
        else:
            x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(x)


class Images(torch.nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        mode = "reflect" if fault == "padding" else "zeros"
        self.conv = torch.nn.Conv2d(2, 6, 3, padding=1, padding_mode=mode)
        self.norm = torch.nn.BatchNorm2d(6, eps=1e-2 if fault == "declared eps" else 1e-5)
        if fault == "declared eps and more":
            self.norm = torch.nn.BatchNorm2d(6, eps=1e-2)
            self.norm.forward = lambda x: 1.03 * torch.nn.BatchNorm2d.forward(self.norm, x)
        self.mix = torch.nn.Parameter(0.3 * torch.randn(6, 6))
        self.head = torch.nn.Linear(24, 5)

    def forward(self, x):
        fault, x = self.fault, self.conv(x)
        x = x if fault == "no norm" else self.norm(x)
        x = F.avg_pool2d(x, 4) if fault == "average" else F.max_pool2d(x, 4)
        mix = self.mix.T if fault == "transposed" else self.mix
        x = torch.einsum("bchw,cd->bdhw", x, mix) if fault == "einsum" else (x.transpose(1, -1) @ mix).transpose(1, -1)
        x = x.transpose(1, 2) if fault == "flattened" else x
        return self.head(x.flatten(1))


def batch(kind):
    rng = np.random.default_rng(3)
    if kind is Images:
        return (torch.tensor(rng.normal(size=(5, 2, 8, 8)).astype("float32")),)
    mask = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (BATCH, 1))
    return torch.tensor(rng.integers(0, 20, (BATCH, LENGTH))), torch.tensor(mask)


def trained(kind, fault="", **options):
    """A step of a training."""
    torch.manual_seed(1)
    net = kind(fault)
    torch.manual_seed(9)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    inputs = batch(kind)
    with padiff.record(net, optimizer=optimizer, **options) as rec:
        net(*inputs).square().mean().backward()
        optimizer.step()
        rec.try_dump()
    return rec.run
