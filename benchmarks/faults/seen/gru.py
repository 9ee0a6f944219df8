"""A GRU over sequences; the candidate's cell is written by hand, with one matrix for all gates. RMSProp, no clipping."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults

INPUTS, WIDTH, LENGTH, CLASSES = 5, 11, 6, 4


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(INPUTS, WIDTH, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        _, last = self.gru(x)
        return self.head(last[0])


class Memory(paddle.nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.weight_ih = self.create_parameter([3 * WIDTH, INPUTS])
        self.weight_hh = self.create_parameter([3 * WIDTH, WIDTH])
        self.bias_ih = self.create_parameter([3 * WIDTH], is_bias=True)
        self.bias_hh = self.create_parameter([3 * WIDTH], is_bias=True)

    def forward(self, x):
        fault = self.fault
        h = paddle.zeros([x.shape[0], WIDTH])
        if fault == "starts_at_one":
            h = h + 1.0
        for t in range(x.shape[1]):
            if fault == "cut_each_step":
                h = h.detach()
            if fault == "cut_at_half" and t == LENGTH // 2:
                h = h.detach()
            given = P.linear(x[:, t], self.weight_ih.T, self.bias_ih)
            kept = P.linear(h, self.weight_hh.T, None if fault == "no_hidden_bias" else self.bias_hh)
            a, b, c = given.chunk(3, -1)
            d, e, f = kept.chunk(3, -1)
            reset, update = P.sigmoid(a + d), P.sigmoid(b + e)
            if fault == "gates_swapped":
                reset, update = update, reset
            new = c + f if fault == "never_reset" else c + reset * f
            if fault == "reset_first":
                new = c + P.linear(reset * h, self.weight_hh.T[:, 2 * WIDTH :], self.bias_hh[2 * WIDTH :])
            new = P.relu(new) if fault == "relu_for_tanh" else paddle.tanh(new)
            if fault == "hard_gate":
                update = P.hardsigmoid(b + e)
            if fault == "update_turned":
                h = (1 - update) * h + update * new
            elif fault == "residual_missing":
                h = (1 - update) * new
            else:
                h = (1 - update) * new + update * h
        return h


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.library = variant == "library"
        self.cell = paddle.nn.GRU(INPUTS, WIDTH) if self.library else Memory(fault)
        self.fault, self.out = fault, paddle.nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        if self.fault == "reversed":
            x = x.flip(1)
        last = self.cell(x)[1][0] if self.library else self.cell(x)
        return self.out(last)


def loss_ours(outputs, batch, fault):
    return torch.nn.functional.cross_entropy(outputs, batch["y"])


def loss_theirs(outputs, batch, fault):
    return P.cross_entropy(outputs, batch["y"])


def names(name):
    name = name.replace("out.", "head.")
    if name.startswith("cell."):
        last = name.split(".")[-1]
        return f"gru.{last}" if last.endswith("_l0") else f"gru.{last}_l0"
    return name


def data(rng, n):
    return [
        {"x": rng.standard_normal((8, LENGTH, INPUTS)).astype("float32"), "y": rng.integers(0, CLASSES, 8)}
        for _ in range(n)
    ]


RECIPE = Recipe("adam", 3e-3)

PROGRAM = Program(
    "gru",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("starts_at_one", "forward", r"cell", "start|state|initial", (r"initial state", r"starts? (at|from)", r"state")),
        Fault("cut_each_step", "backward|grad", r"cell(\..*)?", "detach|trunc", (r"detach", r"truncat")),
        Fault("cut_at_half", "backward|grad", r"cell(\..*)?", "detach|trunc", (r"detach", r"truncat")),
        Fault("no_hidden_bias", "forward|backward|grad", r"cell(\..*)?", "bias|unused|gradient", (r"bias",)),
        Fault("gates_swapped", "forward", r"cell", "gate|order", (r"gate", r"order", r"swap|exchang")),
        Fault("never_reset", "forward", r"cell", "gate|reset", (r"reset", r"gate")),
        Fault("reset_first", "forward", r"cell", "gate|reset", (r"reset",)),
        Fault("relu_for_tanh", "forward", r"cell", "activation|gate", (r"ReLU", r"tanh", r"activation")),
        Fault("hard_gate", "forward", r"cell", "activation|gate", (r"hard.?sigmoid", r"activation")),
        Fault("update_turned", "forward", r"cell", "gate|update|order", (r"update", r"gate", r"swap|exchang|other way")),
        Fault("residual_missing", "forward", r"cell", "branch|residual|gate|term", (r"residual|branch", r"state", r"left out|missing")),
        Fault("reversed", "forward|input", r"cell|\(root\)", "order|direction|revers|flip", (r"revers", r"direction", r"order|flip")),
        *faults(RECIPE, "beta2", "rows"),
    ),
    clean=(Clean("twin"), Clean("library", variant="library", seed=3)),
)  # fmt: skip
