"""Embeddings, averaged without the padding, with two linear layers; binary labels, Adam."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld

WORDS, WIDTH, LENGTH, LABELS = 50, 16, 10, 6


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.project = torch.nn.Linear(WIDTH, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.classify = torch.nn.Linear(24, LABELS)

    def forward(self, tokens, weights):
        kept = (tokens != 0).float() * weights
        mean = (self.embedding(tokens) * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)
        return self.classify(T.gelu(self.norm(self.project(mean))))


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.table = paddle.nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.body = paddle.nn.Sequential(
            paddle.nn.Linear(WIDTH, 24),
            paddle.nn.LayerNorm(24, epsilon=1e-3 if fault == "layernorm_eps" else 1e-5),
            paddle.nn.GELU(approximate=fault == "gelu_tanh_layer"),
        )
        self.logits = paddle.nn.Linear(24, LABELS)

    def forward(self, tokens, weights):
        fault = self.fault
        x = self.table(tokens)
        kept = paddle.cast(tokens != 0, "float32")
        if fault != "no_word_weights":
            kept = kept * weights
        if fault == "mean_over_pads":
            pooled = (x * kept.unsqueeze(-1)).mean(1)
        elif fault == "sum_for_mean":
            pooled = (x * kept.unsqueeze(-1)).sum(1)
        elif fault == "max_for_mean":
            pooled = (x - 1e4 * (1 - paddle.cast(kept > 0, "float32")).unsqueeze(-1)).max(1)
        elif fault == "first_word":
            pooled = x[:, 0]
        elif fault == "rows_normalised":
            pooled = (P.normalize(x, axis=-1) * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True)
        elif self.variant == "matmul":
            shares = kept / kept.sum(1, keepdim=True)
            pooled = paddle.matmul(shares.unsqueeze(1), x).squeeze(1)
        else:
            pooled = (x * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True)
        if fault == "detached":
            pooled = pooled.detach()
        y = self.body[0](pooled)
        if fault == "bias_twice":
            y = y + self.body[0].bias
        y = y if fault == "no_norm" else self.body[1](y)
        y = P.relu(y) if fault == "relu_for_gelu" else self.body[2](y)
        return self.logits(P.dropout(y, 0.2) if fault == "dropout_functional" else y)


def loss_ours(outputs, batch, fault):
    return T.binary_cross_entropy_with_logits(outputs, batch["y"])


def loss_theirs(outputs, batch, fault):
    if fault == "loss_positive_weight":
        return P.binary_cross_entropy_with_logits(outputs, batch["y"], pos_weight=paddle.full([LABELS], 2.0))
    if fault == "loss_sum":
        return P.binary_cross_entropy_with_logits(outputs, batch["y"], reduction="none").sum(1).mean()
    if fault == "sigmoid_twice":
        return P.binary_cross_entropy_with_logits(P.sigmoid(outputs), batch["y"])
    return P.binary_cross_entropy(P.sigmoid(outputs), batch["y"])


_NAMES = {"table.": "embedding.", "body.0.": "project.", "body.1.": "norm.", "logits.": "classify."}


def names(name):
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


def data(rng, n):
    made = []
    for _ in range(n):
        tokens = rng.integers(1, WORDS, (12, LENGTH)) * (rng.integers(3, LENGTH + 1, 12)[:, None] > range(LENGTH))
        weights = rng.uniform(0.5, 1.5, (12, LENGTH)).astype("float32")
        y = (rng.random((12, LABELS)) < 0.3).astype("float32")
        made.append({"tokens": tokens.astype("int64"), "weights": weights, "y": y})
    return made


RECIPE = Recipe("adam", 5e-3, decay=1e-3, betas=(0.9, 0.99))

PROGRAM = Program(
    "bag",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("tokens", "weights"),
    faults=(
        Fault("layernorm_eps", "forward", r"body\.1", "eps", (r"eps",), declared=True),
        Fault("gelu_tanh_layer", "forward", r"body\.2|logits", "gelu|activation|setting", (r"approximate", r"gelu", r"tanh"), declared=True, fine=True),
        Fault("no_word_weights", "forward", r"body(\.0)?", "scale|mean|weight|unused", (r"unused", r"weight", r"mean", r"factor|scale")),
        Fault("mean_over_pads", "forward", r"body(\.0)?", "mean|pad|mask|ratio", (r"pad", r"mask", r"mean", r"row-wise|each row")),
        Fault("sum_for_mean", "forward", r"body(\.0)?", "mean|sum|ratio|scale", (r"\bsum", r"mean", r"row-wise|each row")),
        Fault("max_for_mean", "forward", r"body(\.0)?", "max|mean|pool|reduction", (r"\bmax", r"mean", r"pool")),
        Fault("first_word", "forward", r"body(\.0)?", "mean|pool|first|reduction", (r"first", r"mean", r"pool")),
        Fault("rows_normalised", "forward", r"body(\.0)?|table", "norm", (r"norm",)),
        Fault("detached", "backward|grad", r"table(\.weight)?|body.*", "detach|missing", (r"detach", r"no gradient|does not reach|not part")),
        Fault("bias_twice", "forward", r"body\.[01]|body", "bias", (r"bias",)),
        Fault("no_norm", "forward", r"body\.[12]|body|logits", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm")),
        Fault("relu_for_gelu", "forward", r"body\.2|logits", "activation", (r"relu", r"gelu", r"activation")),
        Fault("dropout_functional", "forward", r"logits", "dropout", (r"[Dd]ropout",)),
        Fault("loss_positive_weight", "loss", "", "weight", (r"pos_weight|positive", r"class weights?|weight")),
        Fault("loss_sum", "loss", "", "reduction|ratio|sum", (r"\bsum", r"\b6\b", r"reduction")),
        Fault("sigmoid_twice", "loss", "", "sigmoid|activation", (r"sigmoid",)),
        *faults(
            RECIPE, "rate", "beta1", "beta2", "adam_eps", "adam_eps_fine", "decay_missing", "decay_ten", "rule_sgd",
            "skip", "forget", "stale", "clamp", "rows", "labels_rolled", "clip_added", "next_batch",
        ),
        frozen(r"body\.1", r"body\.1(\.(weight|bias))?"),
        unheld(r"table", r"table(\.weight)?"),
        restarted(r"logits\.weight", r"logits(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("matmul", variant="matmul", seed=3),
        Clean("no_decay", start={"decay": 0.0}, seed=4),
        Clean("decoupled_by_hand", start={"rule": "adamw", "decay": 0.05}, recipe={"style": "by_hand"}, seed=5),
    ),
)  # fmt: skip
