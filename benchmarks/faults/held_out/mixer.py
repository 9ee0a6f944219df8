"""An MLP mixer; GELU, LayerNorm, smoothed labels, AdamW without decay on norms, a step schedule."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld

TOKENS, WIDTH = 6, 16


def dense(inp, mid):
    return torch.nn.Sequential(torch.nn.Linear(inp, mid), torch.nn.GELU(), torch.nn.Linear(mid, inp))


class MixerBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_t, self.tokens = torch.nn.LayerNorm(WIDTH), dense(TOKENS, 12)
        self.norm_c, self.channels = torch.nn.LayerNorm(WIDTH), dense(WIDTH, 32)
        self.scale = torch.nn.Parameter(0.5 * torch.ones(WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norm_t(x).transpose(1, 2)).transpose(1, 2)
        return x + self.scale * self.channels(self.norm_c(x))


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(10, WIDTH)
        self.blocks = torch.nn.Sequential(MixerBlock(), MixerBlock())
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x))).mean(1))


class Mix(paddle.nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.ln1 = paddle.nn.LayerNorm(WIDTH, epsilon=1e-3 if fault == "norm_eps" else 1e-5)
        self.ln2 = paddle.nn.LayerNorm(WIDTH)
        self.t1, self.t2 = paddle.nn.Linear(TOKENS, 12), paddle.nn.Linear(12, TOKENS)
        self.c1, self.c2 = paddle.nn.Linear(WIDTH, 32), paddle.nn.Linear(32, WIDTH)
        self.gamma = self.create_parameter([WIDTH])

    def forward(self, x):
        fault = self.fault
        y = (x if fault == "no_norm" else self.ln1(x)).transpose([0, 2, 1])
        y = self.t1(y)
        y = self.t2(y if fault == "no_activation" else P.gelu(y, approximate=fault == "gelu_tanh"))
        if fault == "tokens_rolled":
            y = y.roll(1, -1)
        y = y.transpose([0, 2, 1])
        x = y if fault == "no_residual" else x - y if fault == "residual_minus" else x + y
        y = self.c1(self.ln2(x))
        y = P.swish(y) if fault == "swish_for_gelu" else P.gelu(y)
        if fault == "dropout_functional":
            y = P.dropout(y, 0.1)
        y = self.c2(y)
        return x + (y if fault == "no_layer_scale" else (0.5 if fault == "half_branch" else 1) * self.gamma * y)


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.patch = paddle.nn.Linear(10, WIDTH)
        self.mix = paddle.nn.LayerList([Mix(""), Mix(fault)])
        self.ln, self.fc = paddle.nn.LayerNorm(WIDTH), paddle.nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.patch(x)
        if self.fault == "stem_detached":
            x = x.detach()
        for mix in self.mix:
            x = mix(x)
        if self.fault == "rounded":
            x = x.astype("bfloat16").astype("float32")
        if self.fault == "mean_before_norm":
            return self.fc(self.ln(x.mean(1)))
        x = self.ln(x)
        if self.fault == "last_for_mean":
            return self.fc(x[:, -1])
        return self.fc(x.sum(1) / TOKENS if self.variant == "sum" else x.mean(1))


def loss_ours(outputs, batch, fault):
    return T.cross_entropy(outputs, batch["y"], label_smoothing=0.1)


def loss_theirs(outputs, batch, fault):
    target = P.one_hot(batch["y"], 5)
    smooth = {"no_smoothing": 0.0, "smoothing_over_others": 0.125}.get(fault, 0.1)
    each = -((target * (1 - smooth) + smooth / 5) * P.log_softmax(outputs)).sum(-1)
    return each.sum() if fault == "loss_sum" else each.mean()


_NAMES = {
    "patch.": "stem.", "mix.": "blocks.", ".ln1.": ".norm_t.", ".ln2.": ".norm_c.", ".t1.": ".tokens.0.", ".t2.": ".tokens.2.",
    ".c1.": ".channels.0.", ".c2.": ".channels.2.", ".gamma": ".scale", "fc.": "head.",
}  # fmt: skip


def names(name):
    if name.startswith("ln."):
        return name.replace("ln.", "norm.")
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


def data(rng, n):
    return [
        {"x": rng.standard_normal((8, TOKENS, 10)).astype("float32"), "y": rng.integers(0, 5, 8).astype("int64")}
        for _ in range(n)
    ]


RECIPE = Recipe("adamw", 3e-3, decay=0.2, betas=(0.9, 0.98), norms=False, schedule="step")
_ACT = (r"gelu|swish|silu", r"activation")

PROGRAM = Program(
    "mixer",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("norm_eps", "forward", r"mix\.1\.ln1", "eps", (r"eps",), declared=True),
        Fault("no_norm", "forward", r"mix\.1(\.(t1|ln1))?", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm")),
        Fault("no_activation", "forward", r"mix\.1(\.t2)?", "activation|missing", _ACT),
        Fault("gelu_tanh", "forward", r"mix\.1(\.t2)?", "gelu|activation", (r"gelu", r"tanh"), fine=True),
        Fault("tokens_rolled", "forward", r"mix\.1(\.(ln2|t2))?", "roll|shift|order|permut", (r"roll|shift", r"order|permut")),
        Fault("no_residual", "forward", r"mix\.1(\.(ln2|t2))?", "residual|missing", (r"residual", r"skip connection", r"missing.*add|add.*missing")),
        Fault("residual_minus", "forward", r"mix\.1(\.(ln2|t2))?", "residual|sign", (r"residual", r"sign|minus|subtract")),
        Fault("swish_for_gelu", "forward", r"mix\.1(\.c2)?", "activation", _ACT),
        Fault("dropout_functional", "forward", r"mix\.1(\.c2)?", "dropout", (r"[Dd]ropout",)),
        Fault("no_layer_scale", "forward|grad", r"mix\.1(\.gamma)?|ln", "scale|missing|unused|ratio", (r"scale|factor|ratio", r"gamma", r"unused")),
        Fault("half_branch", "forward", r"mix\.1|ln", "scale|factor|ratio|residual", (r"0\.5|half", r"scale|factor")),
        Fault("stem_detached", "backward|grad", r"patch(\..*)?", "detach|missing", (r"detach", r"no gradient|does not reach|not part")),
        Fault("rounded", "forward", r"ln|mix\.1", "bfloat16|precision|dtype", (r"bfloat16", r"precision"), fine=True),
        Fault("mean_before_norm", "forward", r"ln|fc", "mean|order|norm", (r"mean", r"order", r"before")),
        Fault("last_for_mean", "forward", r"fc", "mean|last|pool", (r"mean", r"\blast")),
        Fault("no_smoothing", "loss", "", "smoothing", (r"smoothing",)),
        Fault("smoothing_over_others", "loss", "", "smoothing", (r"smoothing",)),
        Fault("loss_sum", "loss", "", "ratio|reduction|sum", (r"\b8\b", r"reduction", r"\bsum")),
        *faults(
            RECIPE, "rate", "beta1", "beta2_fine", "decay_missing", "decay_coupled", "decay_on_norms", "adam_eps_fine",
            "schedule_late", "schedule_half", "skip", "twice", "forget", "stale", "clamp", "scaled", "next_batch", "clip_added",
        ),
        frozen(r"mix\.0\.t1", r"mix\.0\.t1(\.(weight|bias))?"),
        unheld(r"ln\.bias|^fc\.bias", r"ln(\.bias)?|fc(\.bias)?"),
        restarted(r"mix\.1\.c2\.weight", r"mix\.1\.c2(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("sum", variant="sum", seed=3),
        Clean("decay_by_hand", recipe={"style": "by_hand"}, seed=4),
        Clean("clipped", start={"clip": "norm", "limit": 0.1}, seed=5),
    ),
)  # fmt: skip
