"""A transformer encoder with hand-written attention and LayerNorm, twice in torch; AdamW, warmup, clipping."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn

WIDTH, HEADS, WORDS, LENGTH = 24, 4, 40, 9


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x, bias):
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype)).transpose(1, 2).reshape(b, n, -1))
        return x + self.mlp(self.norm2(x))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, ids, mask):
        x = self.words(ids) * math.sqrt(WIDTH) + self.places.weight[: ids.shape[1]]
        bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, bias)
        x = self.norm(x)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Norm(nn.Module):
    def __init__(self, width, eps=1e-5, biased=True):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.small, self.biased = eps, biased

    def forward(self, x):
        x = x.float()
        centred = x - x.mean(-1, keepdim=True)
        spread = x.var(-1, keepdim=True, unbiased=not self.biased)
        return centred * torch.rsqrt(spread + self.small) * self.gain + self.shift


class SelfAttention(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask):
        fault, size = self.fault, WIDTH // HEADS
        b, n, w = x.shape
        q, k, v = (f(x).view(b, n, HEADS, size).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        if fault == "heads_permuted":
            v = v[:, [1, 0, 2, 3]]
        scale = {"attention_scale": 1 / size, "no_attention_scale": 1.0}.get(fault, 1 / math.sqrt(size))
        scores = q @ k.transpose(-1, -2) * scale
        kept = mask[:, None, None, :]
        if fault == "mask_inverted":
            kept = ~kept
        if fault == "mask_rolled":
            kept = kept.roll(1, -1)
        if fault != "mask_missing":
            scores = scores.masked_fill(~kept, -1e9)
        weights = torch.softmax(scores, -2 if fault == "softmax_axis" else -1)
        out = (weights @ v).transpose(1, 2).reshape(b, n, w)
        if fault == "heads_not_turned_back":
            out = (weights @ v).reshape(b, n, w)
        return self.wo(out)


class Feed(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), fault

    def forward(self, x):
        x = self.up(x)
        if self.fault == "gelu_tanh":
            return self.down(F.gelu(x, approximate="tanh"))
        return self.down(F.silu(x) if self.fault == "silu_for_gelu" else F.gelu(x))


class Layer(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.ln_a = Norm(WIDTH, 1e-3 if fault == "norm_eps" else 1e-5, fault != "norm_unbiased")
        self.attn, self.ln_b, self.ff = SelfAttention(fault), Norm(WIDTH), Feed(fault)

    def forward(self, x, mask):
        if self.fault == "post_norm":
            x = self.ln_a(x + self.attn(x, mask))
        elif self.fault == "no_residual":
            x = self.attn(self.ln_a(x), mask)
        else:
            x = x + self.attn(self.ln_a(x), mask)
        return x + self.ff(self.ln_b(x))


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault = fault
        self.tok, self.pos = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        first = ("norm_eps", "gelu_tanh", "attention_scale", "mask_inverted", "post_norm")
        self.enc = nn.ModuleList(Layer(fault if (k == 0) == (fault in first) else "") for k in range(2))
        self.ln_f, self.cls = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, ids, mask):
        x = self.tok(ids) * (1.0 if self.fault == "no_embedding_scale" else WIDTH**0.5)
        x = x if self.fault == "no_positions" else x + self.pos
        for layer in self.enc:
            x = layer(x, mask)
        x = self.ln_f(x)
        if self.fault == "mean_over_pads":
            return self.cls(x.mean(1))
        kept = mask.unsqueeze(-1).to(x.dtype)
        return self.cls((x * kept).sum(1) / kept.sum(1))


def loss_ours(outputs, batch, fault):
    return F.cross_entropy(outputs.float(), batch["y"], label_smoothing=0.1)


def loss_theirs(outputs, batch, fault):
    scores, smooth = F.log_softmax(outputs.float(), -1), 0.0 if fault == "no_smoothing" else 0.1
    right = scores.gather(-1, batch["y"][:, None]).squeeze(-1)
    return -((1 - smooth) * right + smooth * scores.mean(-1)).mean()


_NAMES = {
    "tok.": "words.", "enc.": "layers.", ".ln_a.gain": ".norm1.weight", ".ln_a.shift": ".norm1.bias",
    ".ln_b.gain": ".norm2.weight", ".ln_b.shift": ".norm2.bias", ".attn.wo.": ".proj.", ".ff.up.": ".mlp.0.",
    ".ff.down.": ".mlp.2.", "ln_f.": "norm.", "cls.": "head.",
}  # fmt: skip


def names(name):
    if name == "pos":
        return "places.weight"
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    for k, part in enumerate("qkv"):
        name = name.replace(f".attn.w{part}.", f".qkv[{k}].")
    return name


def data(rng, n):
    made = []
    for _ in range(n):
        lengths = rng.integers(4, LENGTH + 1, 8)
        mask = rng.permuted(lengths)[:, None] > range(LENGTH)
        ids = rng.integers(1, WORDS, (8, LENGTH)) * mask
        made.append({"ids": ids.astype("int64"), "mask": mask, "y": rng.integers(0, 4, 8).astype("int64")})
    return made


RECIPE = Recipe("adamw", 3e-3, decay=0.1, norms=False, schedule="warmup", clip="norm", limit=0.5)
_BETWEEN = r"enc\.{0}\.attn(\.wo)?"

PROGRAM = Program(
    "encoder",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("ids", "mask"),
    faults=(
        Fault("norm_eps", "forward", r"enc\.0(\.ln_a)?|enc\.0\.attn.*", "eps", (r"eps",), fine=True),
        Fault("norm_unbiased", "forward", r"enc\.1(\.ln_a)?|enc\.1\.attn.*", "norm|unbiased|variance|ratio", (r"unbiased|n - 1|variance", r"scale|ratio|factor")),
        Fault("heads_permuted", "forward", _BETWEEN.format(1), "head|permut|order", (r"head", r"permut|order")),
        Fault("attention_scale", "forward", _BETWEEN.format(0), "scale", (r"scale", r"sqrt")),
        Fault("no_attention_scale", "forward", _BETWEEN.format(1), "scale", (r"scale", r"sqrt")),
        Fault("mask_inverted", "forward", _BETWEEN.format(0), "mask", (r"mask",)),
        Fault("mask_rolled", "forward", _BETWEEN.format(1), "mask", (r"mask",)),
        Fault("mask_missing", "forward", _BETWEEN.format(1), "mask", (r"mask",)),
        Fault("softmax_axis", "forward", _BETWEEN.format(1), "softmax|axis", (r"softmax", r"axis|dim")),
        Fault("heads_not_turned_back", "forward", _BETWEEN.format(1), "head|permut|order|transpos", (r"head", r"permut|order|transpos")),
        Fault("gelu_tanh", "forward", r"enc\.0\.ff(\.down)?", "gelu|activation", (r"gelu", r"tanh"), fine=True),
        Fault("silu_for_gelu", "forward", r"enc\.1\.ff(\.down)?", "activation", (r"silu|swish", r"gelu", r"activation")),
        Fault("no_residual", "forward", r"enc\.1(\.ln_b)?", "residual|missing", (r"residual", r"skip connection", r"missing.*add|add.*missing")),
        Fault("post_norm", "forward", r"enc\.0(\.ln_a|\.attn.*)?", "norm|order", (r"norm", r"order")),
        Fault("no_embedding_scale", "forward", r"enc\.0(\.ln_a)?|\(root\)|tok", "scale|embedding|ratio|factor", (r"4\.8", r"0\.204", r"scale|factor|sqrt|ratio")),
        Fault("no_positions", "forward|backward|grad", r"enc\.0(\.ln_a)?|\(root\)|pos", "position|missing|add|unused", (r"position", r"missing", r"\badd", r"\bpos\b")),
        Fault("mean_over_pads", "forward", r"cls", "mean|pad|mask", (r"pad", r"mask", r"mean")),
        Fault("no_smoothing", "loss", "", "smoothing", (r"smoothing",)),
        *faults(
            RECIPE, "rate", "beta1", "beta2", "beta2_fine", "adam_eps", "decay_missing", "decay_coupled", "decay_on_norms",
            "uncorrected", "clip_missing", "clip_limit", "clip_by_value", "clip_by_tensor", "schedule_late", "schedule_half",
            "skip", "forget", "next_batch",
        ),
        frozen(r"tok", r"tok(\.weight)?"),
        unheld(r"enc\.1\.ff\.up", r"enc\.1\.ff\.up(\.(weight|bias))?"),
        restarted(r"enc\.0\.attn\.wk\.weight", r"enc\.0\.attn\.wk(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("decay_by_hand", recipe={"style": "by_hand"}, seed=3),
        Clean("own_clip", recipe={"style": "own_clip"}, seed=4),
        Clean("own_rule", recipe={"style": "own_rule"}, seed=5),
    ),
)  # fmt: skip
