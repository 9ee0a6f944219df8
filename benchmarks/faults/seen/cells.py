"""An LSTM cell of the library, called step by step by both authors; a value is told for each place. Adam."""

from __future__ import annotations

import paddle
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults

INPUTS, WIDTH, LENGTH = 4, 10, 6


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(INPUTS, WIDTH)
        self.cell = torch.nn.LSTMCell(WIDTH, WIDTH)
        self.out = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        h = c = torch.zeros(len(x), WIDTH)
        found = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            found.append(h)
        return self.out(torch.stack(found, 1)).squeeze(-1)


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault = fault
        self.given, self.step, self.told = (
            paddle.nn.Linear(INPUTS, WIDTH),
            paddle.nn.LSTMCell(WIDTH, WIDTH),
            paddle.nn.Linear(WIDTH, 1),
        )

    def forward(self, x):
        fault = self.fault
        x = paddle.tanh(self.given(x))
        h, c = paddle.zeros([x.shape[0], WIDTH]), paddle.zeros([x.shape[0], WIDTH])
        found = []
        for t in range(LENGTH):
            if fault == "detached_each" or (fault == "detached_once" and t == 3):
                h, c = h.detach(), c.detach()
            if fault == "memory_detached":
                c = c.detach()
            if fault == "lost_at_three" and t == 3:
                h, c = paddle.zeros_like(h), paddle.zeros_like(c)
            if fault == "memory_for_state":
                h, c = c, h
            now = x[:, max(t - 1, 0)] if fault == "input_late" else x[:, t]
            _, (h, c) = self.step(now, (h, c))
            if fault == "state_scaled":
                h = h * 0.9
            if fault == "residual":
                h = h + now
            found.append(c if fault == "memory_told" else h)
        y = paddle.stack(found, 1)
        if fault == "stacked_first":
            y = paddle.stack(found, 0).reshape(y.shape)
        return self.told(y).squeeze(-1)


def loss_ours(outputs, batch, fault):
    return T.smooth_l1_loss(outputs, batch["y"])


def loss_theirs(outputs, batch, fault):
    error = (outputs - batch["y"]).abs()
    if fault == "beta_half":
        return paddle.where(error < 0.5, error**2, error - 0.25).mean()
    if fault == "absolute":
        return error.mean()
    if fault == "no_half":
        return paddle.where(error < 1.0, error**2, error - 0.5).mean()
    return paddle.where(error < 1.0, 0.5 * error**2, error - 0.5).mean()


def data(rng, n):
    return [
        {
            "x": rng.standard_normal((8, LENGTH, INPUTS)).astype("float32"),
            "y": 2 * rng.standard_normal((8, LENGTH)).astype("float32"),
        }
        for _ in range(n)
    ]


RECIPE = Recipe("adam", 5e-3)

PROGRAM = Program(
    "cells",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, lambda name: name.replace("given", "embed").replace("step", "cell").replace("told", "out")),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("detached_each", "backward|grad", r"(step|given)(\..*)?", "detach|trunc", (r"detach", r"truncat")),
        Fault("detached_once", "backward|grad", r"(step|given)(\..*)?", "detach|trunc", (r"detach", r"truncat")),
        Fault("memory_detached", "backward|grad", r"(step|given)(\..*)?", "detach|trunc", (r"detach", r"truncat")),
        Fault("lost_at_three", "forward", r"step", "state|start|order", (r"state", r"zero")),
        Fault("memory_for_state", "forward", r"step", "state|order|input", (r"state", r"order|swap|exchang", r"other (layer|output)")),
        Fault("input_late", "forward", r"step", "shift|position|order", (r"shift", r"position|place", r"another step|number \d", r"row \d")),
        Fault("state_scaled", "forward", r"step|told", "scale|ratio", (r"0\.9", r"scal")),
        Fault("residual", "forward", r"step|told", "residual|branch|added|term", (r"added|residual|branch", r"add\(")),
        Fault("memory_told", "forward", r"told", "state|output|order", (r"state|memory|cell", r"output\.\d", r"other output")),
        Fault("stacked_first", "forward", r"told", "order|axis|permut|reshape", (r"ax[ei]s", r"order|permut|transpos")),
        Fault("beta_half", "loss", "", "beta|delta|threshold|loss", (r"\bbeta|delta|threshold", r"0\.5")),
        Fault("absolute", "loss", "", "loss|l1", (r"\bl1\b", r"absolute")),
        Fault("no_half", "loss", "", "scale|factor|loss", (r"0\.5|half|twice|\b2\b",)),
        *faults(RECIPE, "scaled"),
    ),
    clean=(Clean("twin"), Clean("other_seed", seed=4)),
)  # fmt: skip
