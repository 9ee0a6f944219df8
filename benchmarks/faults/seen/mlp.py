"""A plain classifier: linear layers, ReLU and Tanh, SGD with momentum."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F  # noqa: N812
import torch
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(20, 32)
        self.fc2 = torch.nn.Linear(32, 32)
        self.fc3 = torch.nn.Linear(32, 32)
        self.out = torch.nn.Linear(32, 6)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.tanh(self.fc2(x))
        x = torch.nn.functional.leaky_relu(self.fc3(x), 0.1)
        return self.out(x)


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        nn, self.fault = paddle.nn, fault
        self.net = nn.Sequential(
            nn.Linear(20, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU() if fault == "relu_for_tanh" else nn.Tanh(),
            nn.Linear(32, 32),
            nn.LeakyReLU(0.01 if fault == "slope" else 0.1),
        )
        self.drop = (
            nn.Dropout(0.3 if fault == "dropout" else 0.0) if variant == "dropout" or fault == "dropout" else None
        )
        self.head = nn.Linear(32, 6)

    def forward(self, x):
        if self.fault == "no_activation":
            x = self.net[2](self.net[0](x))
            x = self.net[5](self.net[4](self.net[3](x)))
        else:
            x = self.net(x)
        if self.drop is not None:
            x = self.drop(x)
        if self.fault == "bfloat16_here":
            x = x.astype("bfloat16").astype("float32")
        if self.fault == "no_bias":
            return F.linear(x, self.head.weight)
        return self.head(x)


def loss_ours(outputs, batch, fault):
    return torch.nn.functional.cross_entropy(outputs, batch["y"])


def loss_theirs(outputs, batch, fault):
    if fault == "loss_sum":
        return F.cross_entropy(outputs, batch["y"], reduction="sum")
    if fault == "softmax_before":
        return F.cross_entropy(F.softmax(outputs), batch["y"])
    if fault == "smoothing_added":
        return F.cross_entropy(outputs, batch["y"], label_smoothing=0.1)
    if fault == "loss_weights":
        return F.cross_entropy(outputs, batch["y"], weight=paddle.to_tensor([1.0, 2.0, 0.5, 1.0, 3.0, 0.7]))
    return F.cross_entropy(outputs, batch["y"])


_NAMES = {"net.0.": "fc1.", "net.2.": "fc2.", "net.4.": "fc3.", "head.": "out."}


def names(name):
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


def data(rng, n):
    return [
        {"x": rng.standard_normal((16, 20)).astype("float32"), "y": rng.integers(0, 6, 16).astype("int64")}
        for _ in range(n)
    ]


RECIPE = Recipe(rate=0.1, momentum=0.9, decay=5e-3, schedule="step")

PROGRAM = Program(
    "mlp",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("relu_for_tanh", "forward", r"net(\.[234])?", "activation", (r"relu", r"tanh", r"activation")),
        Fault("slope", "forward", r"net(\.[456])?|head", "slope|activation|setting", (r"slope", r"0\.01")),
        Fault("no_activation", "forward", r"net(\.[0123])?", "activation", (r"activation", r"relu", r"not called|never calls")),
        Fault("dropout", "forward", r"drop|head", "dropout", (r"[Dd]ropout",)),
        Fault("bfloat16_here", "forward", r"head|net|net\.5", "bfloat16|precision|dtype", (r"bfloat16", r"precision"), fine=True),
        Fault("no_bias", "forward", r"head|\(root\)", "bias", (r"\bbias",)),
        Fault("loss_sum", "loss|backward", "", "reduction|ratio|scale", (r"reduction", r"\bsum", r"\b16\b")),
        Fault("softmax_before", "loss|backward", "", "softmax", (r"softmax",)),
        Fault("smoothing_added", "loss|backward", "", "smoothing", (r"smoothing",)),
        Fault("loss_weights", "loss|backward", "", "weight", (r"class weights?", r"weights of (the )?classes")),
        *faults(
            RECIPE, "rate", "momentum", "momentum_missing", "nesterov", "decay_missing", "decay_ten", "schedule_late",
            "schedule_half", "schedule_per_epoch", "skip", "twice", "forget", "stale", "scaled", "rows", "next_batch",
            "labels_rolled", "clip_added",
        ),
        frozen(r"net\.2\.weight", r"net\.2(\.weight)?"),
        unheld(r"net\.4\.bias", r"net\.4(\.bias)?"),
        restarted(r"net\.4\.weight", r"net\.4(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=3),
        Clean("zero_dropout", variant="dropout", seed=5),
        Clean("no_decay", start={"decay": 0.0, "nesterov": True}, seed=6),
        Clean("schedule_by_function", recipe={"style": "lambda"}, seed=4),
    ),
)  # fmt: skip
