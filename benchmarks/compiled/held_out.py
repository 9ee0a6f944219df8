"""Programs and faults of another author: a convolutional network, attention, an autocast region, a gated block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from compilers import Fault, replaced
from torch import nn


def _batch(k, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + k))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ELU())
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(x)
        return self.fc(F.avg_pool2d(x, 2).mean((2, 3)))


def convolutions(compiled):
    model = compiled(Convolutions())
    return model, lambda m, k: F.cross_entropy(m(_batch(k, 6, 3, 8, 8)), torch.arange(6) % 4)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(self.norm(x)).view(b, t, 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q * 4, k, v, is_causal=True)
        return x + self.o(a.transpose(1, 2).reshape(b, t, 16))


class Tokens(nn.Module):
    def __init__(self, compiled):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.ModuleList([compiled(Layer()), compiled(Layer())])
        self.head = nn.Linear(16, 30)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(compiled):
    model = Tokens(compiled)

    def loss(m, k):
        ids = torch.randint(0, 30, (3, 7), generator=torch.Generator().manual_seed(k))
        return F.cross_entropy(m(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return model, loss


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        h = F.silu(self.gate(x)) * self.up(x)
        print(end="")  # a graph break
        return torch.logsumexp(self.down(h), -1)


def gated(compiled):
    model = compiled(Gated())
    return model, lambda m, k: m(_batch(k, 10, 12)).pow(2).mean()


PROGRAMS = {"convolutions": convolutions, "tokens": tokens, "gated": gated}


def _sdpa(q, k, v, **kwargs):
    return F.scaled_dot_product_attention(q, k, v, scale=0.52, **kwargs)


def _conv(x, w, b, stride, padding, *rest):
    return F.conv2d(x.half(), w.half(), b.half(), stride, padding, *rest).float()


FAULTS = {
    "silu by a hard sigmoid": Fault(
        "convolutions", replaced("silu", lambda x, **_: x * F.hardsigmoid(x)), "silu", r"stem\.2"
    ),
    "elu": Fault("convolutions", replaced("elu", lambda x, *_, **__: F.elu(x, 0.99), nth=0), "elu", r"body\.2|stem"),
    "convolution in half": Fault("convolutions", replaced("conv2d", _conv, nth=1), "conv", r"body\.0"),
    "group norm's epsilon": Fault(
        "convolutions", replaced("group_norm", lambda x, g, w, b, eps: F.group_norm(x, g, w, b, 1e-3)), "group_norm", r"body\.1"
    ),
    "attention's scale": Fault("tokens", replaced("scaled_dot_product_attention", _sdpa), "scaled_dot", r"layers\.0"),
    "layer norm without bias": Fault(
        "tokens", replaced("layer_norm", lambda x, s, w, b, e: F.layer_norm(x, s, w, None, e + 1e-3)), "layer_norm", r"layers\.0\.norm"
    ),
    "mean's divisor": Fault("gated", replaced("mean", lambda x, *a, **k: x.mean(*a, **k) * 1.001), "mean", r"^$"),
    "logsumexp in half": Fault(
        "gated", replaced("logsumexp", lambda x, d: x.half().logsumexp(d).float()), "logsumexp", r"^$", region=1
    ),
    "silu's gradient": Fault(
        "gated", replaced("sigmoid", lambda x: torch.sigmoid(x.half()).float()), "silu|linear|mul", r"^$|gate|up|down", backward=True
    ),
    "gradient of the rsqrt": Fault(
        "gated", replaced("pow", lambda x, p: torch.pow(x, p) * 1.002), "rsqrt|mul|pow|add|mean", r"^$", backward=True
    ),
}  # fmt: skip
