"""Residual blocks with BatchNorm, twice in torch; SGD with groups, a step schedule."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn


class Block(nn.Module):
    def __init__(self, inp, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if inp != out:
            self.downsample = nn.Sequential(nn.Conv2d(inp, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.layer1, self.layer2, self.layer3 = Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1)
        self.fc = nn.Linear(16, 7)

    def forward(self, x):
        x = torch.relu(self.bn(self.stem(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


class ConvNorm(nn.Sequential):
    def __init__(self, inp, out, size, stride=1):
        super().__init__()
        self.add_module("c", nn.Conv2d(inp, out, size, stride, size // 2, bias=False))
        self.add_module("n", nn.BatchNorm2d(out))


class Residual(nn.Module):
    def __init__(self, inp, out, stride, fault):
        super().__init__()
        self.fault = fault
        self.a, self.b = ConvNorm(inp, out, 3, stride), ConvNorm(out, out, 3)
        self.short = ConvNorm(inp, out, 1, stride) if inp != out else nn.Identity()
        self.act = nn.ReLU(inplace=False)

    def forward(self, x):
        y = self.b(self.a(x) if self.fault == "no_inner_relu" else self.act(self.a(x)))
        if self.fault == "no_residual":
            return self.act(y)
        if self.fault == "relu_before_add":
            return self.act(y) + self.short(x)
        if self.fault == "residual_scaled":
            return self.act(0.5 * y + self.short(x))
        if self.fault == "residual_detached":
            return self.act(y + self.short(x).detach())
        return self.act(y + self.short(x))


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault = fault
        self.entry = ConvNorm(3, 8, 3)
        where = {
            "no_residual": 0,
            "no_inner_relu": 1,
            "relu_before_add": 2,
            "residual_scaled": 2,
            "residual_detached": 2,
        }
        shapes = [(8, 8, 1), (8, 16, 2), (16, 16, 1)]
        self.trunk = nn.ModuleList(
            Residual(*shape, fault if where.get(fault) == k else "") for k, shape in enumerate(shapes)
        )
        self.act = nn.ReLU()
        self.gap = nn.AdaptiveAvgPool2d(1) if variant == "pool" else None
        self.logits = nn.Linear(16, 7)
        if fault == "bn_momentum":
            self.trunk[1].a.n.momentum = 0.5
        if fault == "stride_one":
            self.trunk[1].b.c.dilation = (2, 2)
            self.trunk[1].b.c.padding = (2, 2)

    def forward(self, x):
        if self.fault == "norm_eval":
            self.trunk[2].b.n.eval()
        x = self.entry(x)
        if self.fault == "bfloat16_here":
            x = x.bfloat16().float()
        x = self.act(x)
        for block in self.trunk:
            x = block(x)
        if self.fault == "max_for_mean":
            return self.logits(x.amax((2, 3)))
        return self.logits(self.gap(x).flatten(1) if self.gap is not None else F.adaptive_avg_pool2d(x, 1).flatten(1))


def loss_ours(outputs, batch, fault):
    return F.cross_entropy(outputs.float(), batch["y"])


def loss_theirs(outputs, batch, fault):
    scores = F.log_softmax(outputs.float(), 1)
    if fault == "loss_focal":
        return (-(1 - scores.exp()) * scores).gather(1, batch["y"][:, None]).mean()
    if fault == "loss_halved":
        return 0.5 * F.nll_loss(scores, batch["y"])
    return F.nll_loss(scores, batch["y"])


def names(name):
    name = name.replace("entry.c.", "stem.").replace("entry.n.", "bn.").replace("logits.", "fc.")
    for k in range(3):
        name = name.replace(f"trunk.{k}.", f"layer{k + 1}.")
    for old, new in {".a.c.": ".conv1.", ".a.n.": ".bn1.", ".b.c.": ".conv2.", ".b.n.": ".bn2."}.items():
        name = name.replace(old, new)
    return name.replace("short.c.", "downsample.0.").replace("short.n.", "downsample.1.")


def data(rng, n):
    return [
        {"x": rng.standard_normal((8, 3, 10, 10)).astype("float32"), "y": rng.integers(0, 7, 8).astype("int64")}
        for _ in range(n)
    ]


RECIPE = Recipe(rate=0.05, momentum=0.9, decay=2e-2, norms=False, schedule="step")
_RESIDUAL = (r"residual", r"shortcut|skip connection", r"missing.*add|add.*missing")

PROGRAM = Program(
    "resnet",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("no_residual", "forward", r"trunk\.0(\.act)?|trunk\.1(\.a(\.c)?|\.short(\.c)?)?", "residual|missing", _RESIDUAL),
        Fault("no_inner_relu", "forward", r"trunk\.1(\.act|\.b|\.b\.c)?", "activation|missing", (r"activation", r"relu", r"not called")),
        Fault("relu_before_add", "forward", r"trunk\.2(\.act)?|logits", "activation|residual|order", (r"activation", r"relu", r"order")),
        Fault("residual_scaled", "forward", r"trunk\.2(\.act)?|logits", "scale|factor|residual|ratio", (*_RESIDUAL, r"0\.5", r"scale|factor")),
        Fault("residual_detached", "backward|grad", r"trunk\.[012].*|entry.*|act", "detach|residual|missing", (r"detach", *_RESIDUAL)),
        Fault("bn_momentum", "weight|forward|update", r"trunk\.1\.a(\.n(\..*)?)?", "momentum|running", (r"momentum",), 0, 1, declared=True),
        Fault("stride_one", "forward", r"trunk\.1\.b(\.c)?", "dilation|padding|setting", (r"dilation", r"padding"), declared=True),
        Fault("norm_eval", "forward", r"trunk\.2\.b(\.n)?", "stat|eval|mode", (r"running stat", r"batch stat", r"\beval\b")),
        Fault("bfloat16_here", "forward", r"act|entry|trunk\.0(\.a(\.c)?)?", "bfloat16|precision|dtype", (r"bfloat16", r"precision"), fine=True),
        Fault("max_for_mean", "forward", r"gap|logits", "pool|reduction", (r"\bmax|amax", r"pool", r"\bmean")),
        Fault("loss_focal", "loss", "", "loss|weight", (r"focal", r"weight", r"loss function")),
        Fault("loss_halved", "loss", "", "ratio|scale|reduction", (r"0\.5", r"half|halved", r"ratio|factor")),
        *faults(
            RECIPE, "rate", "momentum", "dampening", "nesterov", "decay_missing", "decay_on_norms", "schedule_half",
            "skip", "forget", "stale", "clamp", "average", "offset", "rows", "labels_rolled",
        ),
        frozen(r"entry\.c", r"entry(\.c(\.weight)?)?"),
        unheld(r"logits\.bias", r"logits(\.bias)?"),
        restarted(r"trunk\.1\.short\.c", r"trunk\.1\.short(\.c(\.weight)?)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("pool_layer", variant="pool", seed=3),
        Clean("foreach", recipe={"style": "foreach"}, seed=4),
        Clean("own_rule", recipe={"style": "own_rule"}, seed=5),
    ),
)  # fmt: skip
