"""A classifier whose losses are written with operators: torch's author calls the library, paddle's writes it out.

Labels are noisy, and some are to be ignored (-1). SGD with momentum.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults

INPUTS, WIDTH, CLASSES, SMOOTHING = 10, 20, 6, 0.1
WEIGHTS = (1.0, 0.5, 2.0, 1.5, 1.0, 0.8)


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(INPUTS, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(T.gelu(self.norm(self.up(x))))


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.first, self.ln, self.out = (
            paddle.nn.Linear(INPUTS, WIDTH),
            paddle.nn.LayerNorm(WIDTH),
            paddle.nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x):
        return self.out(P.gelu(self.ln(self.first(x))))


def loss_ours(outputs, batch, fault):
    keep = (batch["y"] >= 0).float()
    rows = T.cross_entropy(outputs, batch["y"].clamp(min=0), reduction="none", label_smoothing=SMOOTHING)
    return (rows * keep).sum() / keep.sum()


def loss_theirs(outputs, batch, fault):
    labels, keep = batch["y"], (batch["y"] >= 0).astype("float32")
    hot = P.one_hot(labels.clip(min=0), CLASSES)
    if fault == "no_smoothing":
        target = hot
    elif fault == "smoothing_of_others":
        target = hot * (1 - SMOOTHING) + (1 - hot) * SMOOTHING / (CLASSES - 1)
    elif fault == "smoothing_larger":
        target = hot * 0.8 + 0.2 / CLASSES
    else:
        target = hot * (1 - SMOOTHING) + SMOOTHING / CLASSES
    if fault == "temperature":
        outputs = outputs / 2.0
    logs = P.log_softmax(outputs, axis=0 if fault == "softmax_axis" else -1)
    if fault == "softmax_twice":
        logs = P.log_softmax(P.softmax(outputs), axis=-1)
    rows = -(target * logs).sum(-1)
    if fault == "weights_added":
        rows = rows * paddle.to_tensor(WEIGHTS, "float32")[labels.clip(min=0)]
    if fault == "focal":
        rows = rows * (1 - paddle.exp(-rows)) ** 2
    if fault == "mean_over_all":
        return (rows * keep).mean()
    if fault == "ignored_counted":
        return rows.mean()
    if fault == "summed":
        return (rows * keep).sum()
    if fault == "mask_inverted":
        return (rows * (1 - keep)).sum() / (1 - keep).sum()
    loss = (rows * keep).sum() / keep.sum()
    if fault == "penalty":
        loss = loss + 0.01 * (outputs**2).mean()
    if fault == "z_loss":
        loss = loss + 1e-2 * (paddle.logsumexp(outputs, -1) ** 2).mean()
    if fault == "doubled":
        loss = 2 * loss
    return loss


def data(rng, n):
    found = []
    for _ in range(n):
        y = rng.integers(0, CLASSES, 18)
        y[rng.permutation(18)[:4]] = -1
        found.append({"x": rng.standard_normal((18, INPUTS)).astype("float32"), "y": y})
    return found


RECIPE = Recipe("sgd", 0.1, momentum=0.9)

PROGRAM = Program(
    "own_losses",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, lambda name: name.replace("first", "up").replace("ln", "norm").replace("out.", "head.")),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("no_smoothing", "loss", "", "smoothing", (r"smoothing",)),
        Fault("smoothing_of_others", "loss", "", "smoothing", (r"smoothing",)),
        Fault("smoothing_larger", "loss", "", "smoothing", (r"smoothing",)),
        Fault("temperature", "loss", "", "temperature|scale", (r"temperature", r"0\.5|half", r"divided by 2")),
        Fault("softmax_axis", "loss", "", "axis", (r"axis",)),
        Fault("softmax_twice", "loss", "", "softmax", (r"softmax",)),
        Fault("weights_added", "loss", "", "weight", (r"class weights?", r"weights of (the )?classes", r"weighs classes")),
        Fault("focal", "loss", "", "focal", (r"focal",)),
        Fault("mean_over_all", "loss", "", "ignored|reduction|ratio|mask", (r"ignored", r"\b14\b", r"\b18\b", r"reduction")),
        Fault("ignored_counted", "loss", "", "ignored|mask", (r"ignored", r"mask")),
        Fault("summed", "loss", "", "reduction|ratio", (r"reduction", r"\bsum", r"\b14\b")),
        Fault("mask_inverted", "loss", "", "mask|ignored", (r"mask", r"ignored")),
        Fault("penalty", "loss", "", "penalty|term|regular", (r"penalty", r"square", r"term")),
        Fault("z_loss", "loss", "", "z_loss|term", (r"z.loss", r"logsumexp", r"term")),
        Fault("doubled", "loss", "", "ratio|scale", (r"\b2\b", r"doubl", r"twice", r"factor|ratio")),
        *faults(RECIPE, "labels_rolled", "clip_added"),
    ),
    clean=(Clean("twin"), Clean("other_seed", seed=2)),
)  # fmt: skip
