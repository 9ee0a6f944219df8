"""A language model whose output matrix is its embedding, twice in torch; accumulation, Adam, ignored labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn

WORDS, WIDTH, LENGTH = 36, 20, 8


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.embed.weight

    def forward(self, tokens):
        states, _ = self.rnn(self.embed(tokens) * WIDTH**0.5)
        return self.decoder(self.norm(states))


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.table = nn.Embedding(WORDS, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.ln = nn.LayerNorm(WIDTH, eps=1e-3 if fault == "ln_eps" else 1e-5)
        if variant == "functional":
            self.out_bias = nn.Parameter(torch.zeros(WORDS))
        else:
            self.out = nn.Linear(WIDTH, WORDS)
            self.out.weight = nn.Parameter(torch.zeros(WORDS, WIDTH)) if fault == "untied" else self.table.weight

    def forward(self, tokens):
        fault = self.fault
        factor = {"no_embedding_scale": 1.0, "embedding_scale_width": WIDTH}.get(fault, WIDTH**0.5)
        x = self.table(tokens) * factor
        if fault == "word_dropout":
            x = F.dropout(x, 0.1)
        if fault == "state_kept":
            states, last = self.gru(x)
            states, _ = self.gru(x, last)
        else:
            states, _ = self.gru(x)
        if fault == "residual_added":
            states = states + x
        y = states if fault == "no_norm" else self.ln(states)
        if fault == "shifted_states":
            y = y.roll(1, 1)
        if (
            fault not in ("output_detached", "input_detached", "normed_rows", "no_bias")
            and self.variant != "functional"
        ):
            return self.out(y)
        weight = self.table.weight
        if fault == "output_detached":
            weight = weight.detach()
        if fault == "input_detached":
            y = y.detach()
        if fault == "normed_rows":
            weight = F.normalize(weight, dim=-1)
        return F.linear(y, weight, None if fault == "no_bias" else self.out_bias if self.variant else self.out.bias)


def loss_ours(outputs, batch, fault):
    return F.cross_entropy(outputs.float().flatten(0, 1), batch["y"].flatten(), ignore_index=-1)


def loss_theirs(outputs, batch, fault):
    scores, y = outputs.float().transpose(1, 2), batch["y"]
    if fault == "ignored_counted":
        return F.cross_entropy(scores, y, ignore_index=-1, reduction="sum") / y.numel()
    if fault == "ignored_as_label":
        return F.cross_entropy(scores, y.clamp(min=0))
    if fault == "smoothing_added":
        return F.cross_entropy(scores, y, ignore_index=-1, label_smoothing=0.05)
    if fault == "z_loss":
        return F.cross_entropy(scores, y, ignore_index=-1) + 1e-2 * scores.logsumexp(1).square().mean()
    if fault == "labels_shifted":
        return F.cross_entropy(scores[:, :, :-1], y[:, 1:], ignore_index=-1)
    if fault == "mean_of_sequences":
        each = F.cross_entropy(scores, y, ignore_index=-1, reduction="none")
        return (each.sum(1) / (y >= 0).sum(1)).mean()
    return F.cross_entropy(scores, y, ignore_index=-1)


def names(name):
    name = name.replace("table.", "embed.").replace("gru.", "rnn.").replace("ln.", "norm.")
    return (
        name.replace("out.weight", "embed.weight")
        .replace("out_bias", "decoder.bias")
        .replace("out.bias", "decoder.bias")
    )


def data(rng, n):
    made = []
    for _ in range(n):
        tokens = rng.integers(0, WORDS, (5, LENGTH + 1)).astype("int64")
        y = tokens[:, 1:].copy()
        y[rng.random(y.shape) < 0.25] = -1
        y[:, 0] = tokens[:, 1]
        made.append({"tokens": tokens[:, :-1].copy(), "y": y})
    return made


RECIPE = Recipe("adam", 4e-3, accumulate=3, schedule="warmup")

PROGRAM = Program(
    "tied",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("tokens",),
    faults=(
        Fault("ln_eps", "forward", r"ln", "eps", (r"eps",), declared=True),
        Fault("untied", "weight|grad|update", r"(table|out|\(root\))(\.weight)?", "tied|shared", (r"\b(un)?tied", r"shared", r"once|twice"), declared=True),
        Fault("no_embedding_scale", "forward", r"gru|table", "scale|factor|ratio", (r"4\.47|0\.22", r"scale|factor|sqrt|ratio")),
        Fault("embedding_scale_width", "forward", r"gru|table", "scale|factor|ratio", (r"4\.47", r"scale|factor|sqrt|ratio")),
        Fault("word_dropout", "forward", r"gru|table", "dropout", (r"[Dd]ropout",)),
        Fault("state_kept", "forward", r"gru|ln", "state|call|twice", (r"state", r"call", r"twice")),
        Fault("residual_added", "forward", r"ln", "residual|add", (r"residual", r"\badd", r"skip connection")),
        Fault("no_norm", "forward", r"ln|\(root\)|out", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm")),
        Fault("shifted_states", "forward", r"\(root\)|out", "shift|roll|order", (r"shift|roll", r"order|permut")),
        Fault("output_detached", "grad", r"table(\.weight)?", "detach|tied|shared|once", (r"detach", r"tied|shared|once")),
        Fault("input_detached", "backward|grad", r"ln.*|gru.*|table.*", "detach|missing", (r"detach", r"no gradient")),
        Fault("normed_rows", "forward", r"\(root\)|out", "norm|scale", (r"norm", r"column|row|channel|scale")),
        Fault("no_bias", "forward|grad", r"\(root\)|out(\.bias)?", "bias|unused", (r"bias", r"unused")),
        Fault("ignored_counted", "loss", "", "ignored|ratio|reduction", (r"ignore", r"counted", r"all (rows|labels)")),
        Fault("ignored_as_label", "loss", "", "ignored|label", (r"ignore", r"label")),
        Fault("smoothing_added", "loss", "", "smoothing", (r"smoothing",)),
        Fault("z_loss", "loss", "", "auxiliary|loss|added", (r"auxiliary|another term|added",)),
        Fault("labels_shifted", "loss", "", "label|shift|target", (r"label", r"shift", r"target")),
        Fault("mean_of_sequences", "loss", "", "reduction|weight|mean", (r"reduction", r"weight", r"mean")),
        *faults(
            RECIPE, "rate", "beta1", "beta2", "beta2_fine", "adam_eps", "uncorrected", "undivided", "micro_missing",
            "schedule_late", "schedule_half", "schedule_per_epoch", "skip", "twice", "forget", "reload", "clip_added",
            "rule_sgd", "swapped_batches", undivided={"rule": "sgd", "rate": 0.2},
        ),
        frozen(r"gru\.bias_hh_l0", r"gru(\.bias_hh_l0)?"),
        unheld(r"ln\.weight", r"ln(\.weight)?"),
        restarted(r"gru\.weight_hh", r"gru(\.weight_hh_l0)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("functional_head", variant="functional", seed=3),
        Clean("own_rule", recipe={"style": "own_rule"}, seed=4),
        Clean("clipped", start={"clip": "norm", "limit": 0.2}, recipe={"style": "own_clip"}, seed=5),
    ),
)  # fmt: skip
