"""A tagger of padded sequences, both losses written with operators, in one framework; losses are not logged. AdamW."""

from __future__ import annotations

import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults

WORDS, WIDTH, LENGTH, TAGS = 23, 16, 9, 7


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(WORDS, WIDTH)
        self.conv = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = torch.nn.Linear(WIDTH, TAGS)

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(torch.relu(self.conv(x.transpose(1, 2)).transpose(1, 2)) + x)


class Candidate(torch.nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.mix = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.out = torch.nn.Linear(WIDTH, TAGS)

    def forward(self, ids):
        x = self.words(ids)
        y = self.mix(x.permute(0, 2, 1)).relu().permute(0, 2, 1)
        return self.out(x + y)


def loss_ours(outputs, batch, fault):
    mask = (batch["ids"] != 0).float()
    logs = outputs - outputs.logsumexp(-1, keepdim=True)
    picked = logs.gather(-1, batch["y"].unsqueeze(-1)).squeeze(-1)
    return -(picked * mask).sum() / mask.sum()


def loss_theirs(outputs, batch, fault):
    ids, labels = batch["ids"], batch["y"]
    mask = ids.ne(0).to(outputs.dtype)
    if fault == "labels_shifted":
        outputs, labels, mask = outputs[:, :-1], labels[:, 1:], mask[:, 1:]
    if fault == "mask_shifted":
        mask = torch.roll(mask, 1, 1)
    if fault == "last_left_out":
        mask = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    logs = T.log_softmax(outputs, -1)
    if fault == "probabilities":
        logs = torch.softmax(outputs, -1)
    losses = -torch.take_along_dim(logs, labels[..., None], -1)[..., 0]
    if fault == "mean_of_sequences":
        return ((losses * mask).sum(1) / mask.sum(1)).mean()
    if fault == "mean_over_pads":
        return (losses * mask).mean()
    if fault == "pads_counted":
        return losses.mean()
    if fault == "sum_of_sequences":
        return (losses * mask).sum() / len(ids)
    if fault == "squared":
        losses = losses**2
    if fault == "confidence":
        return (losses * mask).sum() / mask.sum() - 0.1 * (logs.exp() * logs * -mask[..., None]).sum() / mask.sum()
    if fault == "entropy_of_all":
        return (-(logs.mean(-1)) * mask).sum() / mask.sum() * 0.1 + 0.9 * (losses * mask).sum() / mask.sum()
    if fault == "detached":
        worst = losses.detach().amax()
        return (losses * mask).sum() / mask.sum() / worst
    return (losses * mask).sum() / mask.sum()


def data(rng, n):
    found = []
    for _ in range(n):
        ids = rng.integers(1, WORDS, (6, LENGTH))
        for row, length in enumerate(rng.integers(3, LENGTH + 1, 6)):
            ids[row, length:] = 0
        found.append({"ids": ids, "y": rng.integers(0, TAGS, (6, LENGTH))})
    return found


RECIPE = Recipe("adamw", 3e-3, decay=0.05)

PROGRAM = Program(
    "masked_tokens",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, lambda name: name.replace("words", "emb").replace("mix", "conv").replace("out.", "head.")),
    RECIPE,
    data,
    ("ids",),
    shown=False,
    faults=(
        Fault("labels_shifted", "loss", "", "label|shift|position", (r"label", r"shift", r"place")),
        Fault("mask_shifted", "loss", "", "mask|shift", (r"mask",)),
        Fault("last_left_out", "loss", "", "mask|shift", (r"mask", r"left out")),
        Fault("probabilities", "loss", "", "log|softmax", (r"softmax", r"\blog")),
        Fault("mean_of_sequences", "loss", "", "reduction|mean", (r"each (sequence|row)", r"mean of", r"per.sequence", r"reduction")),
        Fault("mean_over_pads", "loss", "", "mean_over_pads|reduction|mask|ratio", (r"pad", r"all places", r"\b54\b", r"mask")),
        Fault("pads_counted", "loss", "", "mean_over_pads|mask", (r"pad", r"mask")),
        Fault("sum_of_sequences", "loss", "", "reduction|ratio", (r"\b6\b", r"reduction", r"\bsum")),
        Fault("squared", "loss", "", "square|power|pow", (r"square", r"power", r"pow\(")),
        Fault("confidence", "loss", "", "term|entropy", (r"entropy", r"term")),
        Fault("entropy_of_all", "loss", "", "smoothing|term", (r"smoothing",)),
        Fault("detached", "loss", "", "ratio|divid|scale", (r"divid", r"ratio|factor", r"div\(")),
        *faults(RECIPE, "labels_rolled"),
    ),
    clean=(Clean("twin"), Clean("other_seed", seed=2)),
)  # fmt: skip
