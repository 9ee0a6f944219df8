"""A decoder with fused projections against separate ones, twice in torch; tied words, accumulation, clipping, AdamW."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn

WORDS, WIDTH, HEADS, LENGTH = 33, 24, 3, 7


class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).bool(), persistent=False)

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = (t.view(b, n, HEADS, w // HEADS).transpose(1, 2) for t in self.c_attn(x).split(w, 2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(~self.mask[:n, :n], float("-inf"))
        y = torch.softmax(scores, -1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, n, w))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(WIDTH, 64), act=nn.GELU("tanh"), c_proj=nn.Linear(64, WIDTH)))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m.c_proj(m.act(m.c_fc(self.ln_2(x))))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Sublayer(nn.Module):
    """Normalise, attend or feed, add."""

    def __init__(self, kind, fault):
        super().__init__()
        self.kind, self.fault = kind, fault
        self.norm = nn.LayerNorm(WIDTH, eps=1e-3 if fault == "norm_eps" and kind == "feed" else 1e-5)
        if kind == "attend":
            self.queries, self.keys, self.values, self.result = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        else:
            self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def attend(self, x):
        fault, n = self.fault, x.shape[1]
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.queries, self.keys, self.values)
        )  # fmt: skip
        if fault == "keys_normalised":
            k = F.normalize(k, dim=-1)
        causal = {"mask_missing": False}.get(fault, True)
        if fault == "mask_strict_next":
            keep = torch.ones(n, n).tril(1).bool()
            y = F.scaled_dot_product_attention(q, k, v, keep)
        elif fault == "mask_window":
            keep = torch.ones(n, n).tril().triu(-2).bool()
            y = F.scaled_dot_product_attention(q, k, v, keep)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=0.25 if fault == "attention_scale" else None
            )
        if fault == "heads_reversed":
            y = y.flip(1)
        return self.result(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        fault, feed = self.fault, self.kind == "feed"
        y = x if fault == "no_norm" and feed else self.norm(x)
        if feed:
            y = self.wide(y)
            y = (
                y.relu()
                if fault == "relu_for_gelu"
                else F.gelu(y, approximate="none" if fault == "gelu_exact" else "tanh")
            )
            if fault == "hidden_dropout":
                y = F.dropout(y, 0.1)
            y = self.narrow(y)
        else:
            y = self.attend(y)
        if fault == "no_residual" and feed:
            return y
        if fault == "residual_of_norm" and feed:
            return self.norm(x) + y
        return x + y


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault = fault
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        feeding = (
            "norm_eps",
            "no_norm",
            "relu_for_gelu",
            "gelu_exact",
            "hidden_dropout",
            "no_residual",
            "residual_of_norm",
        )
        self.sub = nn.ModuleList(
            Sublayer("feed" if k % 2 else "attend", fault if k == (1 if fault in feeding else 2) else "")
            for k in range(4)
        )
        self.final = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        if fault != "untied":
            self.out.weight = self.token.weight

    def forward(self, ids):
        where = torch.arange(ids.shape[1])
        if self.fault == "positions_reversed":
            where = where.flip(0)
        if self.fault == "positions_shifted":
            where = (where + 1) % LENGTH
        x = self.token(ids)
        x = x if self.fault == "no_positions" else x + self.position(where)
        for sub in self.sub:
            x = sub(x)
        if self.fault == "rounded":
            x = x.to(torch.float16).to(x.dtype)
        x = x if self.fault == "no_final_norm" else self.final(x)
        return self.out(x)


def loss_ours(outputs, batch, fault):
    return F.cross_entropy(outputs.float().flatten(0, 1), batch["y"].flatten())


def loss_theirs(outputs, batch, fault):
    scores, y = outputs.float().log_softmax(-1), batch["y"]
    kept = y != -100
    each = -scores.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    if fault == "ignored_counted":
        return (each * kept).mean()
    if fault == "ignored_as_zero":
        return each.mean()
    if fault == "labels_early":
        return each_of(scores, batch["ids"], kept)
    return each[kept].mean()


def each_of(scores, y, kept):
    """The words themselves as labels."""
    return -scores.gather(-1, y.unsqueeze(-1)).squeeze(-1)[kept].mean()


_NAMES = {"token.": "wte.", "position.": "wpe.", "final.": "ln_f.", "out.": "wte."}
_ATTEND = {
    "norm.": "ln_1.",
    "queries.": "attn.c_attn[0].",
    "keys.": "attn.c_attn[1].",
    "values.": "attn.c_attn[2].",
    "result.": "attn.c_proj.",
}
_FEED = {"norm.": "ln_2.", "wide.": "mlp.c_fc.", "narrow.": "mlp.c_proj."}


def names(name):
    for old, new in _NAMES.items():
        if name.startswith(old):
            return name.replace(old, new, 1)
    _, number, rest = name.split(".", 2)
    for old, new in (_FEED if int(number) % 2 else _ATTEND).items():
        rest = rest.replace(old, new, 1) if rest.startswith(old) else rest
    return f"h.{int(number) // 2}.{rest}"


def data(rng, n):
    made = []
    for _ in range(n):
        ids = rng.integers(0, WORDS, (4, LENGTH + 1)).astype("int64")
        y = ids[:, 1:].copy()
        y[rng.random(y.shape) < 0.2] = -100
        made.append({"ids": ids[:, :-1].copy(), "y": y})
    return made


RECIPE = Recipe(
    "adamw", 3e-3, decay=0.2, betas=(0.9, 0.95), norms=False, schedule="warmup", clip="norm", limit=0.3, accumulate=2
)
_ATTENTION = r"sub\.2(\.result)?"

PROGRAM = Program(
    "gpt",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("ids",),
    faults=(
        Fault("norm_eps", "forward", r"sub\.1\.norm", "eps", (r"eps",), declared=True),
        Fault("keys_normalised", "forward", _ATTENTION, "norm|scale", (r"norm", r"key")),
        Fault("mask_missing", "forward", _ATTENTION, "mask|causal", (r"mask", r"causal")),
        Fault("mask_strict_next", "forward", _ATTENTION, "mask|causal", (r"mask", r"causal")),
        Fault("mask_window", "forward", _ATTENTION, "mask|window", (r"mask", r"window")),
        Fault("attention_scale", "forward", _ATTENTION, "scale", (r"scale", r"sqrt")),
        Fault("heads_reversed", "forward", _ATTENTION, "head|order|permut", (r"head", r"order|permut|flip|revers")),
        Fault("no_norm", "forward", r"sub\.1(\.wide|\.norm)?", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm")),
        Fault("relu_for_gelu", "forward", r"sub\.1(\.narrow)?", "activation", (r"relu|gelu", r"activation")),
        Fault("gelu_exact", "forward", r"sub\.1(\.narrow)?", "gelu|activation", (r"gelu", r"tanh|erf|exact"), fine=True),
        Fault("hidden_dropout", "forward", r"sub\.1(\.narrow)?", "dropout", (r"[Dd]ropout",)),
        Fault("no_residual", "forward", r"sub\.1|sub\.2(\.norm)?", "residual|missing", (r"residual", r"skip connection", r"missing.*add|add.*missing")),
        Fault("residual_of_norm", "forward", r"sub\.1(\..*)?|sub\.2(\.norm)?", "residual|norm", (r"residual", r"norm")),
        Fault("untied", "weight|grad|update", r"(token|out)(\.weight)?", "tied|shared", (r"\b(un)?tied", r"shared", r"once|twice"), declared=True),
        Fault("positions_reversed", "forward|input", r"position|sub\.0.*|\(root\)", "position|order|revers|flip", (r"position", r"revers|flip|order")),
        Fault("positions_shifted", "forward|input", r"position|sub\.0.*|\(root\)", "position|shift|roll", (r"position", r"shift|roll")),
        Fault("no_positions", "forward|grad", r"position(\.weight)?|sub\.0(\.norm)?|\(root\)", "position|missing|unused", (r"position", r"never call|not called", r"missing|unused")),
        Fault("rounded", "forward", r"final|sub\.3", "float16|precision|dtype", (r"float16", r"precision"), fine=True),
        Fault("no_final_norm", "forward", r"out|final|\(root\)", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm")),
        Fault("ignored_counted", "loss", "", "ignored|ratio|reduction", (r"ignore", r"counted", r"all (rows|labels)")),
        Fault("ignored_as_zero", "loss", "", "ignored|label", (r"ignore", r"label")),
        Fault("labels_early", "loss", "", "label|shift|target", (r"label", r"shift", r"target")),
        *faults(
            RECIPE, "rate", "beta1", "beta2", "beta2_fine", "adam_eps", "decay_missing", "decay_on_norms", "decay_coupled",
            "uncorrected", "clip_missing", "clip_limit", "clip_by_value", "undivided", "micro_missing", "schedule_late",
            "schedule_half", "skip", "stale", "forget", "clamp", "average", "next_batch",
            undivided={"rule": "sgd", "rate": 0.2, "clip": ""},
        ),
        frozen(r"position", r"position(\.weight)?"),
        unheld(r"sub\.3\.norm", r"sub\.3\.norm(\.(weight|bias))?"),
        restarted(r"sub\.2\.keys\.weight", r"sub\.2\.keys(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("own_rule", recipe={"style": "own_rule"}, seed=3),
        Clean("foreach", recipe={"style": "foreach"}, seed=4),
        Clean("decay_by_hand", recipe={"style": "by_hand own_clip"}, seed=5),
    ),
)  # fmt: skip
