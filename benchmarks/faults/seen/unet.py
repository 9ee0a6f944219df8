"""A small U-Net: convolutions, pooling, interpolation, skips; binary loss per pixel, Adam, a rate for the head."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults, restarted, unheld


def twice(inp, out):
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(inp, out, 3, padding=1), nn.GroupNorm(2, out), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.ReLU()
    )


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = twice(2, 6), twice(6, 8), twice(8, 10)
        self.up2, self.up1 = twice(18, 8), twice(14, 6)
        self.final = torch.nn.Conv2d(6, 1, 1)

    def forward(self, image):
        a = self.down1(image)
        b = self.down2(T.max_pool2d(a, 2))
        c = self.bottom(T.avg_pool2d(b, 3, 2, 1, count_include_pad=False))
        b = self.up2(torch.cat([T.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False), b], 1))
        a = self.up1(torch.cat([T.interpolate(b, scale_factor=2, mode="nearest"), a], 1))
        return self.final(a).squeeze(1)


class Two(paddle.nn.Layer):
    def __init__(self, inp, out, fault=""):
        super().__init__()
        self.fault = fault
        self.c1 = paddle.nn.Conv2D(inp, out, 3, padding=1)
        self.norm = paddle.nn.GroupNorm(
            1 if fault == "groups" else 2, out, epsilon=1e-2 if fault == "groupnorm_eps" else 1e-5
        )
        self.c2 = paddle.nn.Conv2D(out, out, 3, padding=1)

    def forward(self, x):
        x = self.norm(self.c1(x))
        x = P.leaky_relu(x, 0.05) if self.fault == "leaky" else P.relu(x)
        x = self.c2(x)
        return x if self.fault == "no_last_relu" else P.relu(x)


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fault, self.variant = fault, variant
        self.enc1, self.enc2 = Two(2, 6), Two(6, 8, fault if fault in ("groups", "leaky") else "")
        self.mid = Two(8, 10, fault if fault in ("groupnorm_eps", "no_last_relu") else "")
        self.dec2, self.dec1, self.mask = Two(18, 8), Two(14, 6), paddle.nn.Conv2D(6, 1, 1)
        if variant == "layers":
            self.pool, self.mean = paddle.nn.MaxPool2D(2), paddle.nn.AvgPool2D(3, 2, 1)
            self.grow = paddle.nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, image):
        fault = self.fault
        a = self.enc1(image)
        if self.variant == "layers":
            b = self.enc2(self.pool(a))
            c = self.mid(self.mean(b))
        else:
            b = self.enc2(P.avg_pool2d(a, 2) if fault == "avg_for_max" else P.max_pool2d(a, 2))
            c = self.mid(P.avg_pool2d(b, 3, 2, 1, exclusive=fault != "pool_counts_pads"))
        mode = "nearest" if fault == "nearest_for_bilinear" else "bilinear"
        more = {} if mode == "nearest" else {"align_corners": fault == "align_corners"}
        c = P.interpolate(c, scale_factor=2, mode=mode, **more)
        b = self.dec2(paddle.concat([b, c] if fault == "concat_order" else [c, b], 1))
        grown = self.grow(b) if self.variant == "layers" else P.interpolate(b, scale_factor=2, mode="nearest")
        skip = a * 0 if fault == "no_skip" else a.detach() if fault == "skip_detached" else a
        if fault == "skip_rolled":
            skip = paddle.roll(skip, 1, -1)
        out = self.mask(self.dec1(paddle.concat([grown, skip], 1)))[:, 0]
        return out.transpose([0, 2, 1]) if fault == "output_turned" else out


def loss_ours(outputs, batch, fault):
    return T.binary_cross_entropy_with_logits(outputs, batch["y"])


def loss_theirs(outputs, batch, fault):
    if fault == "loss_weighted":
        return P.binary_cross_entropy_with_logits(outputs, batch["y"], weight=1 + batch["y"])
    if fault == "loss_mse":
        return P.mse_loss(P.sigmoid(outputs), batch["y"])
    return P.binary_cross_entropy_with_logits(outputs, batch["y"])


_NAMES = {"enc1.": "down1.", "enc2.": "down2.", "mid.": "bottom.", "dec2.": "up2.", "dec1.": "up1.", "mask.": "final."}


def names(name):
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name.replace(".c1.", ".0.").replace(".norm.", ".1.").replace(".c2.", ".3.")


def data(rng, n):
    made = []
    for _ in range(n):
        image = rng.standard_normal((4, 2, 8, 8)).astype("float32")
        made.append({"image": image, "y": (image.sum(1) > 0.5).astype("float32")})
    return made


RECIPE = Recipe("adam", 5e-3, head=r"final|mask", head_rate=3.0)
_RELU = (r"relu", r"activation", r"slope")

PROGRAM = Program(
    "unet",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("image",),
    faults=(
        Fault("groups", "forward", r"enc2\.norm", "group|setting", (r"group",), declared=True),
        Fault("groupnorm_eps", "forward", r"mid\.norm", "eps", (r"eps",), declared=True),
        Fault("leaky", "forward", r"enc2(\.c2)?", "activation|slope", _RELU),
        Fault("no_last_relu", "forward", r"mid|dec2(\.c1)?", "activation|missing", _RELU),
        Fault("avg_for_max", "forward", r"enc2(\.c1)?|pool", "pool", (r"pool", r"\bmax|mean|average")),
        Fault("pool_counts_pads", "forward", r"mid(\.c1)?|mean", "pool|exclusive|pad", (r"exclusive|count_include_pad", r"pad")),
        Fault("nearest_for_bilinear", "forward", r"dec2(\.c1)?", "interpol|mode", (r"interpol", r"nearest|bilinear")),
        Fault("align_corners", "forward", r"dec2(\.c1)?", "align|interpol", (r"align_corners", r"interpol")),
        Fault("concat_order", "forward", r"dec2(\.c1)?", "order|concat|permut", (r"order", r"concat|cat\b", r"permut")),
        Fault("no_skip", "forward", r"dec1(\.c1)?", "skip|residual|missing|zero", (r"skip", r"zero", r"missing")),
        Fault("skip_detached", "backward|grad", r"enc.*|pool|\(root\)", "detach|missing", (r"detach", r"no gradient", r"missing")),
        Fault("skip_rolled", "forward", r"dec1(\.c1)?", "roll|shift|order", (r"roll", r"shift")),
        Fault("output_turned", "forward", r"\(root\)|mask", "transpos|order|ax", (r"transpos", r"ax[ei]s", r"turned|order")),
        Fault("loss_weighted", "loss", "", "weight", (r"weight",)),
        Fault("loss_mse", "loss", "", "loss", (r"mse|squared|mean square", r"loss function is another")),
        *faults(
            RECIPE, "rate", "beta1", "beta2", "head_rate", "adam_eps", "skip", "stale", "reload", "clamp", "scaled",
            "channels", "flipped", "rows", "clip_added",
        ),
        unheld(r"mask", r"mask(\.(weight|bias))?"),
        restarted(r"dec2\.c1\.weight", r"dec2\.c1(\.weight)?"),
    ),
    clean=(
        Clean("twin"),
        Clean("other_seed", seed=2),
        Clean("layers", variant="layers", seed=3),
        Clean("clipped", start={"clip": "norm", "limit": 0.1}, recipe={"style": "own_clip"}, seed=4),
    ),
)  # fmt: skip
