"""A two-layer LSTM by hand against the library's, both in torch, and a head over the mean of the kept places. AdamW."""

from __future__ import annotations

import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults

INPUTS, WIDTH, LENGTH, CLASSES = 6, 9, 7, 3


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.LSTM(INPUTS, WIDTH, batch_first=True)
        self.two = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x, keep):
        x = self.two(self.one(x)[0])[0]
        keep = keep.unsqueeze(-1)
        return self.head((x * keep).sum(1) / keep.sum(1))


class Layer(torch.nn.Module):
    def __init__(self, inputs, fault):
        super().__init__()
        self.fault = fault
        self.weight_ih_l0 = torch.nn.Parameter(torch.empty(4 * WIDTH, inputs))
        self.weight_hh_l0 = torch.nn.Parameter(torch.empty(4 * WIDTH, WIDTH))
        self.bias_ih_l0 = torch.nn.Parameter(torch.empty(4 * WIDTH))
        self.bias_hh_l0 = torch.nn.Parameter(torch.empty(4 * WIDTH))

    def forward(self, x):
        fault = self.fault
        h, c = x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), WIDTH)
        found = []
        for t in range(x.shape[1]):
            if fault == "truncated" and t and t % 3 == 0:
                h, c = h.detach(), c.detach()
            if fault == "only_memory_cut":
                c = c.detach()
            z = T.linear(x[:, t], self.weight_ih_l0, self.bias_ih_l0) + T.linear(h, self.weight_hh_l0, self.bias_hh_l0)
            i, f, g, o = z.split(WIDTH, 1)
            if fault == "order_of_gates":
                i, f = f, i
            if fault == "order_of_output":
                f, o = o, f
            i, f, o = i.sigmoid(), f.sigmoid(), o.sigmoid()
            if fault == "coupled_gates":
                f = 1 - i
            if fault == "forget_bias":
                f = (z.split(WIDTH, 1)[1] + 1).sigmoid()
            g = g.sigmoid() if fault == "sigmoid_candidate" else g.tanh()
            c = f * c + i * g
            h = o * (c if fault == "no_tanh" else c.tanh())
            found.append(h)
        return torch.stack(found, 1)


class Candidate(torch.nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault = fault
        self.low, self.high, self.out = Layer(INPUTS, ""), Layer(WIDTH, fault), torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x, keep):
        x = self.high(self.low(x))
        if self.fault == "mean_over_pads":
            return self.out(x.mean(1))
        if self.fault == "last_place":
            return self.out(x[:, -1])
        if self.fault == "largest":
            return self.out(x.amax(1))
        return self.out((x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


def loss_ours(outputs, batch, fault):
    return T.cross_entropy(outputs, batch["y"])


def loss_theirs(outputs, batch, fault):
    rows = outputs.logsumexp(-1) - outputs.gather(-1, batch["y"][:, None])[:, 0]
    if fault == "rows_summed":
        return rows.sum()
    if fault == "margin":
        rows = (outputs.logsumexp(-1) - outputs.gather(-1, batch["y"][:, None])[:, 0] + 0.2).relu()
    if fault == "halved":
        return 0.5 * rows.mean()
    return rows.mean()


def names(name):
    return name.replace("low.", "one.").replace("high.", "two.").replace("out.", "head.")


def data(rng, n):
    found = []
    for _ in range(n):
        keep = (np_arange() < rng.integers(3, LENGTH + 1, 8)[:, None]).astype("float32")
        x = rng.standard_normal((8, LENGTH, INPUTS)).astype("float32")
        found.append({"x": x, "keep": keep, "y": rng.integers(0, CLASSES, 8)})
    return found


def np_arange():
    import numpy as np

    return np.arange(LENGTH)[None]


RECIPE = Recipe("adamw", 3e-3, decay=0.05)

PROGRAM = Program(
    "long_memory",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x", "keep"),
    faults=(
        Fault("truncated", "backward|grad", r"(high|low)(\..*)?", "detach|trunc", (r"detach", r"truncat")),
        Fault("only_memory_cut", "backward|grad", r"(high|low)(\..*)?", "detach|trunc", (r"detach", r"truncat")),
        Fault("order_of_gates", "forward", r"high", "gate|order", (r"gate", r"order")),
        Fault("order_of_output", "forward", r"high", "gate|order", (r"gate", r"order")),
        Fault("coupled_gates", "forward", r"high", "gate", (r"gate",)),
        Fault("forget_bias", "forward", r"high", "bias|gate", (r"bias", r"gate")),
        Fault("sigmoid_candidate", "forward", r"high", "activation|gate", (r"sigmoid", r"activation")),
        Fault("no_tanh", "forward", r"high", "activation|gate", (r"tanh", r"activation")),
        Fault("mean_over_pads", "forward", r"out", "mean_over_pads|mask", (r"pad", r"mask", r"mean")),
        Fault("last_place", "forward", r"out", "position|last|reduction", (r"last", r"position|place")),
        Fault("largest", "forward", r"out", "reduction|max", (r"max", r"largest", r"reduction")),
        Fault("rows_summed", "loss", "", "reduction|ratio|sum", (r"reduction", r"\bsum", r"\b8\b")),
        Fault("margin", "loss", "", "margin|offset|number|term", (r"0\.2", r"margin", r"relu", r"term")),
        Fault("halved", "loss", "", "ratio|scale", (r"0\.5", r"half", r"ratio|factor")),
        *faults(RECIPE, "decay_missing", "labels_rolled"),
    ),
    clean=(Clean("twin"), Clean("other_seed", seed=2)),
)  # fmt: skip
