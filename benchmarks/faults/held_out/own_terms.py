"""Multi-label targets and a teacher; both losses written with operators. SGD, losses not logged."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults

INPUTS, WIDTH, LABELS = 9, 18, 5


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(INPUTS, WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, WIDTH))
        self.tags, self.value = torch.nn.Linear(WIDTH, LABELS), torch.nn.Linear(WIDTH, LABELS)

    def forward(self, x):
        x = self.body(x)
        return self.tags(x), self.value(x)


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.one, self.two = paddle.nn.Linear(INPUTS, WIDTH), paddle.nn.Linear(WIDTH, WIDTH)
        self.tag_head, self.value_head = paddle.nn.Linear(WIDTH, LABELS), paddle.nn.Linear(WIDTH, LABELS)

    def forward(self, x):
        x = self.two(P.silu(self.one(x)))
        return self.tag_head(x), self.value_head(x)


def loss_ours(outputs, batch, fault):
    tags, values = outputs
    y, teacher = batch["y"], batch["teacher"]
    found = (T.softplus(tags) - y * tags).mean()
    soft = torch.softmax(teacher / 2, -1)
    apart = (soft * (soft.log() - T.log_softmax(values / 2, -1))).sum(-1).mean()
    return found + 0.5 * 4 * apart


def loss_theirs(outputs, batch, fault):
    tags, values = outputs
    y, teacher = batch["y"], batch["teacher"]
    found = P.softplus(tags) - y * tags
    if fault == "positives_weighed":
        found = found + 2 * y * P.softplus(-tags)
    if fault == "sum_of_labels":
        found = found.sum(-1)
    if fault == "sigmoid_before":
        p = P.sigmoid(tags)
        found = P.softplus(p) - y * p
    found = found.mean()
    heat = {"temperature_one": 1.0, "temperature_larger": 4.0}.get(fault, 2.0)
    soft = P.softmax(teacher / heat, -1)
    logs = P.log_softmax(values / heat, -1)
    if fault == "teacher_axis":
        soft = P.softmax(teacher / heat, 0)
    if fault == "turned":
        apart = (logs.exp() * (logs - soft.log())).sum(-1).mean()
    elif fault == "mean_of_elements":
        apart = (soft * (soft.log() - logs)).mean()
    else:
        apart = (soft * (soft.log() - logs)).sum(-1).mean()
    if fault == "no_teacher":
        return found
    if fault == "no_square":
        return found + 0.5 * apart
    if fault == "share":
        return found + 0.25 * 4 * apart
    return found + 0.5 * 4 * apart


def data(rng, n):
    return [
        {
            "x": rng.standard_normal((12, INPUTS)).astype("float32"),
            "y": (rng.random((12, LABELS)) < 0.4).astype("float32"),
            "teacher": 2 * rng.standard_normal((12, LABELS)).astype("float32"),
        }
        for _ in range(n)
    ]


RECIPE = Recipe("sgd", 0.1, momentum=0.9)


def names(name):
    for own, other in (("one.", "body.0."), ("two.", "body.2."), ("tag_head", "tags"), ("value_head", "value")):
        name = name.replace(own, other)
    return name


PROGRAM = Program(
    "own_terms",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    shown=False,
    faults=(
        Fault("positives_weighed", "loss", "", "weight|term", (r"weigh", r"pos_weight", r"term")),
        Fault("sum_of_labels", "loss", "", "reduction|ratio|scale", (r"reduction", r"\bsum", r"\b5\b")),
        Fault("sigmoid_before", "loss", "", "sigmoid", (r"sigmoid",)),
        Fault("temperature_one", "loss", "", "temperature|scale|number", (r"temperature", r"\b2\b.*\b1\b", r"div\(")),
        Fault("temperature_larger", "loss", "", "temperature|scale|number", (r"temperature", r"\b4\b", r"div\(")),
        Fault("teacher_axis", "loss", "", "axis", (r"axis",)),
        Fault("turned", "loss", "", "kl|order|turned|direction", (r"other way|order|direction|exchang|reverse",)),
        Fault("mean_of_elements", "loss", "", "reduction|ratio", (r"reduction", r"\bmean", r"\b5\b")),
        Fault("no_teacher", "loss|backward|grad", "", "term|auxiliary", (r"term", r"left out", r"no gradient")),
        Fault("no_square", "loss", "", "scale|ratio|number", (r"\b4\b", r"0\.25", r"0\.5", r"scale")),
        Fault("share", "loss", "", "scale|ratio|number|weight", (r"0\.25", r"0\.5", r"scale")),
        *faults(RECIPE, "momentum", "labels_rolled"),
    ),
    clean=(Clean("twin"), Clean("other_seed", seed=2)),
)  # fmt: skip
