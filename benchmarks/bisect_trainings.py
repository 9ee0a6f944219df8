"""Trainings for `benchmarks/bisections.py`: three small nets, each with settings of which a bisection plants some."""

from __future__ import annotations

from typing import Any

#: A file of a training: `train(settings)`.
NETS = {
    "conv": """
class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1 = nn.Conv2d(3, c["width"], 3, padding=1, padding_mode=c["padding"])
        self.norm = nn.BatchNorm2d(c["width"], momentum=c["bn_momentum"], eps=c["eps"])
        self.conv2 = nn.Conv2d(c["width"], 8, 3, bias=c["bias"])
        self.drop = nn.Dropout(c["dropout"])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.norm(self.conv1(x)).relu()
        x = F.max_pool2d(x, 2) if POOL == "max" else F.avg_pool2d(x, 2)
        x = self.conv2(x).relu().mean((2, 3))
        return self.head(self.drop(x))

def batch(c, g):
    return torch.randn(8, 3, 12, 12, generator=g) * c["scale"], torch.randint(0, 5, (8,), generator=g)
""",
    "gpt": """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32, eps=c["eps"]), nn.LayerNorm(32, eps=c["eps"])
        self.qkv, self.out = nn.Linear(32, 96, bias=c["bias"]), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.drop = nn.Dropout(c["dropout"])

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate=GELU)))

class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 32), nn.ModuleList(Block(c) for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def batch(c, g):
    ids = torch.randint(0, 50, (4, 17), generator=g)
    return ids[:, :-1], ids[:, 1:].flatten() if SHIFT else ids[:, :-1].flatten()
""",
    "lstm": """
class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.rnn = nn.LSTM(6, 16, num_layers=2, batch_first=True, bias=c["bias"])
        self.norm, self.drop = nn.LayerNorm(16, eps=c["eps"]), nn.Dropout(c["dropout"])
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x, _ = self.rnn(x)
        return self.head(self.drop(self.norm(x[:, -1] if LAST else x.mean(1))))

def batch(c, g):
    return torch.randn(8, 10, 6, generator=g) * c["scale"], torch.randint(0, 3, (8,), generator=g)
""",
}
_HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
POOL, CAUSAL, GELU, SHIFT, LAST = {code!r}
"""
_LOOP = """
def train(c):
    torch.manual_seed(c["seed"])
    net = Net(c)
    if c["init_std"]:
        nn.init.normal_(net.head.weight, std=c["init_std"])
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
    options = {"betas": (c["beta1"], c["beta2"])} if c["optimizer"] == "adamw" else {"momentum": c["momentum"]}
    optimizer = kinds[c["optimizer"]](net.parameters(), lr=c["lr"], weight_decay=c["decay"], **options)
    rate = lambda n: min(1.0, (n + 1) / c["warmup"]) if c["warmup"] else 1.0
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    g = torch.Generator().manual_seed(c["data_seed"])
    for step in range(c["steps"]):
        for _ in range(c["accumulate"]):
            x, y = batch(c, g)
            out = net(x)
            loss = F.cross_entropy(out.flatten(0, -2), y, label_smoothing=c["smoothing"], reduction=c["reduction"])
            (loss / c["accumulate"]).backward()
        if c["clip"] and step >= c["clip_from"]:
            nn.utils.clip_grad_norm_(net.parameters(), c["clip"])
        optimizer.step()
        warm.step()
        if step % c["zero_every"] == 0:
            optimizer.zero_grad()
"""
DEFAULTS: dict[str, Any] = {
    "seed": 0, "data_seed": 1, "width": 8, "padding": "zeros", "bn_momentum": 0.1, "eps": 1e-05, "bias": True,
    "dropout": 0.0, "scale": 1.0, "init_std": 0.0, "optimizer": "adamw", "beta1": 0.9, "beta2": 0.999, "momentum": 0.9,
    "lr": 0.01, "decay": 0.0, "warmup": 0, "steps": 8, "accumulate": 1, "smoothing": 0.0, "reduction": "mean",
    "clip": 0.0, "clip_from": 0, "zero_every": 1,
}  # fmt: skip
#: Constants of the code, by name.
CODE = {"pool": "max", "causal": True, "gelu": "none", "shift": True, "last": True}


def source(net: str, code: dict[str, Any] | None = None) -> str:
    """Return the source of a training."""
    values = tuple({**CODE, **(code or {})}.values())
    return f"{_HEAD.format(code=values)}{NETS[net]}{_LOOP}"
