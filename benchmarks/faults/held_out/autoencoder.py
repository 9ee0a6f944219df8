"""A convolutional autoencoder: BatchNorm, strides, transposed convolution, upsampling; KL and MSE, Nesterov."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, frozen, restarted, unheld


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.encode = nn.Sequential(
            nn.Conv2d(2, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.LeakyReLU(0.2), nn.Conv2d(6, 8, 3, 1, 1), nn.ELU(),
        )  # fmt: skip
        self.mean, self.spread = nn.Linear(8 * 16, 5), nn.Linear(8 * 16, 5)
        self.grow = nn.Linear(5, 8 * 16)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(8, 6, 2, 2), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=1, padding_mode="reflect"),
        )  # fmt: skip

    def forward(self, image):
        x = self.encode(image).flatten(1)
        mean, spread = self.mean(x), self.spread(x)
        y = self.grow(mean + 0.1 * torch.exp(0.5 * spread)).reshape(-1, 8, 4, 4)
        return torch.sigmoid(self.decode(y)), mean, spread


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        nn = paddle.nn
        self.conv_a = nn.Conv2D(2, 6, 3, 2, 1)
        self.bn = nn.BatchNorm2D(
            6, momentum=0.5 if fault == "bn_momentum" else 0.9, epsilon=1e-3 if fault == "bn_eps" else 1e-5
        )
        self.conv_b = nn.Conv2D(6, 8, 3, 1, 2 if fault == "dilated" else 1, dilation=2 if fault == "dilated" else 1)
        self.to_mean, self.to_spread, self.from_code = nn.Linear(128, 5), nn.Linear(128, 5), nn.Linear(5, 128)
        self.deconv = nn.Conv2DTranspose(8, 6, 2, 2)
        self.last = nn.Conv2D(6, 2, 3, padding=1, padding_mode="zeros" if fault == "padding_mode" else "reflect")

    def forward(self, image):
        fault = self.fault
        if fault == "bn_eval":
            self.bn.eval()
        x = self.conv_a(image)
        x = x if fault == "no_norm" else self.bn(x)
        x = P.relu(x) if fault == "relu_for_leaky" else P.leaky_relu(x, 0.01 if fault == "slope" else 0.2)
        x = P.elu(self.conv_b(x), 0.5 if fault == "elu_alpha" else 1.0)
        if fault == "flatten_order":
            x = x.transpose([0, 2, 3, 1])
        x = x.reshape([x.shape[0], -1])
        mean, spread = self.to_mean(x), self.to_spread(x)
        width = paddle.exp(spread) if fault == "variance_for_deviation" else paddle.exp(0.5 * spread)
        code = mean if fault == "no_spread" else mean + 0.1 * width
        if fault == "code_detached":
            code = code.detach()
        if fault == "rounded":
            code = code.astype("float16").astype("float32")
        y = self.from_code(code).reshape([-1, 8, 4, 4])
        if fault == "code_turned":
            y = y.transpose([0, 1, 3, 2])
        y = self.deconv(y)
        y = y if fault == "no_relu" else P.relu(y)
        y = self.last(y)
        y = P.hardsigmoid(y) if fault == "hardsigmoid" else P.sigmoid(y)
        return y, mean, spread


def loss_ours(outputs, batch, fault):
    image, mean, spread = outputs
    divergence = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1).mean()
    return T.mse_loss(image, batch["y"]) + 0.05 * divergence


def loss_theirs(outputs, batch, fault):
    image, mean, spread = outputs
    fit = ((image - batch["y"]) ** 2).mean()
    each = 0.5 * (mean**2 + spread.exp() - spread - 1)
    if fault == "no_divergence":
        return fit
    if fault == "divergence_mean":
        return fit + 0.05 * each.mean()
    if fault == "divergence_sign":
        return fit - 0.05 * each.sum(1).mean()
    if fault == "fit_sum":
        return ((image - batch["y"]) ** 2).sum([1, 2, 3]).mean() + 0.05 * each.sum(1).mean()
    return fit + 0.05 * each.sum(1).mean()


_NAMES = {
    "conv_a.": "encode.0.", "bn.": "encode.1.", "conv_b.": "encode.3.", "to_mean.": "mean.", "to_spread.": "spread.",
    "from_code.": "grow.", "deconv.": "decode.0.", "last.": "decode.2.",
}  # fmt: skip


def names(name):
    for old, new in _NAMES.items():
        if name.startswith(old):
            return name.replace(old, new, 1)
    return name


def data(rng, n):
    made = []
    for _ in range(n):
        image = rng.random((6, 2, 8, 8)).astype("float32")
        made.append({"image": image, "y": image.copy()})
    return made


RECIPE = Recipe(rate=0.05, momentum=0.9, nesterov=True, schedule="cosine", clip="value", limit=2e-3)

PROGRAM = Program(
    "autoencoder",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("image",),
    faults=(
        Fault("bn_momentum", "weight|forward|update", r"bn(\..*)?", "momentum|running", (r"momentum",), 0, 1, declared=True),
        Fault("bn_eps", "forward", r"bn", "eps", (r"eps",), declared=True),
        Fault("bn_eval", "forward", r"bn", "stat|eval|mode", (r"running stat", r"batch stat", r"\beval\b")),
        Fault("dilated", "forward", r"conv_b", "dilation|padding|setting", (r"dilation", r"padding"), declared=True),
        Fault("padding_mode", "forward", r"last", "padding|setting", (r"padding", r"reflect"), declared=True),
        Fault("no_norm", "forward", r"bn|conv_b|\(root\)", "norm|missing", (r"norm\w* (is )?(missing|left out|skipped)", r"never call|not called", r"missing.*norm", r"without .*norm")),
        Fault("relu_for_leaky", "forward", r"conv_b|bn", "activation|slope", (r"relu", r"slope", r"activation")),
        Fault("slope", "forward", r"conv_b|bn", "activation|slope", (r"relu", r"slope", r"activation")),
        Fault("elu_alpha", "forward", r"to_mean|to_spread|conv_b", "activation|alpha", (r"elu", r"alpha", r"activation")),
        Fault("flatten_order", "forward", r"to_mean|to_spread|conv_b", "order|permut|flatten|transpos", (r"order|permut|transpos", r"flatten")),
        Fault("variance_for_deviation", "forward", r"from_code", "exp|scale|factor|square", (r"exp|square|root|deviation", r"0\.5|half")),
        Fault("no_spread", "forward|backward|grad", r"from_code|to_spread.*", "missing|add", (r"missing", r"\badd")),
        Fault("code_detached", "backward|grad", r"to_.*|conv.*|bn.*|\(root\)", "detach|missing", (r"detach", r"no gradient|does not reach|not part", r"missing")),
        Fault("rounded", "forward", r"from_code", "float16|precision|dtype", (r"float16", r"precision"), fine=True),
        Fault("code_turned", "forward", r"deconv|from_code", "transpos|order|permut|ax", (r"transpos", r"ax[ei]s", r"order|permut|turned")),
        Fault("no_relu", "forward", r"last|deconv", "activation|missing", (r"relu", r"activation")),
        Fault("hardsigmoid", "forward", r"\(root\)|last", "activation", (r"sigmoid", r"activation")),
        Fault("no_divergence", "loss", "", "auxiliary|missing|kl", (r"auxiliary", r"missing", r"another term|divergence|KL")),
        Fault("divergence_mean", "loss", "", "auxiliary|reduction|factor", (r"auxiliary", r"reduction", r"another term|divergence|KL")),
        Fault("divergence_sign", "loss", "", "auxiliary|sign", (r"auxiliary", r"sign", r"another term|divergence|KL")),
        Fault("fit_sum", "loss", "", "reduction|sum|ratio", (r"reduction", r"\bsum", r"\b128\b")),
        *faults(
            RECIPE, "rate", "momentum_missing", "no_nesterov", "schedule_half", "schedule_per_epoch", "clip_missing",
            "clip_limit", "skip", "twice", "stale", "reload", "offset", "channels", "rows", "rule_adam",
        ),
        frozen(r"bn\.weight", r"bn(\.weight)?"),
        unheld(r"deconv", r"deconv(\.(weight|bias))?"),
        restarted(r"from_code\.weight", r"from_code(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("own_clip", recipe={"style": "own_clip"}, seed=3),
        Clean("decay", start={"decay": 1e-2, "schedule": "step", "clip": ""}, seed=4),
    ),
)  # fmt: skip
