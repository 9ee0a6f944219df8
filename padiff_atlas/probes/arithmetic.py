"""Probes of rounding, division, functions of single numbers, and matrices."""

from __future__ import annotations

import numpy as np

from padiff_atlas.probe import Group, Probe

_RNG = np.random.default_rng(6)

ARITHMETIC = Group(
    "arithmetic",
    (
        Probe("round of halves", "torch.round(halves)", formula="np.round(halves)"),
        Probe("round to one decimal", "torch.round(x, decimals=1)", formula="np.round(x, 1)"),
        Probe("trunc", "torch.trunc(halves)"),
        Probe("floor_divide of negative numbers", "torch.floor_divide(whole, divisor)", formula="whole // divisor"),
        Probe("remainder of negative numbers", "torch.remainder(whole, divisor)", formula="whole % divisor"),
        Probe(
            "fmod of negative numbers",
            "torch.fmod(whole, divisor)",
            "paddle.mod(whole, divisor)",
            mended="whole - paddle.trunc(whole / divisor).astype('int64') * divisor",
            formula="np.fmod(whole, divisor)",
            note="paddle has the remainder with the divisor's sign only",
        ),
        Probe("% of negative numbers", "whole % divisor", formula="whole % divisor"),
        Probe("// of negative numbers", "whole // divisor", formula="whole // divisor"),
        Probe("whole numbers / whole numbers", "whole / divisor", formula="whole / divisor"),
        Probe("division of floats by zero", "x / none"),
        Probe("cast of floats to whole numbers", "halves.to(torch.int64)", "halves.astype('int64')"),
        Probe("sign of 0", "torch.sign(x * 0)"),
        Probe("pow of a negative number", "torch.pow(halves, 2)"),
        Probe("pow, gradient at 0", "torch.pow(halves * 0, 0.5)", way="gradient"),
        Probe("atan2, gradient at 0", "torch.atan2(none[0], none[1])", way="gradient"),
        Probe("nan_to_num", "torch.nan_to_num(x / none * none)"),
        Probe("isclose", "torch.isclose(x, x * (1 + 2e-5))"),
        Probe("lerp", "torch.lerp(x, x * 2, 0.3)"),
        Probe("addmm", "torch.addmm(square, square, square, beta=0.5, alpha=2.0)"),
        Probe("arange", "torch.arange(0, 1, 0.1)"),
        Probe("linspace", "torch.linspace(0, 1, 7)"),
        Probe("logit", "torch.logit(unit, eps=1e-6)"),
        Probe("logit without eps, at 0 and 1", "torch.logit(unit)"),
        Probe("erfinv", "torch.erfinv(unit * 0.9)", formula="special.erfinv(unit * 0.9)"),
        Probe("lgamma", "torch.lgamma(unit + 0.5)", formula="special.gammaln(unit + 0.5)"),
        Probe(
            "xlogy at 0",
            "torch.special.xlogy(none, none)",
            "none * paddle.log(none)",
            mended="paddle.where(none == 0, none, none * paddle.log(none))",
            formula="special.xlogy(none, none)",
            note="paddle has none; written out, 0 * log(0) is not a number",
        ),
        Probe("matmul", "torch.matmul(square, square)", formula="square @ square"),
        Probe("inverse", "torch.linalg.inv(square)", formula="np.linalg.inv(square)"),
        Probe("svd", "torch.linalg.svd(square)[1]"),
        Probe("svd, right factor", "torch.linalg.svd(square)[2].abs()", formula="np.abs(np.linalg.svd(square)[2])"),
    ),
    {
        "x": _RNG.normal(size=(4, 6)),
        "none": np.zeros((4, 6)),
        "square": _RNG.normal(size=(4, 4)) + 3 * np.eye(4),
        "halves": np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]),
        "whole": np.array([-7, -3, 5, 8]),
        "divisor": np.array([3, -2, -3, 5]),
        "unit": np.array([0.0, 0.2, 0.5, 1.0]),
    },
)
