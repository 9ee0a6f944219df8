"""Source words into target words by cross attention; embedding scale, masks, ignored labels, Adam with decay."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted

WORDS, WIDTH, HEADS, SOURCE, TARGET = 32, 16, 2, 7, 6


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(WORDS, WIDTH)
        self.encoder = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.LayerNorm(WIDTH))
        self.query, self.key, self.value, self.merge = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.feed = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, WIDTH))
        self.vocabulary = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, src, tgt, mask):
        memory = self.encoder(self.source(src) * WIDTH**0.5)
        x = self.target(tgt) * WIDTH**0.5
        b, n, m = len(src), tgt.shape[1], src.shape[1]
        q = self.query(x).view(b, n, HEADS, -1).transpose(1, 2)
        k, v = (f(memory).view(b, m, HEADS, -1).transpose(1, 2) for f in (self.key, self.value))
        y = T.scaled_dot_product_attention(q, k, v, mask[:, None, None, :])
        x = self.norm(x + self.merge(y.transpose(1, 2).reshape(b, n, WIDTH)))
        return self.vocabulary(x + self.feed(x))


class CrossAttention(paddle.nn.Layer):
    def __init__(self, fault, fused):
        super().__init__()
        self.fault = fault
        self.q, self.o = paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Linear(WIDTH, WIDTH)
        self.kv = paddle.nn.Linear(WIDTH, 2 * WIDTH) if fused else None
        if not fused:
            self.k, self.v = paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory, mask):
        fault, size = self.fault, WIDTH // HEADS
        q = self.q(x)
        k, v = paddle.split(self.kv(memory), 2, -1) if self.kv is not None else (self.k(memory), self.v(memory))
        if fault == "query_scaled_twice":
            q = q / size**0.5
        q, k, v = (t.reshape([t.shape[0], t.shape[1], HEADS, size]).transpose([0, 2, 1, 3]) for t in (q, k, v))
        if fault == "heads_swapped":
            k = k.flip(1)
        scores = q @ k.transpose([0, 1, 3, 2])
        scores = scores if fault == "no_attention_scale" else scores / size**0.5
        hidden = (1.0 - paddle.cast(mask, "float32"))[:, None, None, :]
        if fault == "mask_added_small":
            scores = scores - 1.0 * hidden
        elif fault == "mask_inverted":
            scores = scores - 1e9 * (1 - hidden)
        elif fault != "mask_missing":
            scores = scores - 1e9 * hidden
        weights = P.softmax(scores, {"softmax_over_queries": -2, "softmax_over_heads": 1}.get(fault, -1))
        if fault == "mask_after_softmax":
            weights = P.softmax(q @ k.transpose([0, 1, 3, 2]) / size**0.5, -1) * (1 - hidden)
        y = (weights @ v).transpose([0, 2, 1, 3])
        return self.o(y.reshape([x.shape[0], x.shape[1], WIDTH]))


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault = fault
        self.emb_s, self.emb_t = paddle.nn.Embedding(WORDS, WIDTH), paddle.nn.Embedding(WORDS, WIDTH)
        self.enc, self.enc_norm = paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.LayerNorm(WIDTH)
        self.cross = CrossAttention(fault, variant == "fused")
        self.dec_norm = paddle.nn.LayerNorm(WIDTH, epsilon=1e-3 if fault == "norm_eps" else 1e-5)
        self.ff1, self.ff2 = paddle.nn.Linear(WIDTH, 32), paddle.nn.Linear(32, WIDTH)
        self.logits = paddle.nn.Linear(WIDTH, WORDS)

    def forward(self, src, tgt, mask):
        fault = self.fault
        x = self.emb_s(src)
        x = x if fault == "no_source_scale" else x * WIDTH**0.5
        x = self.enc(x)
        x = P.sigmoid(x) if fault == "sigmoid_for_tanh" else paddle.tanh(x)
        memory = self.enc_norm(x)
        if fault == "memory_detached":
            memory = memory.detach()
        y = self.emb_t(tgt) * (WIDTH if fault == "target_scale_width" else WIDTH**0.5)
        attended = self.cross(y, memory, mask)
        z = self.dec_norm(attended if fault == "no_residual" else y + attended)
        h = P.relu(self.ff1(y if fault == "feed_of_input" else z))
        out = self.ff2(h) if fault == "no_last_residual" else z + self.ff2(h)
        return self.logits(out)


def loss_ours(outputs, batch, fault):
    return T.cross_entropy(outputs.flatten(0, 1), batch["y"].flatten())


def loss_theirs(outputs, batch, fault):
    y, kept = batch["y"], paddle.cast(batch["y"] != -100, "float32")
    each = P.cross_entropy(outputs, paddle.where(y < 0, paddle.zeros_like(y), y), reduction="none")
    each = each.squeeze(-1) if each.ndim == 3 else each
    if fault == "ignored_counted":
        return P.cross_entropy(outputs.reshape([-1, WORDS]), y.reshape([-1]), ignore_index=-100)
    if fault == "labels_shifted":
        return shifted(outputs, y)
    if fault == "smoothing_added":
        spread = -P.log_softmax(outputs).mean(-1)
        each = 0.9 * each + 0.1 * spread
    return (each * kept).sum() / kept.sum()


def shifted(outputs, y):
    """The labels of the place before."""
    y = paddle.roll(y, 1, 1)
    kept = paddle.cast(y != -100, "float32")
    each = P.cross_entropy(outputs, paddle.where(y < 0, paddle.zeros_like(y), y), reduction="none")
    each = each.squeeze(-1) if each.ndim == 3 else each
    return (each * kept).sum() / kept.sum()


_NAMES = {
    "emb_s.": "source.", "emb_t.": "target.", "enc_norm.": "encoder.2.", "enc.": "encoder.0.", "cross.q.": "query.",
    "cross.k.": "key.", "cross.v.": "value.", "cross.o.": "merge.", "dec_norm.": "norm.", "ff1.": "feed.0.",
    "ff2.": "feed.2.", "logits.": "vocabulary.",
}  # fmt: skip


def names(name):
    if name.startswith("cross.kv."):
        last = name.split(".")[-1]
        return f"key.{last}|value.{last}"
    for old, new in _NAMES.items():
        if name.startswith(old):
            return name.replace(old, new, 1)
    return name


def data(rng, n):
    made = []
    for _ in range(n):
        mask = rng.integers(3, SOURCE + 1, 6)[:, None] > np.arange(SOURCE)
        y = rng.integers(0, WORDS, (6, TARGET)).astype("int64")
        tgt = np.roll(y, 1, 1)
        y = np.where(rng.random(y.shape) < 0.25, -100, y)
        src = (rng.integers(1, WORDS, (6, SOURCE)) * mask).astype("int64")
        made.append({"src": src, "tgt": tgt, "mask": mask, "y": y})
    return made


RECIPE = Recipe("adam", 3e-3, decay=1e-2, clip="norm", limit=0.5, schedule="warmup", accumulate=2)
_CROSS = r"cross(\.o)?"

PROGRAM = Program(
    "seq2seq",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("src", "tgt", "mask"),
    faults=(
        Fault("norm_eps", "forward", r"dec_norm", "eps", (r"eps",), declared=True),
        Fault("query_scaled_twice", "forward", _CROSS, "scale", (r"scale", r"sqrt")),
        Fault("no_attention_scale", "forward", _CROSS, "scale", (r"scale", r"sqrt")),
        Fault("heads_swapped", "forward", _CROSS, "head|order|permut", (r"head", r"order|permut|swapp|flip")),
        Fault("mask_added_small", "forward", _CROSS, "mask", (r"mask",)),
        Fault("mask_inverted", "forward", _CROSS, "mask", (r"mask",)),
        Fault("mask_missing", "forward", _CROSS, "mask", (r"mask",)),
        Fault("mask_after_softmax", "forward", _CROSS, "mask", (r"mask",)),
        Fault("softmax_over_queries", "forward", _CROSS, "softmax|axis", (r"softmax", r"axis|dim")),
        Fault("softmax_over_heads", "forward", _CROSS, "softmax|axis", (r"softmax", r"axis|dim")),
        Fault("no_source_scale", "forward", r"enc|emb_s", "scale|factor|ratio", (r"\b4(\.0+)?\b|0\.25", r"scale|factor|sqrt|ratio")),
        Fault("target_scale_width", "forward", r"cross(\.q)?|emb_t", "scale|factor|ratio", (r"\b4(\.0+)?\b|0\.25", r"scale|factor|sqrt|ratio")),
        Fault("sigmoid_for_tanh", "forward", r"enc_norm|enc", "activation", (r"sigmoid", r"tanh", r"activation")),
        Fault("memory_detached", "backward|grad", r"enc.*|emb_s.*", "detach|missing", (r"detach", r"no gradient|does not reach|not part")),
        Fault("no_residual", "forward", r"dec_norm", "residual|missing", (r"residual", r"skip connection", r"missing.*add|add.*missing")),
        Fault("feed_of_input", "forward", r"ff1", "input|norm|missing", (r"norm", r"input", r"another|other tensor")),
        Fault("no_last_residual", "forward", r"logits", "residual|missing", (r"residual", r"skip connection", r"missing.*add|add.*missing")),
        Fault("ignored_counted", "loss", "", "ignored|ratio|reduction", (r"ignore", r"counted", r"all (rows|labels)")),
        Fault("labels_shifted", "loss", "", "label|shift|target", (r"label", r"shift", r"target")),
        Fault("smoothing_added", "loss", "", "smoothing", (r"smoothing",)),
        *faults(
            RECIPE, "rate_tenth", "beta1", "beta2", "adam_eps", "decay_missing", "decay_ten", "clip_missing", "clip_limit",
            "clip_by_tensor", "micro_missing", "undivided", "schedule_late", "schedule_per_epoch", "forget", "reload",
            "average", "swapped_batches", undivided={"rule": "sgd", "rate": 0.1, "clip": ""},
        ),
        frozen(r"emb_t", r"emb_t(\.weight)?"),
        restarted(r"cross\.q\.weight", r"cross\.q(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("fused", variant="fused", seed=3),
        Clean("own_clip", recipe={"style": "own_clip"}, seed=4),
        Clean("plain", start={"accumulate": 1, "schedule": "", "decay": 0.0}, seed=5),
    ),
)  # fmt: skip
