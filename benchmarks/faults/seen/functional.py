"""Everything by functional calls, parameters in the module itself; RMSProp, twice in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_weight = nn.Parameter(0.3 * torch.randn(6, 2, 5))
        self.conv_bias = nn.Parameter(torch.zeros(6))
        self.gain, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.mix, self.mix_bias = nn.Parameter(0.2 * torch.randn(20, 30)), nn.Parameter(torch.zeros(20))
        self.gate = nn.Parameter(0.2 * torch.randn(20, 20))
        self.last, self.last_bias = nn.Parameter(0.2 * torch.randn(4, 20)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        y = F.conv1d(x, self.conv_weight, self.conv_bias, padding=2)
        y = F.group_norm(y, 2, self.gain, self.shift)
        y = F.max_pool1d(F.relu(y), 4).flatten(1)
        y = F.softplus(F.linear(y, self.mix, self.mix_bias))
        y = y * torch.sigmoid(F.linear(y, self.gate))
        return F.linear(y, self.last, self.last_bias)


_NAMES = dict(
    w1="conv_weight", b1="conv_bias", g="gain", s="shift", w2="mix", b2="mix_bias", wg="gate", w3="last", b3="last_bias"
)


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        shapes = dict(w1=(6, 2, 5), b1=(6,), g=(6,), s=(6,), w2=(20, 30), b2=(20,), wg=(20, 20), w3=(4, 20), b3=(4,))
        self.own = {}
        for short, shape in shapes.items():
            self.own[short] = short if variant == "renamed" else _NAMES[short]
            self.register_parameter(self.own[short], nn.Parameter(torch.zeros(shape)))

    def __getattr__(self, name):
        own = self.__dict__.get("own", {})
        return super().__getattr__(own.get(name, name))

    def normalised(self, y):
        fault = self.fault
        if fault == "no_norm":
            return y
        b, c, n = y.shape
        groups = 3 if fault == "groups" else 2
        z = y.float().reshape(b, groups, -1)
        z = (z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return z.reshape(b, c, n) * self.g[:, None] + (0 if fault == "no_shift" else self.s[:, None])

    def forward(self, x):
        fault = self.fault
        if self.variant == "library":
            y = F.group_norm(F.conv1d(x, self.w1, self.b1, padding=2), 2, self.g, self.s)
        else:
            x = F.pad(
                x,
                (1, 3) if fault == "padding_shifted" else (2, 2),
                "reflect" if fault == "padding_mode" else "constant",
            )
            conv_weight = self.w1.flip(-1) if fault == "kernel_flipped" else self.w1
            y = self.normalised(F.conv1d(x, conv_weight, self.b1))
        y = F.relu(y)
        y = F.avg_pool1d(y, 4) if fault == "avg_pool" else F.max_pool1d(y, 4)
        y = y.mT.flatten(1) if fault == "flatten_order" else y.flatten(1)
        y = F.linear(y, self.w2, None if fault == "no_bias" else self.b2)
        y = F.relu(y) if fault == "relu_for_softplus" else F.softplus(y, 2.0 if fault == "softplus_beta" else 1.0)
        if fault == "rounded":
            y = y.bfloat16().float()
        gate = y @ (self.wg if fault == "gate_transposed" else self.wg.mT)
        y = y * (torch.tanh(gate) if fault == "tanh_gate" else torch.sigmoid(gate))
        if fault == "gate_detached":
            y = y.detach() + 0 * y
        return y @ self.w3.mT + self.b3


def loss_ours(outputs, batch, fault):
    return F.kl_div(F.log_softmax(outputs.float(), -1), batch["y"], reduction="batchmean")


def loss_theirs(outputs, batch, fault):
    scores = F.log_softmax(outputs.float() / (2.0 if fault == "loss_temperature" else 1.0), -1)
    if fault == "loss_mean":
        return F.kl_div(scores, batch["y"], reduction="mean")
    if fault == "loss_reversed":
        return (scores.exp() * (scores - batch["y"].log())).sum(-1).mean()
    if fault == "loss_cross_entropy":
        return -(batch["y"] * scores).sum(-1).mean()
    return (batch["y"] * (batch["y"].log() - scores)).sum(-1).mean()


def names(name):
    return _NAMES.get(name, name)


def data(rng, n):
    made = []
    for _ in range(n):
        y = rng.dirichlet([1.0] * 4, 8) * 0.96 + 0.01
        made.append({"x": rng.standard_normal((8, 2, 20)).astype("float32"), "y": y.astype("float32")})
    return made


RECIPE = Recipe("rmsprop", 2e-3, momentum=0.5, decay=1e-2)
_HERE = r"\(root\)|"

PROGRAM = Program(
    "functional",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("no_norm", "forward", _HERE, "norm|missing", (r"norm",)),
        Fault("groups", "forward", _HERE, "group|norm", (r"group", r"norm")),
        Fault("no_shift", "forward|grad", r"\(root\)(\.shift)?|shift", "bias|shift|unused", (r"bias|shift", r"unused")),
        Fault("padding_shifted", "forward", _HERE, "pad|shift", (r"pad", r"shift|roll")),
        Fault("padding_mode", "forward", _HERE, "pad", (r"pad",)),
        Fault("kernel_flipped", "forward", _HERE, "flip|revers|order", (r"flip|revers", r"order")),
        Fault("avg_pool", "forward", _HERE, "pool", (r"pool", r"\bmax|mean|average")),
        Fault("flatten_order", "forward", _HERE, "order|permut|flatten|transpos", (r"order|permut|transpos", r"flatten")),
        Fault("no_bias", "forward|grad", r"\(root\)(\.mix_bias)?|mix_bias", "bias|unused", (r"bias",)),
        Fault("relu_for_softplus", "forward", _HERE, "activation", (r"relu", r"softplus", r"activation")),
        Fault("softplus_beta", "forward", _HERE, "activation|beta|softplus", (r"softplus", r"beta")),
        Fault("rounded", "forward", _HERE, "bfloat16|precision|dtype", (r"bfloat16", r"precision"), fine=True),
        Fault("gate_transposed", "forward", _HERE, "transpos", (r"transpos",)),
        Fault("tanh_gate", "forward", _HERE, "activation|gate", (r"tanh", r"sigmoid", r"activation")),
        Fault("gate_detached", "backward|grad", r".*", "detach|missing|unused", (r"detach", r"no gradient", r"zero")),
        Fault("loss_temperature", "loss", "", "temperature|scale", (r"temperature", r"scale|factor|divided")),
        Fault("loss_mean", "loss", "", "reduction|ratio", (r"reduction", r"mean", r"0\.25|\b4\b")),
        Fault("loss_reversed", "loss", "", "order|loss|kl", (r"revers|swapp|order", r"loss function is another")),
        Fault("loss_cross_entropy", "loss", "", "loss|entropy", (r"cross.entropy", r"entropy", r"loss function is another")),
        *faults(
            RECIPE, "rate", "alpha", "momentum", "momentum_missing", "adam_eps", "decay_missing", "decay_ten", "rule_adam",
            "skip", "forget", "stale", "clamp", "scaled", "flipped", "rows", "next_batch", "clip_added",
        ),
        frozen(r"gate", r"gate|\(root\)\.gate|\(root\)"),
        unheld(r"last_bias", r"last_bias|\(root\)\.last_bias|\(root\)"),
        restarted(r"mix$", r"mix|\(root\)\.mix|\(root\)"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("library", variant="library", seed=3),
        Clean("renamed", variant="renamed", seed=6),
        Clean("foreach", recipe={"style": "foreach"}, seed=4),
        Clean("adam_by_hand", start={"rule": "adam"}, recipe={"style": "own_rule"}, seed=5),
    ),
)  # fmt: skip
