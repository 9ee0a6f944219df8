"""Probes of activations and softmax."""

from __future__ import annotations

import numpy as np

from padiff_atlas.probe import Group, Probe

_RNG = np.random.default_rng(2)

ACTIVATIONS = Group(
    "activations",
    (
        Probe("gelu", "F.gelu(x)", formula="x * special.ndtr(x)"),
        Probe(
            "gelu, tanh",
            "F.gelu(x, approximate='tanh')",
            "F.gelu(x, approximate=True)",
            formula="0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))",
        ),
        Probe("GELU", "nn.GELU()(x)"),
        Probe("silu", "F.silu(x)", formula="x * special.expit(x)"),
        Probe("mish", "F.mish(x)", formula="x * np.tanh(np.logaddexp(0, x))"),
        Probe("relu, gradient at 0", "F.relu(edges)", way="gradient"),
        Probe("relu6, gradient at 0 and 6", "F.relu6(edges)", way="gradient"),
        Probe("hardtanh, gradient at the edges", "F.hardtanh(edges)", way="gradient"),
        Probe("leaky_relu", "F.leaky_relu(x)"),
        Probe(
            "leaky_relu, gradient at 0",
            "F.leaky_relu(edges, 0.1)",
            way="gradient",
            mended="paddle.where(edges > 0, edges, 0.1 * edges)",
            note="at exactly 0 paddle takes the slope of the positive side",
        ),
        Probe("elu", "F.elu(x, alpha=0.5)", formula="np.where(x > 0, x, 0.5 * np.expm1(x))"),
        Probe("selu", "F.selu(x)"),
        Probe("celu", "F.celu(x, alpha=0.5)", formula="np.maximum(x, 0) + np.minimum(0, 0.5 * np.expm1(x / 0.5))"),
        Probe("softplus", "F.softplus(x)", formula="np.logaddexp(0, x)"),
        Probe("softplus, beta and threshold", "F.softplus(x, beta=2, threshold=3)"),
        Probe("softsign", "F.softsign(x)", formula="x / (1 + np.abs(x))"),
        Probe("tanhshrink", "F.tanhshrink(x)", formula="x - np.tanh(x)"),
        Probe("softshrink", "F.softshrink(x)"),
        Probe("hardshrink", "F.hardshrink(x)"),
        Probe("hardsigmoid", "F.hardsigmoid(x)", formula="np.clip(x / 6 + 0.5, 0, 1)"),
        Probe("hardswish", "F.hardswish(x)", formula="x * np.clip(x + 3, 0, 6) / 6"),
        Probe("hardswish, gradient at -3 and 3", "F.hardswish(edges)", way="gradient"),
        Probe("logsigmoid", "F.logsigmoid(x)", "F.log_sigmoid(x)", formula="-np.logaddexp(0, -x)"),
        Probe("threshold", "F.threshold(x, 1.0, 0.0)", "F.thresholded_relu(x, 1.0, 0.0)"),
        Probe("glu", "F.glu(x)", formula="x[:, :3] * special.expit(x[:, 3:])"),
        Probe("prelu", "F.prelu(x, slope)"),
        Probe("PReLU, slope by default", "nn.PReLU()(x)"),
        Probe("RReLU, evaluating", "layer = nn.RReLU()\nlayer.eval()\nlayer(x)"),
        Probe("sigmoid of large values", "torch.sigmoid(x * 30)", "F.sigmoid(x * 30)", formula="special.expit(x * 30)"),
        Probe("erf", "torch.erf(x)", formula="special.erf(x)"),
        Probe("abs, gradient at 0", "edges.abs()", way="gradient"),
        Probe("sqrt, gradient at 0", "(edges * 0).sqrt()", way="gradient"),
        Probe("softmax", "F.softmax(x, dim=1)", "F.softmax(x, axis=1)", formula="special.softmax(x, 1)"),
        Probe("Softmax, axis by default, of a matrix", "nn.Softmax()(x)"),
        Probe(
            "Softmax, axis by default, of 3 axes",
            "nn.Softmax()(cube)",
            mended="nn.Softmax(axis=0)(cube)",
            mended_torch="nn.Softmax(dim=-1)(cube)",
            note="torch takes axis 0 of tensors with 3 axes where none is given (and warns), paddle the last one",
        ),
        Probe(
            "log_softmax", "F.log_softmax(x, dim=1)", "F.log_softmax(x, axis=1)", formula="special.log_softmax(x, 1)"
        ),
        Probe(
            "log_softmax of large values",
            "F.log_softmax(x * 100, dim=1)",
            "F.log_softmax(x * 100, axis=1)",
            mended="x * 100 - paddle.logsumexp(x * 100, 1, keepdim=True)",
            formula="special.log_softmax(x * 100, 1)",
            note="on a CPU paddle gives nothing below -64",
        ),
        Probe("softmax where a row is masked", "F.softmax(x + mask, dim=1)", "F.softmax(x + mask, axis=1)"),
        Probe(
            "LogSoftmax, axis by default, of 3 axes",
            "nn.LogSoftmax()(cube)",
            mended="nn.LogSoftmax(axis=0)(cube)",
            note="as with Softmax",
        ),
        Probe("Softmax2d", "nn.Softmax2d()(maps)", "nn.Softmax2D()(maps)"),
    ),
    {
        "x": _RNG.normal(size=(5, 6)) * 3,
        "edges": np.array([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0]),
        "slope": np.array([0.3]),
        "cube": _RNG.normal(size=(2, 3, 4)),
        "maps": _RNG.normal(size=(2, 3, 4, 4)),
        "mask": np.where(np.arange(5)[:, None] == 2, -np.inf, 0.0),
    },
)
