"""An LSTM over sequences of numbers; the candidate's cell is written by hand. Adam, clipped by value."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted

INPUTS, WIDTH, LENGTH = 6, 12, 7


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.LSTM(INPUTS, WIDTH, batch_first=True)
        self.dense = torch.nn.Linear(WIDTH, WIDTH)
        self.out = torch.nn.Linear(WIDTH, 3)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.out(torch.tanh(self.dense(states[:, -1])))


class Cell(paddle.nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.weight_ih = self.create_parameter([4 * WIDTH, INPUTS])
        self.weight_hh = self.create_parameter([4 * WIDTH, WIDTH])
        self.bias_ih = self.create_parameter([4 * WIDTH], is_bias=True)
        self.bias_hh = self.create_parameter([4 * WIDTH], is_bias=True)

    def forward(self, x):
        fault = self.fault
        h = c = paddle.zeros([x.shape[0], WIDTH])
        states = []
        order = range(x.shape[1] - 1, -1, -1) if fault == "reversed" else range(x.shape[1])
        for t in order:
            z = x[:, t] @ self.weight_ih.T + h @ self.weight_hh.T + self.bias_ih
            if fault != "one_bias":
                z = z + self.bias_hh
            i, f, g, o = paddle.split(z, 4, -1)
            if fault == "gate_order":
                g, o = o, g
            if fault == "forget_bias":
                f = f + 1.0
            g = P.sigmoid(g) if fault == "sigmoid_for_tanh" else paddle.tanh(g)
            c = P.sigmoid(f) * c + P.sigmoid(i) * g
            h = P.sigmoid(o) * (c if fault == "no_output_tanh" else paddle.tanh(c))
            if fault == "state_detached":
                h = h.detach() if t < x.shape[1] - 1 else h
            states.append(h)
        return paddle.stack(states, 1)


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.cell = paddle.nn.LSTM(INPUTS, WIDTH) if variant == "library" else Cell(fault)
        self.hidden, self.head = paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Linear(WIDTH, 3)

    def forward(self, x):
        if self.fault == "time_first":
            x = x.transpose([1, 0, 2]).reshape(x.shape)
        states = self.cell(x)[0] if self.variant == "library" else self.cell(x)
        last = states[:, -1]
        if self.fault == "first_state":
            last = states[:, 0]
        if self.fault == "mean_state":
            last = states.mean(1)
        y = self.hidden(last)
        y = y if self.fault == "no_tanh" else paddle.tanh(y)
        if self.fault == "rounded":
            y = y.astype("float16").astype("float32")
        return self.head(y)


def loss_ours(outputs, batch, fault):
    return T.mse_loss(outputs, batch["y"])


def loss_theirs(outputs, batch, fault):
    if fault == "loss_l1":
        return P.l1_loss(outputs, batch["y"])
    if fault == "loss_smooth_l1":
        return P.smooth_l1_loss(outputs, batch["y"])
    if fault == "loss_half":
        return 0.5 * P.mse_loss(outputs, batch["y"])
    if fault == "loss_sum_of_row":
        return ((outputs - batch["y"]) ** 2).sum(-1).mean()
    return ((outputs - batch["y"]) ** 2).mean()


def names(name):
    name = name.replace("hidden.", "dense.").replace("head.", "out.")
    if name.startswith("cell."):
        last = name.split(".")[-1]
        return f"rnn.{last}" if last.endswith("_l0") else f"rnn.{last}_l0"
    return name


def data(rng, n):
    return [
        {
            "x": rng.standard_normal((10, LENGTH, INPUTS)).astype("float32"),
            "y": rng.standard_normal((10, 3)).astype("float32"),
        }
        for _ in range(n)
    ]


RECIPE = Recipe("adam", 3e-3, clip="value", limit=0.02)

PROGRAM = Program(
    "lstm",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("reversed", "forward", r"cell", "order|direction|revers|flip", (r"revers", r"direction", r"order|flip")),
        Fault("one_bias", "forward|backward|grad", r"cell(\..*)?", "bias|unused", (r"bias",)),
        Fault("gate_order", "forward", r"cell", "gate|order", (r"gate", r"order")),
        Fault("forget_bias", "forward", r"cell", "bias|gate", (r"bias", r"gate")),
        Fault("sigmoid_for_tanh", "forward", r"cell", "activation|gate", (r"sigmoid", r"tanh", r"activation")),
        Fault("no_output_tanh", "forward", r"cell", "activation|gate", (r"tanh", r"activation")),
        Fault("state_detached", "backward|grad", r"cell(\..*)?", "detach|trunc", (r"detach", r"no gradient")),
        Fault("time_first", "forward", r"cell", "order|axis|permut|batch", (r"time|batch", r"ax[ei]s", r"order|permut|transpos")),
        Fault("first_state", "forward", r"hidden", "position|last|state|order", (r"\blast", r"first", r"position|state")),
        Fault("mean_state", "forward", r"hidden", "mean|last|state", (r"mean", r"\blast")),
        Fault("no_tanh", "forward", r"head", "activation", (r"tanh", r"activation")),
        Fault("rounded", "forward", r"head", "float16|precision|dtype", (r"float16", r"precision"), fine=True),
        Fault("loss_l1", "loss", "", "loss|l1", (r"\bl1\b", r"absolute")),
        Fault("loss_smooth_l1", "loss", "", "loss|l1|huber", (r"smooth", r"[Hh]uber", r"\bl1\b")),
        Fault("loss_half", "loss", "", "ratio|scale", (r"0\.5", r"half|halved", r"ratio|factor")),
        Fault("loss_sum_of_row", "loss", "", "ratio|reduction|sum", (r"\b3\b", r"reduction", r"\bsum")),
        *faults(
            RECIPE, "rate_tenth", "beta1", "beta2_fine", "adam_eps", "clip_missing", "clip_limit", "skip", "twice",
            "average", "scaled", "flipped", "swapped_batches", "labels_rolled",
        ),
        frozen(r"cell\.weight_hh", r"cell(\.weight_hh)?"),
        restarted(r"hidden\.weight", r"hidden(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("library", variant="library", seed=3),
        Clean("own_clip", recipe={"style": "own_clip"}, seed=4),
    ),
)  # fmt: skip
