"""A tagger with a recurrent cell written by hand against the library's, twice in torch; Adam, clipping by norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn

WORDS, WIDTH, STATE, TAGS, LENGTH = 40, 10, 12, 5, 6


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.shape = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.gru = nn.GRU(WIDTH, STATE, batch_first=True)
        self.norm = nn.LayerNorm(STATE)
        self.tags = nn.Linear(STATE, TAGS)

    def forward(self, words):
        x = self.embedding(words)
        x = x + torch.relu(self.shape(x.transpose(1, 2)).transpose(1, 2))
        states, _ = self.gru(x)
        return self.tags(self.norm(states))


class OwnGRU(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.weight_ih_l0, self.weight_hh_l0 = (
            nn.Parameter(torch.zeros(3 * STATE, WIDTH)),
            nn.Parameter(torch.zeros(3 * STATE, STATE)),
        )
        self.bias_ih_l0, self.bias_hh_l0 = nn.Parameter(torch.zeros(3 * STATE)), nn.Parameter(torch.zeros(3 * STATE))

    def forward(self, x):
        fault, h, states = self.fault, x.new_zeros(len(x), STATE), []
        if fault == "state_of_ones":
            h = torch.ones_like(h)
        steps = list(range(x.shape[1]))
        for t in steps[::-1] if fault == "backwards" else steps:
            given = F.linear(x[:, t], self.weight_ih_l0, self.bias_ih_l0).chunk(3, -1)
            kept = F.linear(h, self.weight_hh_l0, None if fault == "no_state_bias" else self.bias_hh_l0).chunk(3, -1)
            r, z = torch.sigmoid(given[0] + kept[0]), torch.sigmoid(given[1] + kept[1])
            if fault == "gate_order":
                r, z = z, r
            if fault == "reset_before":
                n = torch.tanh(given[2] + F.linear(r * h, self.weight_hh_l0[2 * STATE :], self.bias_hh_l0[2 * STATE :]))
            elif fault == "no_reset":
                n = torch.tanh(given[2] + kept[2])
            else:
                n = given[2] + r * kept[2]
                n = F.relu(n) if fault == "relu_for_tanh" else torch.tanh(n)
            h = z * n + (1 - z) * h if fault == "update_inverted" else (1 - z) * n + z * h
            if fault == "state_cut" and t == 2:
                h = h.detach()
            states.append(h)
        return torch.stack(states[::-1] if fault == "backwards" else states, 1)


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3 if fault == "padding_idx" else None)
        self.local = nn.Conv1d(
            WIDTH, WIDTH, 3, padding=1, padding_mode="circular" if fault == "padding_mode" else "zeros"
        )
        self.rnn = nn.GRU(WIDTH, STATE, batch_first=True) if variant == "library" else OwnGRU(fault)
        self.ln = nn.LayerNorm(STATE, eps=1e-3 if fault == "norm_eps" else 1e-5)
        self.scores = nn.Linear(STATE, TAGS)

    def forward(self, words):
        fault = self.fault
        x = self.words(words)
        if fault == "input_dropout":
            x = F.dropout(x, 0.15)
        y = self.local(x.mT).mT
        if fault == "causal_conv":
            y = F.conv1d(F.pad(x.mT, (2, 0)), self.local.weight, self.local.bias).mT
        y = y if fault == "no_relu" else y.relu()
        x = y if fault == "no_residual" else x.detach() + y if fault == "residual_detached" else x + y
        states = self.rnn(x)[0] if self.variant == "library" else self.rnn(x)
        if fault == "places_shifted":
            states = states.roll(1, 1)
        if fault == "rounded":
            states = states.bfloat16().to(states.dtype)
        return self.scores(states if fault == "no_norm" else self.ln(states))


def loss_ours(outputs, batch, fault):
    return F.cross_entropy(outputs.float().transpose(1, 2), batch["y"], ignore_index=0)


def loss_theirs(outputs, batch, fault):
    flat, y = outputs.float().reshape(-1, TAGS), batch["y"].reshape(-1)
    weights = torch.ones(TAGS)
    weights[0] = 1.0 if fault == "ignored_counted" else 0.0
    if fault == "class_weights":
        weights[2:] = torch.tensor([2.0, 0.5, 1.5])
    if fault == "softmax_before":
        flat = flat.softmax(-1)
    if fault == "loss_over_all":
        return F.cross_entropy(flat, y, weights, reduction="sum") / y.numel()
    if fault == "loss_sum":
        return F.cross_entropy(flat, y, weights, reduction="sum")
    if fault == "loss_squared":
        return F.mse_loss(flat.softmax(-1), F.one_hot(y, TAGS).float())
    return F.cross_entropy(flat, y, weights)


_NAMES = {"words.": "embedding.", "local.": "shape.", "rnn.": "gru.", "ln.": "norm.", "scores.": "tags."}


def names(name):
    for old, new in _NAMES.items():
        if name.startswith(old):
            return name.replace(old, new, 1)
    return name


def data(rng, n):
    return [
        {
            "words": rng.integers(0, WORDS, (7, LENGTH)).astype("int64"),
            "y": rng.integers(0, TAGS, (7, LENGTH)).astype("int64"),
        }
        for _ in range(n)
    ]


RECIPE = Recipe("adam", 5e-3, clip="norm", limit=0.4, decay=1e-3, head=r"tags|scores", head_rate=2.0)

PROGRAM = Program(
    "tagger",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("words",),
    faults=(
        Fault("state_of_ones", "forward", r"rnn", "state|start", (r"state", r"initial|start")),
        Fault("backwards", "forward", r"rnn", "order|direction|revers|flip", (r"revers|backward", r"direction", r"order|flip")),
        Fault("no_state_bias", "forward|grad", r"rnn(\..*)?", "bias|unused", (r"bias",)),
        Fault("gate_order", "forward", r"rnn", "gate|order", (r"gate", r"order")),
        Fault("reset_before", "forward", r"rnn", "gate|reset", (r"gate", r"reset")),
        Fault("no_reset", "forward", r"rnn", "gate|reset", (r"gate", r"reset")),
        Fault("relu_for_tanh", "forward", r"rnn", "activation", (r"relu", r"tanh", r"activation")),
        Fault("update_inverted", "forward", r"rnn", "gate|invert", (r"gate", r"invert")),
        Fault("state_cut", "backward|grad", r"rnn(\..*)?|local|words", "detach|trunc", (r"detach", r"no gradient", r"trunc")),
        Fault("padding_idx", "forward|grad", r"words(\.weight)?", "padding_idx|padding|setting", (r"padding_idx", r"row 3"), declared=True),
        Fault("padding_mode", "forward", r"local", "padding|setting", (r"padding", r"circular"), declared=True),
        Fault("norm_eps", "forward", r"ln", "eps", (r"eps",), declared=True),
        Fault("input_dropout", "forward", r"local|words|rnn", "dropout", (r"[Dd]ropout",)),
        Fault("causal_conv", "forward", r"rnn|local", "pad|shift|causal", (r"pad", r"shift|roll", r"causal")),
        Fault("no_relu", "forward", r"rnn|local", "activation|missing", (r"relu", r"activation")),
        Fault("no_residual", "forward", r"rnn", "residual|missing", (r"residual", r"skip connection", r"missing.*add|add.*missing")),
        Fault("residual_detached", "backward|grad", r"words(\.weight)?", "detach|residual|missing", (r"detach", r"residual", r"no gradient")),
        Fault("places_shifted", "forward", r"ln|rnn", "shift|roll|order", (r"shift|roll", r"order|permut")),
        Fault("rounded", "forward", r"ln|rnn", "bfloat16|precision|dtype", (r"bfloat16", r"precision"), fine=True),
        Fault("no_norm", "forward", r"scores|ln", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm")),
        Fault("ignored_counted", "loss", "", "ignored|label", (r"ignore", r"counted|label")),
        Fault("class_weights", "loss", "", "weight", (r"class weights?|weights of (the )?classes",)),
        Fault("softmax_before", "loss", "", "softmax", (r"softmax",)),
        Fault("loss_over_all", "loss", "", "ratio|ignored|reduction", (r"ignore", r"counted|all (rows|labels)", r"reduction")),
        Fault("loss_sum", "loss", "", "ratio|reduction|sum", (r"reduction", r"\bsum")),
        Fault("loss_squared", "loss", "", "loss", (r"mse|squared|mean square", r"loss function is another")),
        *faults(
            RECIPE, "rate", "beta1", "beta2", "beta2_fine", "adam_eps", "decay_missing", "decay_ten", "head_rate",
            "uncorrected", "clip_missing", "clip_limit", "clip_by_tensor", "skip", "twice", "forget", "reload",
            "swapped_batches", "rows", "labels_rolled",
        ),
        frozen(r"rnn\.weight_ih", r"rnn(\.weight_ih_l0)?"),
        unheld(r"local\.bias", r"local(\.bias)?"),
        restarted(r"rnn\.weight_hh", r"rnn(\.weight_hh_l0)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("library", variant="library", seed=3),
        Clean("own_rule", recipe={"style": "own_rule own_clip"}, seed=4),
        Clean("no_clip", start={"clip": "", "rule": "sgd", "rate": 0.2, "momentum": 0.9}, recipe={"style": "foreach"}, seed=5),
    ),
)  # fmt: skip
