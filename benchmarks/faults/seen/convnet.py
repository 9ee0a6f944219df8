"""A small convolutional net with BatchNorm; smoothed labels, Nesterov, cosine schedule."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted
from torch import nn


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(3, 2, 1),
        )  # fmt: skip
        self.classifier = nn.Linear(16 * 9, 5)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        mode = "replicate" if fault == "padding_mode" else "zeros"
        self.conv1 = paddle.nn.Conv2D(3, 8, 3, padding=1, padding_mode=mode)
        self.bn1 = paddle.nn.BatchNorm2D(8, epsilon=1e-2 if fault == "bn_eps" else 1e-5)
        self.conv2 = paddle.nn.Conv2D(8, 16, 3, padding=1, bias_attr=False)
        momentum = 0.1 if fault == "bn_momentum" else 0.9
        self.bn2 = paddle.nn.BatchNorm2D(
            16, momentum=momentum, use_global_stats=True if fault == "global_stats" else None
        )
        self.pool = paddle.nn.AvgPool2D(3, 2, 1, exclusive=fault == "exclusive")
        self.fc = paddle.nn.Linear(16 * 9, 5)
        if variant == "layers":
            self.act, self.down = paddle.nn.ReLU(), paddle.nn.MaxPool2D(2)

    def forward(self, x):
        fault = self.fault
        if fault == "bn_eval":
            self.bn1.eval()
        if self.variant == "layers":
            x = self.down(self.act(self.bn1(self.conv1(x))))
            return self.fc(self.pool(self.act(self.bn2(self.conv2(x)))).flatten(1))
        x = self.bn1(self.conv1(x))
        x = F.max_pool2d(F.relu6(x * 3) if fault == "relu6" else F.relu(x), 2)
        y = self.conv2(x)
        y = y if fault == "no_norm" else self.bn2(y)
        y = F.elu(y) if fault == "elu_for_relu" else F.relu(y)
        y = self.pool(y)
        if fault == "flatten_order":
            y = y.transpose([0, 2, 3, 1])
        return self.fc(y.flatten(1))


def loss_ours(outputs, batch, fault):
    return nn.functional.cross_entropy(outputs, batch["y"], label_smoothing=0.1)


def loss_theirs(outputs, batch, fault):
    if fault == "no_smoothing":
        return F.cross_entropy(outputs, batch["y"])
    if fault == "smoothing_larger":
        return F.cross_entropy(outputs, batch["y"], label_smoothing=0.2)
    return F.cross_entropy(outputs, batch["y"], label_smoothing=0.1)


_NAMES = {
    "conv1.": "features.0.",
    "bn1.": "features.1.",
    "conv2.": "features.4.",
    "bn2.": "features.5.",
    "fc.": "classifier.",
}


def names(name):
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


def data(rng, n):
    return [
        {"x": rng.standard_normal((8, 3, 12, 12)).astype("float32") + 0.5, "y": rng.integers(0, 5, 8).astype("int64")}
        for _ in range(n)
    ]


RECIPE = Recipe(rate=0.05, momentum=0.9, nesterov=True, decay=1e-2, schedule="cosine")

PROGRAM = Program(
    "convnet",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("padding_mode", "forward", "conv1", "padding|setting", (r"padding",), declared=True),
        Fault("bn_eps", "forward", "bn1", "eps", (r"eps",), declared=True),
        Fault("bn_momentum", "weight|forward|update", r"bn2(\..*)?", "momentum|running", (r"momentum", r"running"), 0, 1, declared=True),
        Fault("global_stats", "forward", "bn2", "stat|eval|mode", (r"running stat", r"batch stat", r"global", r"\beval\b"), declared=True),
        Fault("bn_eval", "forward", "bn1", "stat|eval|mode", (r"running stat", r"batch stat", r"\beval\b", r"train(ing)? (mode|flag)")),
        Fault("exclusive", "forward", r"pool", "exclusive|pool|setting", (r"exclusive|count_include_pad", r"padd"), declared=True),
        Fault("elu_for_relu", "forward", r"pool|bn2", "activation", (r"\belu\b", r"activation", r"relu"), ),
        Fault("relu6", "forward", r"bn1|conv2|down", "activation|ratio", (r"relu6", r"activation", r"\b3\b")),
        Fault("no_norm", "forward", r"bn2|pool|conv2", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm"), ),
        Fault("flatten_order", "forward", r"fc", "order|flatten|permut", (r"flatten", r"order", r"permut", r"transpos")),
        Fault("no_smoothing", "loss", "", "smoothing", (r"smoothing",)),
        Fault("smoothing_larger", "loss", "", "smoothing", (r"smoothing",)),
        *faults(
            RECIPE, "rate_tenth", "momentum", "no_nesterov", "decay_ten", "schedule_late", "schedule_per_epoch",
            "twice", "reload", "offset", "channels", "flipped", "swapped_batches", "clip_added",
        ),
        frozen(r"bn1\.weight", r"bn1(\.weight)?"),
        restarted(r"conv2\.weight", r"conv2(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=5),
        Clean("layers_for_functions", variant="layers", seed=2),
        Clean("schedule_by_function", recipe={"style": "lambda"}, seed=3),
        Clean("clipped", start={"clip": "norm", "limit": 0.5}, seed=4),
    ),
)  # fmt: skip
