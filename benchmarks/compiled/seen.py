"""Programs and faults of one author."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from compilers import Fault, replaced
from torch import nn


def _batch(k, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


class Block(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.norm, self.fc, self.out, self.act = (
            nn.LayerNorm(width),
            nn.Linear(width, 48),
            nn.Linear(48, width),
            nn.GELU(),
        )

    def forward(self, x):
        return x + self.out(self.act(self.fc(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.blocks, self.head, self.breaks = nn.ModuleList([Block(), Block()]), nn.Linear(24, 5), breaks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(x)


def whole(compiled):
    model = compiled(Mlp())
    return model, lambda m, k: F.cross_entropy(m(_batch(k, 16, 24)), torch.arange(16) % 5)


def broken(compiled):
    model = compiled(Mlp(breaks=True))
    return model, lambda m, k: F.cross_entropy(m(_batch(k, 16, 24)), torch.arange(16) % 5)


def submodule(compiled):
    model = Mlp()
    model.blocks[1] = compiled(model.blocks[1])
    return model, lambda m, k: F.cross_entropy(m(_batch(k, 16, 24)), torch.arange(16) % 5)


class Attention(nn.Module):
    def __init__(self, compiled):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.attend = compiled(attend)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(self.attend(q, k, v))


def attend(q, k, v):
    scores = q @ k.transpose(-1, -2) * 3.0
    return F.softmax(scores, dim=-1) @ v


def function(compiled):
    model = Attention(compiled)
    return model, lambda m, k: m(_batch(k, 4, 6, 16)).pow(2).mean()


PROGRAMS = {"whole": whole, "broken": broken, "submodule": submodule, "function": function}


def _bf16(x, weight, bias=None):
    return F.linear(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()).float()


def _softmax(x, dim=-1, **_):
    e = x.half().exp()
    return (e / e.sum(dim, keepdim=True)).float()


FAULTS = {
    "gelu by tanh": Fault("whole", replaced("gelu", lambda x, **_: F.gelu(x, approximate="tanh")), "gelu", r"blocks\.0\.act"),
    "gelu by tanh in the second block": Fault(
        "broken", replaced("gelu", lambda x, **_: F.gelu(x, approximate="tanh")), "gelu", r"blocks\.[01]\.act"
    ),
    "epsilon": Fault(
        "submodule", replaced("layer_norm", lambda x, shape, w, b, eps: F.layer_norm(x, shape, w, b, 1e-3)), "layer_norm", r"blocks\.1\.norm"
    ),
    "matmul in bfloat16": Fault("broken", replaced("linear", _bf16), "linear", r"blocks\.0\.fc"),
    "softmax in half": Fault("function", replaced("softmax", _softmax), "softmax", r"^$|attend"),
    "gelu's gradient": Fault(
        "whole", replaced("gelu_backward", lambda g, x, **_: torch.ops.aten.gelu_backward(g, x, approximate="tanh")),
        "gelu", r"blocks\.[01]\.act", backward=True,
    ),
}  # fmt: skip
