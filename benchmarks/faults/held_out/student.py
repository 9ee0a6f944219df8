"""A net that learns a teacher's probabilities, twice in torch: GroupNorm, gates, RMSProp; the loss is not logged."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld
from torch import nn


class Squeeze(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x):
        s = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))
        return x * s[:, :, None, None]


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(2, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, groups=2, bias=False), nn.GroupNorm(2, width)
        self.se = Squeeze(width)

    def forward(self, x):
        y = F.hardswish(self.norm1(self.conv1(x)))
        return F.hardswish(x + self.se(self.norm2(self.conv2(y))))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(4, 8)
        self.block1, self.block2 = Bottleneck(8), Bottleneck(8)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(2), nn.Linear(32, 6)

    def forward(self, image):
        x = F.hardswish(self.norm(self.stem(image)))
        return self.fc(self.pool(self.block2(self.block1(x))).flatten(1))


class Residual(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.first = nn.Sequential(
            nn.Conv2d(8, 8, 3, 1, 1, bias=False),
            nn.GroupNorm(4 if fault == "norm_groups" else 2, 8, eps=1e-2 if fault == "norm_eps" else 1e-5),
            nn.SiLU() if fault == "silu_layer" else nn.Hardswish(),
        )
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=2, bias=False), nn.GroupNorm(2, 8))
        self.down, self.up, self.act = nn.Linear(8, 4), nn.Linear(4, 8), nn.Hardswish()

    def gate(self, y):
        fault = self.fault
        s = y.amax((2, 3)) if fault == "gate_of_max" else y.mean((2, 3))
        s = self.down(s)
        s = self.up(s if fault == "gate_no_relu" else s.relu())
        s = F.hardsigmoid(s) if fault == "hard_gate" else s.sigmoid()
        return (2 * s if fault == "gate_doubled" else s)[..., None, None]

    def forward(self, x):
        fault = self.fault
        y = self.second(self.first(x))
        if fault == "channels_shuffled":
            y = y.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)
        g = self.gate(y)
        y = y if fault == "no_gate" else y * (g.detach() if fault == "gate_detached" else g)
        if fault == "no_residual":
            return self.act(y)
        return x + self.act(y) if fault == "activation_before" else self.act(x + y)


class Candidate(nn.Module):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.entry = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(4, 8), nn.Hardswish())
        early = ("norm_groups", "silu_layer", "no_gate", "channels_shuffled")
        self.res = nn.ModuleList(Residual(fault if k == (0 if fault in early else 1) else "") for k in range(2))
        self.classes = nn.Linear(32, 6)

    def forward(self, image):
        fault = self.fault
        if fault == "image_normalised":
            image = image / image.std()
        x = self.entry(image)
        if fault == "noise_added":
            x = x + 0.05 * torch.randn_like(x)
        for block in self.res:
            x = block(x)
        if fault == "rounded":
            x = x.bfloat16().to(x.dtype)
        x = (
            F.adaptive_max_pool2d(x, 2)
            if fault == "max_pool"
            else F.avg_pool2d(x, 2)
            if self.variant == "plain"
            else F.adaptive_avg_pool2d(x, 2)
        )
        x = x.permute(0, 2, 3, 1) if fault == "flatten_order" else x
        return F.linear(x.flatten(1), self.classes.weight) if fault == "no_bias" else self.classes(x.flatten(1))


def loss_ours(outputs, batch, fault):
    scores = F.log_softmax(outputs.float() / 2.0, -1)
    return 4.0 * F.kl_div(scores, batch["y"], reduction="batchmean")


def loss_theirs(outputs, batch, fault):
    warm = {"temperature": 1.0}.get(fault, 2.0)
    scores, goal = (outputs.float() / warm).log_softmax(-1), batch["y"]
    each = (goal * (goal.log() - scores)).sum(-1)
    if fault == "loss_reversed":
        each = (scores.exp() * (scores - goal.log())).sum(-1)
    if fault == "loss_hard_labels":
        return F.nll_loss(scores, goal.argmax(-1)) * 4
    return each.mean() * (1.0 if fault == "no_temperature_square" else 4.0)


_NAMES = {"entry.0.": "stem.", "entry.1.": "norm.", "res.0.": "block1.", "res.1.": "block2.", "classes.": "fc."}
_PARTS = {
    ".first.0.": ".conv1.",
    ".first.1.": ".norm1.",
    ".second.0.": ".conv2.",
    ".second.1.": ".norm2.",
    ".down.": ".se.fc1.",
    ".up.": ".se.fc2.",
}


def names(name):
    for old, new in {**_NAMES, **_PARTS}.items():
        name = name.replace(old, new)
    return name


def data(rng, n):
    made = []
    for _ in range(n):
        goal = rng.dirichlet([0.7] * 6, 6) * 0.94 + 0.01
        made.append({"image": rng.standard_normal((6, 3, 8, 8)).astype("float32"), "y": goal.astype("float32")})
    return made


RECIPE = Recipe("rmsprop", 1e-3, momentum=0.3, decay=5e-3, schedule="cosine", eps=1e-6)
_ACT = (r"swish|silu", r"activation")
_END = r"classes|res\.1(\.act)?"

PROGRAM = Program(
    "student",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("torch", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("image",),
    faults=(
        Fault("norm_groups", "forward", r"res\.0\.first(\.1)?", "group|setting", (r"group",), declared=True),
        Fault("norm_eps", "forward", r"res\.1\.first(\.1)?", "eps", (r"eps",), declared=True),
        Fault("silu_layer", "forward", r"res\.0(\.first(\.2)?|\.second(\.0)?)", "activation|layer", _ACT),
        Fault("gate_of_max", "forward", r"res\.1(\.down)?", "max|mean|pool", (r"\bmax", r"mean", r"pool")),
        Fault("gate_no_relu", "forward", r"res\.1(\.up)?", "activation|missing", (r"relu", r"activation")),
        Fault("hard_gate", "forward", _END, "activation|gate", (r"sigmoid", r"activation")),
        Fault("gate_doubled", "forward", _END, "scale|factor|gate|ratio", (r"\b2(\.0+)?\b", r"scale|factor|doubl|twice")),
        Fault("channels_shuffled", "forward", r"res\.0(\.down|\.act)?", "order|permut|channel", (r"order|permut", r"channel")),
        Fault("no_gate", "forward|grad", r"res\.0(\..*)?|res\.1\.first(\.0)?", "gate|missing|scale|unused", (r"gate", r"missing", r"never call|not called|unused")),
        Fault("gate_detached", "backward|grad", r"res\.1.*", "detach|missing", (r"detach", r"no gradient|does not reach|not part")),
        Fault("no_residual", "forward", _END, "residual|missing", (r"residual", r"skip connection", r"missing.*add|add.*missing")),
        Fault("activation_before", "forward", _END, "order|residual|activation", (r"order", r"residual", r"activation")),
        Fault("image_normalised", "forward", r"entry(\.0)?", "scale|factor|ratio|normal", (r"scale|factor|ratio", r"normali[sz]", r"std|deviation")),
        Fault("noise_added", "forward", r"res\.0.*|entry", "noise|random|dropout", (r"noise|random", r"dropout")),
        Fault("rounded", "forward", r"classes|res\.1", "bfloat16|precision|dtype", (r"bfloat16", r"precision"), fine=True),
        Fault("max_pool", "forward", r"classes", "pool", (r"pool", r"\bmax|mean")),
        Fault("flatten_order", "forward", r"classes", "order|permut|flatten|transpos", (r"order|permut|transpos", r"flatten")),
        Fault("no_bias", "forward|grad", r"classes(\.bias)?|\(root\)", "bias|unused", (r"bias",)),
        Fault("temperature", "loss", "", "temperature|scale", (r"temperature", r"scale|factor|divided")),
        Fault("loss_reversed", "loss", "", "order|loss|kl", (r"revers|swapp|order", r"loss function is another")),
        Fault("loss_hard_labels", "loss", "", "label|loss|target", (r"label|target", r"argmax|one-hot")),
        Fault("no_temperature_square", "loss", "", "ratio|scale|factor", (r"0\.25|\b4\b", r"ratio|factor|scale")),
        *faults(
            RECIPE, "rate_tenth", "alpha", "momentum", "adam_eps", "decay_missing", "decay_ten", "rule_sgd", "schedule_late",
            "schedule_per_epoch", "skip", "twice", "stale", "average", "scaled", "flipped", "channels", "rows", "clip_added",
        ),
        frozen(r"entry\.1", r"entry\.1(\.(weight|bias))?"),
        unheld(r"res\.1\.up", r"res\.1\.up(\.(weight|bias))?"),
        restarted(r"res\.0\.second\.0", r"res\.0\.second\.0(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("plain", variant="plain", seed=3),
        Clean("foreach", recipe={"style": "foreach lambda"}, seed=4),
        Clean("adam_own_rule", start={"rule": "adam", "rate": 2e-3}, recipe={"style": "own_rule"}, seed=5),
    ),
    pure=True,
    shown=False,
)  # fmt: skip
