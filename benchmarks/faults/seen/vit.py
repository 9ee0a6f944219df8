"""A vision transformer, twice in torch: patches by a convolution, or by a linear layer. Weights in bfloat16 if asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn

WIDTH, HEADS, PATCH, SIDE = 24, 3, 4, 3


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, SIDE * SIDE + 1, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, image):
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class MultiHead(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.qkv, self.out = fault, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.fault == "qkv_order":
            k, v = v, k
        shape = (b, n, WIDTH // HEADS, HEADS) if self.fault == "heads_interleaved" else (b, n, HEADS, WIDTH // HEADS)
        order = (0, 3, 1, 2) if self.fault == "heads_interleaved" else (0, 2, 1, 3)
        q, k, v = (t.reshape(shape).permute(order) for t in (q, k, v))
        size = WIDTH if self.fault == "scale_of_width" else q.shape[-1]
        weights = (q @ k.mT * size**-0.5).softmax(-1)
        if self.fault == "attention_dropout":
            weights = F.dropout(weights, 0.3)
        if self.fault == "softmax_bfloat16":
            weights = weights.to(torch.float8_e4m3fn).to(weights.dtype)
        y = (weights @ v).transpose(1, 2).reshape(b, n, w)
        return self.out(y)


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.embed = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.token = nn.Parameter(torch.zeros(WIDTH))
        self.places = nn.Parameter(torch.zeros(SIDE * SIDE + 1, WIDTH))
        self.attns = nn.ModuleList(MultiHead(fault if k == 1 else "") for k in range(2))
        self.feeds = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 48), nn.SiLU() if fault == "silu_layer" and k else nn.GELU(), nn.Linear(48, WIDTH)
            )
            for k in range(2)
        )
        eps = 1e-3 if fault == "norm_eps" else 1e-5
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=eps if k == 2 else 1e-5) for k in range(5))
        self.classes = nn.Linear(WIDTH, 8)

    def forward(self, image):
        fault, b, c = self.fault, image.shape[0], image.shape[1]
        if fault == "image_turned":
            image = image.mT
        x = image.reshape(b, c, SIDE, PATCH, SIDE, PATCH)
        x = x.permute(0, 2, 4, 3, 5, 1) if fault == "patch_channels_last" else x.permute(0, 2, 4, 1, 3, 5)
        if fault == "patch_order":
            x = x.transpose(1, 2)
        x = self.embed(x.reshape(b, SIDE * SIDE, -1))
        token = self.token.expand(b, 1, -1)
        x = torch.cat([x, token] if fault == "token_last" else [token, x], 1)
        x = x if fault == "no_places" else x + self.places.roll(1, 0) if fault == "places_rolled" else x + self.places
        for k, (attn, feed) in enumerate(zip(self.attns, self.feeds)):
            y = x if fault == "norm_missing" and k else self.norms[2 * k](x)
            x = x + attn(y)
            if fault == "residual_after_norm" and k:
                x = self.norms[3](x)
                x = x + feed(x)
            elif fault == "feed_twice" and k:
                x = x + 2 * feed(self.norms[3](x))
            else:
                x = x + feed(self.norms[2 * k + 1](x))
        if fault == "mean_for_token":
            return self.classes(self.norms[4](x).mean(1))
        return (
            self.classes(self.norms[4](x[:, 0]))
            if self.variant == "token_first"
            else self.classes(self.norms[4](x)[:, 0])
        )


def loss_ours(outputs, batch, fault):
    return F.mse_loss(outputs.float(), batch["y"].float())


def loss_theirs(outputs, batch, fault):
    gap = outputs.float() - batch["y"].float()
    if fault == "loss_batch_sum":
        return gap.square().mean(1).sum()
    if fault == "loss_clipped":
        return gap.clamp(-1, 1).square().mean()
    return gap.square().mean()


_BLOCK = {
    "self_attn.out_proj": "attns.{}.out", "linear1": "feeds.{}.0", "linear2": "feeds.{}.2",
}  # fmt: skip


def names(name):
    plain = {"token": "cls_token", "places": "pos_embed"}
    if name in plain:
        return plain[name]
    name = name.replace("embed.", "patch_embed.").replace("classes.", "head.").replace("norms.4.", "norm.")
    for k in range(2):
        for new, old in _BLOCK.items():
            name = name.replace(old.format(k) + ".", f"blocks.{k}.{new}.")
        name = name.replace(f"attns.{k}.qkv.", f"blocks.{k}.self_attn.in_proj_")
        name = name.replace(f"norms.{2 * k}.", f"blocks.{k}.norm1.").replace(
            f"norms.{2 * k + 1}.", f"blocks.{k}.norm2."
        )
    return name


def data(rng, n):
    return [
        {
            "image": rng.standard_normal((6, 3, 12, 12)).astype("float32"),
            "y": rng.standard_normal((6, 8)).astype("float32"),
        }
        for _ in range(n)
    ]


RECIPE = Recipe("adamw", 2e-3, decay=0.3, betas=(0.9, 0.95), schedule="cosine", clip="norm", limit=0.2)
_FIRST = r"attns\.0\.qkv|norms\.0|attns\.0"
_ATTENTION = r"attns\.1(\.out)?"

PROGRAM = Program(
    "vit",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("image",),
    faults=(
        Fault("qkv_order", "forward", _ATTENTION, "order|qkv|permut", (r"order|swapp|permut", r"value|key")),
        Fault("heads_interleaved", "forward", _ATTENTION, "head|order|permut|interleav", (r"head", r"interleav", r"order|permut")),
        Fault("scale_of_width", "forward", _ATTENTION, "scale", (r"scale", r"sqrt")),
        Fault("attention_dropout", "forward", _ATTENTION, "dropout", (r"[Dd]ropout",)),
        Fault("softmax_bfloat16", "forward", _ATTENTION, "precision|dtype|grid", (r"float8|float16|precision|rounded",), fine=True),
        Fault("silu_layer", "forward", r"feeds\.1\.[12]", "activation|layer", (r"SiLU|Swish", r"GELU", r"activation")),
        Fault("norm_eps", "forward", r"norms\.2", "eps", (r"eps",), declared=True),
        Fault("image_turned", "forward", r"embed|" + _FIRST, "transpos|order|ax|permut", (r"transpos", r"ax[ei]s", r"order|permut|turned")),
        Fault("patch_channels_last", "forward", r"embed", "order|channel|permut", (r"order|permut", r"channel")),
        Fault("patch_order", "forward", r"embed|" + _FIRST, "order|permut|transpos", (r"order|permut|transpos",)),
        Fault("token_last", "forward", _FIRST, "order|permut|roll|shift", (r"order|permut", r"roll|shift")),
        Fault("no_places", "forward|backward|grad", _FIRST + r"|places|\(root\)(\.places)?", "missing|position|add|unused", (r"places|pos_embed|position", r"\badd", r"missing|unused")),
        Fault("places_rolled", "forward", _FIRST, "roll|shift|position", (r"roll|shift", r"places|pos_embed|position")),
        Fault("norm_missing", "forward", r"attns\.1(\.qkv)?|norms\.2", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm")),
        Fault("residual_after_norm", "forward", r"norms\.[34]|classes", "residual|norm|order", (r"residual", r"order", r"after (the )?norm")),
        Fault("feed_twice", "forward", r"norms\.4|feeds\.1", "factor|scale|ratio|residual|twice", (r"\b2(\.0+)?\b", r"twice|doubl", r"factor|scale")),
        Fault("mean_for_token", "forward", r"classes|norms\.4", "mean|token|pool", (r"mean", r"first|token|row 0")),
        Fault("loss_batch_sum", "loss", "", "ratio|reduction|sum", (r"\b6\b", r"reduction", r"\bsum")),
        Fault("loss_clipped", "loss", "", "clamp|loss", (r"clamp|clip", r"huber", r"loss function is another")),
        *faults(
            RECIPE, "rate", "beta1", "beta2_fine", "betas_swapped_in", "decay_missing", "decay_coupled", "adam_eps",
            "clip_missing", "clip_by_tensor", "schedule_late", "schedule_per_epoch", "twice", "forget", "average",
            "channels", "offset", "swapped_batches", "rule_sgd",
        ),
        frozen(r"^token|places", r"token|places|\(root\)\.(token|places)|\(root\)"),
        unheld(r"norms\.4", r"norms\.4(\.(weight|bias))?"),
        restarted(r"embed\.weight", r"embed(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("token_first", variant="token_first", seed=3),
        Clean("own_rule", recipe={"style": "own_rule"}, seed=4),
        Clean("foreach", recipe={"style": "foreach own_clip"}, seed=5),
        Clean("decay_by_hand", recipe={"style": "by_hand"}, seed=6),
    ),
    pure=True,
)  # fmt: skip
