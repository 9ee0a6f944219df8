"""Probes of reductions, order and ties."""

from __future__ import annotations

import numpy as np

from padiff_atlas.probe import Group, Probe

_RNG = np.random.default_rng(5)

REDUCTIONS = Group(
    "reductions",
    (
        Probe("std", "torch.std(x, dim=1)", "paddle.std(x, axis=1)", formula="x.std(1, ddof=1)"),
        Probe("var", "torch.var(x)", formula="x.var(ddof=1)"),
        Probe("std of one value", "torch.std(one)"),
        Probe(
            "median of an even number",
            "torch.median(even)",
            mended="paddle.median(even, mode='min')",
            formula="np.median(even)",
            mended_torch="torch.quantile(even, 0.5)",
            note="of two middle values torch takes the lower one, paddle their mean",
        ),
        Probe(
            "median over an axis",
            "torch.median(x, dim=1)",
            "paddle.median(x, axis=1)",
            mended="paddle.median(x, axis=1, mode='min')",
            note="torch gives the indices too, and the lower of two middle values",
        ),
        Probe(
            "nanmedian of an even number",
            "torch.nanmedian(even)",
            mended="paddle.nanmedian(even, mode='min')",
            note="as with the median",
        ),
        Probe("mode with ties", "torch.mode(ties)"),
        Probe("argmax with ties", "torch.argmax(ties)"),
        Probe("argmin with ties", "torch.argmin(-ties)"),
        Probe(
            "max over an axis",
            "torch.max(x, dim=1)",
            "paddle.max(x, axis=1)",
            mended="paddle.max(x, axis=1), paddle.argmax(x, axis=1)",
            note="torch gives the indices too",
        ),
        Probe("max over an axis with ties, index", "torch.max(ties, dim=0)[1]", "paddle.argmax(ties, axis=0)"),
        Probe("max, gradient with ties", "torch.max(ties)", way="gradient"),
        Probe("amax, gradient with ties", "torch.amax(ties, 0)", way="gradient"),
        Probe(
            "max over an axis, gradient with ties",
            "torch.max(ties, dim=0)[0]",
            "paddle.max(ties, axis=0)",
            way="gradient",
            mended="paddle.take_along_axis(ties, paddle.argmax(ties, axis=0, keepdim=True), 0)",
            note="torch gives it all to the element whose index it returns, paddle shares it evenly",
        ),
        Probe("maximum, gradient with ties", "torch.maximum(ties, flipped)", way="gradient"),
        Probe(
            "clamp, gradient at the bounds",
            "torch.clamp(ties, 1.0, 3.0)",
            "paddle.clip(ties, 1.0, 3.0)",
            way="gradient",
        ),
        Probe("sort with ties, indices", "torch.sort(ties, stable=True)[1]", "paddle.argsort(ties, stable=True)"),
        Probe(
            "sort",
            "torch.sort(x, dim=1)",
            "paddle.sort(x, axis=1)",
            mended="paddle.sort(x, axis=1), paddle.argsort(x, axis=1)",
            note="torch gives the indices too",
        ),
        Probe("topk", "torch.topk(x, 2, dim=1)", "paddle.topk(x, 2, axis=1)"),
        Probe("kthvalue", "torch.kthvalue(x, 2, dim=1)", "paddle.kthvalue(x, 2, axis=1)"),
        Probe("norm", "torch.norm(x)", "paddle.linalg.norm(x)", formula="np.linalg.norm(x)"),
        Probe("norm, gradient at 0", "torch.norm(x * 0)", "paddle.linalg.norm(x * 0)", way="gradient"),
        Probe(
            "linalg.norm of a matrix, 2",
            "torch.linalg.norm(x, ord=2)",
            "paddle.linalg.norm(x, p=2)",
            formula="np.linalg.norm(x, 2)",
            mended="paddle.linalg.matrix_norm(x, p=2)",
            note="the largest singular value in torch, the root of the sum of squares in paddle",
        ),
        Probe(
            "logsumexp",
            "torch.logsumexp(x * 100, dim=1)",
            "paddle.logsumexp(x * 100, axis=1)",
            formula="special.logsumexp(x * 100, 1)",
        ),
        Probe("quantile", "torch.quantile(x, 0.3)"),
        Probe(
            "cumsum, axis left out",
            "torch.cumsum(x, 0)",
            "paddle.cumsum(x)",
            mended="paddle.cumsum(x, 0)",
            note="torch requires the axis; paddle flattens without it",
        ),
        Probe("mean of whole numbers", "torch.mean(counts.float())", "paddle.mean(counts.astype('float32'))"),
        Probe("sum of booleans", "torch.sum(ties > 1)"),
        Probe("prod", "torch.prod(x)", formula="np.prod(x)"),
        Probe("histc", "torch.histc(x, 5)", "paddle.histogram(x, 5)"),
        Probe("bincount", "torch.bincount(counts)"),
        Probe("unique", "torch.unique(ties)"),
        Probe("cov", "torch.cov(x)", "paddle.linalg.cov(x)"),
        Probe("cdist", "torch.cdist(x, x[:2])"),
    ),
    {
        "x": _RNG.normal(size=(4, 6)),
        "one": np.array([1.5]),
        "even": np.array([3.0, 1.0, 4.0, 2.0]),
        "ties": np.array([1.0, 3.0, 2.0, 3.0, 1.0]),
        "flipped": np.array([1.0, 2.0, 2.0, 4.0, 0.0]),
        "counts": np.array([1, 2, 2, 5]),
    },
)
