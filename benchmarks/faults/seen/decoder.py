"""A decoder with rotary embeddings, RMSNorm and a gated MLP; ignored labels, accumulation, AdamW, cosine."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted

WIDTH, HEADS, HALF, WORDS, LENGTH = 32, 4, 4, 30, 8


class RMSNorm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x, cos, sin):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, HEADS, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (t * cos + torch.cat([-t[..., HALF:], t[..., :HALF]], -1) * sin for t in (q, k))
        y = T.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, WIDTH))


class GatedMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(WIDTH, 48, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(48, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(T.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(WIDTH), Attention()
        self.post_attention_layernorm, self.mlp = RMSNorm(WIDTH), GatedMLP()

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.lm_head = RMSNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] / 10000 ** (torch.arange(HALF) / HALF)
        angles = torch.cat([angles, angles], -1)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.lm_head(self.norm(x))


class Scale(paddle.nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.eps = fault, 1e-3 if fault == "rms_eps" else 1e-6
        self.w = self.create_parameter([WIDTH], default_initializer=paddle.nn.initializer.Constant(1.0))

    def forward(self, x):
        if self.fault == "rms_centred":
            x = x - x.mean(-1, keepdim=True)
        if self.fault == "rms_no_root":
            return x / (x.square().mean(-1, keepdim=True) + self.eps) * self.w
        return x / paddle.sqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.w


class Block(paddle.nn.Layer):
    def __init__(self, fault, fused):
        super().__init__()
        self.fault, self.fused = fault, fused
        linear = paddle.nn.Linear
        self.n1, self.n2 = Scale(fault), Scale("")
        if fused:
            self.qkv = linear(WIDTH, 3 * WIDTH, bias_attr=False)
        else:
            self.q, self.k, self.v = (linear(WIDTH, WIDTH, bias_attr=False) for _ in range(3))
        self.o = linear(WIDTH, WIDTH, bias_attr=False)
        self.gate, self.up = (linear(WIDTH, 48, bias_attr=False) for _ in range(2))
        self.down = linear(48, WIDTH, bias_attr=False)

    def turned(self, t, cos, sin):
        if self.fault == "rotary_interleaved":
            a, b = t[..., 0::2], t[..., 1::2]
            return t * cos + paddle.stack([-b, a], -1).reshape(t.shape) * sin
        if self.fault == "rotary_half":
            return paddle.concat([t[..., :2] * cos[..., :2], t[..., 2:]], -1)
        a, b = t[..., :HALF], t[..., HALF:]
        if self.fault == "rotary_sign":
            return paddle.concat([a * cos[:, :HALF] + b * sin[:, :HALF], b * cos[:, :HALF] - a * sin[:, :HALF]], -1)
        return paddle.concat([a * cos[:, :HALF] - b * sin[:, :HALF], b * cos[:, :HALF] + a * sin[:, :HALF]], -1)

    def attention(self, x, cos, sin):
        b, n, _ = x.shape
        parts = paddle.split(self.qkv(x), 3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.reshape([b, n, HEADS, -1]).transpose([0, 2, 1, 3]) for t in parts)
        q = self.turned(q, cos, sin)
        k = k if self.fault == "rotary_query_only" else self.turned(k, cos, sin)
        scores = paddle.matmul(q, k, transpose_y=True) / (2 * HALF) ** 0.5
        shift = 1 if self.fault == "causal_shifted" else 0
        hidden = paddle.triu(paddle.ones([n, n]), 1 + shift)
        if self.fault == "causal_missing":
            hidden = hidden * 0
        y = P.softmax(scores - 1e9 * hidden, -1) @ v
        return self.o(y.transpose([0, 2, 1, 3]).reshape([b, n, WIDTH]))

    def forward(self, x, cos, sin):
        x = x + self.attention(self.n1(x), cos, sin)
        y = self.n2(x)
        if self.fault == "mlp_without_norm":
            y = x
        if self.fault == "gate_and_up":
            return x + self.down(self.gate(y) * P.silu(self.up(y)))
        act = P.gelu if self.fault == "gelu_gate" else P.silu
        return x + self.down(act(self.gate(y)) * self.up(y))


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault = fault
        self.wte = paddle.nn.Embedding(WORDS, WIDTH, padding_idx=0 if fault == "padding_idx" else None)
        self.h = paddle.nn.LayerList([Block("", variant == "fused"), Block(fault, variant == "fused")])
        self.ln_f, self.head = Scale(""), paddle.nn.Linear(WIDTH, WORDS, bias_attr=False)

    def forward(self, ids):
        base = 1000.0 if self.fault == "rotary_base" else 10000.0
        where = paddle.arange(ids.shape[1], dtype="float32")
        if self.fault == "positions_doubled":
            where = where * 2
        angles = where.unsqueeze(-1) / base ** (paddle.arange(HALF, dtype="float32") / HALF)
        cos, sin = (paddle.concat([f(angles), f(angles)], -1) for f in (paddle.cos, paddle.sin))
        x = self.wte(ids)
        for block in self.h:
            x = block(x, cos, sin)
        return self.head(self.ln_f(x))


def loss_ours(outputs, batch, fault):
    return T.cross_entropy(outputs.flatten(0, 1), batch["y"].flatten(), ignore_index=-100)


def loss_theirs(outputs, batch, fault):
    y = batch["y"]
    if fault == "labels_unshifted":
        y = paddle.where(y < 0, y, batch["ids"])
    scores, y = outputs.reshape([-1, WORDS]), y.reshape([-1])
    kept = (y >= 0).astype("float32")
    each = P.cross_entropy(scores, paddle.where(y < 0, paddle.zeros_like(y), y), reduction="none")
    if fault == "ignored_counted":
        return (each * kept).mean()
    if fault == "ignored_as_zero":
        return each.mean()
    return (each * kept).sum() / kept.sum()


_NAMES = {
    "wte.": "embed_tokens.", "h.": "layers.", ".q.": ".self_attn.q_proj.", ".k.": ".self_attn.k_proj.",
    ".v.": ".self_attn.v_proj.", ".o.": ".self_attn.o_proj.", ".gate.": ".mlp.gate_proj.", ".up.": ".mlp.up_proj.",
    ".down.": ".mlp.down_proj.", "n1.w": "input_layernorm.weight", "n2.w": "post_attention_layernorm.weight",
    "ln_f.w": "norm.weight",
}  # fmt: skip


def names(name):
    if name == "head.weight":
        return "lm_head.weight"
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    if ".qkv." in name:
        return "|".join(name.replace(".qkv.", f".self_attn.{p}_proj.") for p in "qkv")
    return name


def data(rng, n):
    made = []
    for _ in range(n):
        ids = rng.integers(0, WORDS, (4, LENGTH + 1)).astype("int64")
        y = ids[:, 1:].copy()
        y[np_mask(rng)] = -100
        made.append({"ids": ids[:, :-1].copy(), "y": y})
    return made


def np_mask(rng):
    return rng.random((4, LENGTH)) < 0.3


RECIPE = Recipe(
    "adamw", 2e-3, decay=0.1, betas=(0.9, 0.98), norms=False, schedule="cosine", clip="norm", limit=0.3, accumulate=2
)
_ATTENTION = r"h\.1(\.o)?"

PROGRAM = Program(
    "decoder",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("ids",),
    faults=(
        Fault("rms_eps", "forward", r"h\.1(\.n1)?|h\.1\.[qkv]", "eps", (r"eps",)),
        Fault("rms_centred", "forward", r"h\.1(\.n1)?", "norm|mean|centre", (r"mean", r"LayerNorm", r"centre|center")),
        Fault("rms_no_root", "forward", r"h\.1(\.n1)?", "norm|root|scale", (r"root|sqrt", r"row-wise|each row|scale")),
        Fault("rotary_interleaved", "forward", _ATTENTION, "rotary|interleav|permut", (r"rotary|rope", r"interleav")),
        Fault("rotary_half", "forward", _ATTENTION, "rotary", (r"rotary|rope",)),
        Fault("rotary_sign", "forward", _ATTENTION, "rotary|sign", (r"rotary|rope", r"sign")),
        Fault("rotary_query_only", "forward", _ATTENTION, "rotary", (r"rotary|rope",)),
        Fault("rotary_base", "forward", r"h\.[01](\.o)?", "rotary|base", (r"rotary|rope", r"base|theta")),
        Fault("positions_doubled", "forward", r"h\.[01](\.o)?", "rotary|position|sines and cosines are taken of", (r"rotary|rope|sine", r"position|multiplied")),
        Fault("causal_shifted", "forward", _ATTENTION, "mask|causal", (r"mask", r"causal")),
        Fault("causal_missing", "forward", _ATTENTION, "mask|causal", (r"mask", r"causal")),
        Fault("mlp_without_norm", "forward", r"h\.1(\.gate|\.up|\.n2)?", "norm|missing", (r"norm",)),
        Fault("gate_and_up", "forward", r"h\.1(\.down)?", "gate|order", (r"gate", r"order|swapp")),
        Fault("gelu_gate", "forward", r"h\.1(\.down)?", "activation", (r"gelu", r"silu|swish", r"activation")),
        Fault("padding_idx", "forward", r"wte", "padding_idx|padding|setting", (r"padding_idx", r"row 0", r"zeros?"), declared=True),
        Fault("ignored_counted", "loss", "", "ignored|ratio|reduction", (r"ignore", r"counted", r"all (rows|labels)")),
        Fault("ignored_as_zero", "loss", "", "ignored|label", (r"ignore", r"label")),
        Fault("labels_unshifted", "loss", "", "label|shift|target", (r"label", r"shift", r"target")),
        *faults(
            RECIPE, "rate", "beta1", "beta2_fine", "decay_half", "decay_missing", "decay_on_norms", "clip_missing",
            "clip_limit", "undivided", "micro_missing", "schedule_half", "twice", "stale", "reload", "swapped_batches",
            undivided={"rule": "sgd", "rate": 0.1, "clip": ""},
        ),
        frozen(r"h\.0\.gate", r"h\.0(\.gate(\.weight)?)?"),
        restarted(r"h\.1\.k", r"h\.1\.k(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("fused", variant="fused", seed=3),
        Clean("own_clip", recipe={"style": "own_clip"}, seed=4),
        Clean("one_group", start={"norms": True, "schedule": "warmup"}, seed=5),
        Clean("decay_by_hand", recipe={"style": "by_hand"}, seed=6),
    ),
)  # fmt: skip
