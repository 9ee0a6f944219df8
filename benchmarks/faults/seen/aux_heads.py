"""A trunk with a main and an auxiliary head, twice in torch; two losses, SGD with momentum, clipped tensor by tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk1, self.trunk2 = nn.Linear(14, 24), nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.router = nn.Linear(24, 3)
        self.classes, self.values = nn.Linear(24, 5), nn.Linear(24, 2)

    def forward(self, x):
        x = F.silu(self.norm(self.trunk1(x)))
        x = x + F.silu(self.trunk2(x))
        shares = torch.softmax(self.router(x), -1)
        y = sum(shares[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))
        return self.classes(torch.tanh(y)), self.values(x), shares


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.body = nn.ModuleDict(
            {
                "a": nn.Linear(14, 24),
                "bn": nn.BatchNorm1d(
                    24, eps=1e-2 if fault == "bn_eps" else 1e-5, momentum=0.3 if fault == "bn_momentum" else 0.1
                ),
                "b": nn.Linear(24, 24),
            }
        )
        self.act = nn.SiLU()
        self.moe = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.gate = nn.Linear(24, 3)
        self.heads = nn.ModuleDict({"cls": nn.Linear(24, 5), "reg": nn.Linear(24, 2)})

    def forward(self, x):
        fault = self.fault
        if fault == "bn_eval":
            self.body["bn"].eval()
        y = self.body["a"](x)
        y = self.body["bn"](y)
        y = F.hardswish(y) if fault == "hardswish" else F.gelu(y) if fault == "gelu" else self.act(y)
        z = self.act(self.body["b"](y))
        y = z if fault == "no_residual" else y + (y if fault == "residual_twice" else 0) + z
        scores = self.gate(y)
        if fault == "gate_temperature":
            scores = scores / 2
        shares = scores.softmax(0 if fault == "gate_axis" else -1)
        if fault == "gate_sigmoid":
            shares = scores.sigmoid()
        if fault == "gate_top":
            top, _ = shares.max(-1, keepdim=True)
            shares = torch.where(shares == top, shares, 0.0)
        order = [1, 0, 2] if fault == "experts_swapped" else [0, 1, 2]
        if self.variant == "stacked":
            made = (torch.stack([e(y) for e in self.moe], 1) * shares[..., None]).sum(1)
        else:
            made = 0
            for k in order:
                made = (
                    made + shares[:, [order[k]]] * self.moe[k](y)
                    if order != [0, 1, 2]
                    else made + shares[:, [k]] * self.moe[k](y)
                )
        made = made if fault == "no_tanh" else made.tanh()
        if fault == "expert_unused":
            made = torch.tanh(sum(shares[:, [k]] * self.moe[k](y) for k in (0, 1)))
        side = y.detach() if fault == "side_detached" else made if fault == "side_after" else y
        return self.heads["cls"](made), self.heads["reg"](side), shares


def loss_ours(outputs, batch, fault):
    scores, values, shares = outputs
    spread = (shares.float().mean(0) - 1 / 3).square().sum()
    return F.cross_entropy(scores.float(), batch["y"]) + 0.3 * F.mse_loss(values.float(), batch["value"]) + 0.1 * spread


def loss_theirs(outputs, batch, fault):
    scores, values, shares = (part.float() for part in outputs)
    main = F.nll_loss(scores.log_softmax(-1), batch["y"])
    side = (values - batch["value"]).square().mean()
    spread = (shares.mean(0) - 1 / 3).pow(2).sum()
    if fault == "no_auxiliary":
        return main + 0.1 * spread
    if fault == "auxiliary_weight":
        return main + 0.5 * side + 0.1 * spread
    if fault == "no_spread":
        return main + 0.3 * side
    if fault == "class_weights":
        weights = torch.tensor([1.0, 2.0, 0.5, 1.5, 1.0])
        main = F.nll_loss(scores.log_softmax(-1), batch["y"], weights)
    return main + 0.3 * side + 0.1 * spread


_NAMES = {
    "body.a.": "trunk1.", "body.bn.": "norm.", "body.b.": "trunk2.", "moe.": "experts.", "gate.": "router.",
    "heads.cls.": "classes.", "heads.reg.": "values.",
}  # fmt: skip


def names(name):
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


def data(rng, n):
    return [
        {
            "x": rng.standard_normal((16, 14)).astype("float32"),
            "y": rng.integers(0, 5, 16).astype("int64"),
            "value": rng.standard_normal((16, 2)).astype("float32"),
        }
        for _ in range(n)
    ]


RECIPE = Recipe(
    rate=0.1,
    momentum=0.8,
    dampening=0.1,
    decay=5e-3,
    clip="tensor",
    limit=0.05,
    head=r"classes|heads\.cls",
    head_rate=0.5,
)

PROGRAM = Program(
    "aux_heads",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("bn_eps", "forward", r"body\.bn", "eps", (r"eps",), declared=True),
        Fault("bn_momentum", "weight|forward|update", r"body\.bn(\..*)?", "momentum|running", (r"momentum",), 0, 1, declared=True),
        Fault("bn_eval", "forward", r"body\.bn", "stat|eval|mode", (r"running stat", r"batch stat", r"\beval\b")),
        Fault("hardswish", "forward", r"act|body\.b", "activation", (r"hard", r"silu|swish", r"activation")),
        Fault("gelu", "forward", r"act|body\.b", "activation", (r"gelu", r"silu|swish", r"activation")),
        Fault("no_residual", "forward", r"gate", "residual|missing", (r"residual", r"skip connection", r"missing.*add|add.*missing")),
        Fault("residual_twice", "forward", r"gate", "residual|twice|add", (r"residual", r"twice|doubl", r"\badd")),
        Fault("gate_temperature", "forward", r"\(root\)|heads\.cls|gate", "scale|factor|temperature", (r"scale|factor|temperature", r"\b2\b|0\.5")),
        Fault("gate_axis", "forward", r"\(root\)|heads\.cls", "softmax|axis", (r"softmax", r"axis|dim")),
        Fault("gate_sigmoid", "forward", r"\(root\)|heads\.cls", "activation|softmax|sigmoid", (r"softmax", r"sigmoid", r"activation")),
        Fault("gate_top", "forward", r"\(root\)|heads\.cls", "top|zero|mask", (r"\btop|argmax|\bmax", r"zero", r"mask")),
        Fault("experts_swapped", "forward", r"moe.*|heads\.cls|\(root\)", "order|permut|swap", (r"order|permut|swapp",)),
        Fault("no_tanh", "forward", r"heads\.cls", "activation", (r"tanh", r"activation")),
        Fault("expert_unused", "forward|grad", r"heads\.cls|moe\.2.*|moe", "unused|missing", (r"unused", r"never call|not called", r"moe\.2")),
        Fault("side_detached", "backward|grad", r"act|body.*|gate", "detach|missing", (r"detach", r"no gradient", r"missing")),
        Fault("side_after", "forward", r"heads\.reg", "input|order|another", (r"input", r"another|other tensor")),
        Fault("no_auxiliary", "loss", "", "auxiliary|missing", (r"auxiliary", r"missing", r"another term")),
        Fault("auxiliary_weight", "loss", "", "auxiliary|weight|factor", (r"auxiliary", r"weight|factor")),
        Fault("no_spread", "loss", "", "auxiliary|missing", (r"auxiliary", r"missing", r"another term")),
        Fault("class_weights", "loss", "", "weight", (r"class weights?|weights of (the )?classes",)),
        *faults(
            RECIPE, "rate", "momentum_missing", "decay_missing", "decay_ten", "head_rate", "clip_missing", "clip_limit",
            "clip_by_value", "skip", "twice", "stale", "average", "reload", "offset", "rows", "labels_rolled",
        ),
        frozen(r"gate\.weight", r"gate(\.weight)?"),
        unheld(r"moe\.1", r"moe\.1(\.(weight|bias))?"),
        restarted(r"body\.b\.weight", r"body\.b(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("stacked", variant="stacked", seed=3),
        Clean("foreach", recipe={"style": "foreach"}, seed=4),
        Clean("own_rule", recipe={"style": "own_rule"}, seed=5),
    ),
    shown=False,
)  # fmt: skip
