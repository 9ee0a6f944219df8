"""Probes of pooling, normalisation and dropout."""

from __future__ import annotations

import numpy as np

from padiff_atlas.probe import Group, Probe

_RNG = np.random.default_rng(1)
_IMAGES = _RNG.normal(loc=0.5, size=(2, 4, 7, 7))

POOLING = Group(
    "pooling",
    (
        Probe(
            "AvgPool2d, padded",
            "nn.AvgPool2d(3, stride=2, padding=1)(images)",
            "nn.AvgPool2D(3, stride=2, padding=1)(images)",
            mended="nn.AvgPool2D(3, stride=2, padding=1, exclusive=False)(images)",
            mended_torch="nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)(images)",
            note="paddle leaves padded places out of the count by default, torch counts them",
        ),
        Probe("AvgPool2d, not padded", "nn.AvgPool2d(3, stride=2)(images)", "nn.AvgPool2D(3, stride=2)(images)"),
        Probe(
            "AvgPool2d, padded, ceil_mode",
            "nn.AvgPool2d(2, stride=2, padding=1, ceil_mode=True)(images)",
            "nn.AvgPool2D(2, stride=2, padding=1, ceil_mode=True)(images)",
            mended="nn.AvgPool2D(2, stride=2, padding=1, ceil_mode=True, exclusive=False)(images)[..., :4, :4]",
            note="paddle has windows that lie in the padding behind the image, and their mean is not a number; torch "
            "leaves them out",
        ),
        Probe(
            "AvgPool2d, not padded, ceil_mode",
            "nn.AvgPool2d(2, stride=2, ceil_mode=True)(images)",
            "nn.AvgPool2D(2, stride=2, ceil_mode=True)(images)",
        ),
        Probe(
            "avg_pool2d, divisor_override",
            "F.avg_pool2d(images, 3, stride=2, divisor_override=5)",
        ),
        Probe(
            "AvgPool1d, padded",
            "nn.AvgPool1d(3, stride=2, padding=1)(rows)",
            "nn.AvgPool1D(3, stride=2, padding=1)(rows)",
            mended="nn.AvgPool1D(3, stride=2, padding=1, exclusive=False)(rows)",
        ),
        Probe(
            "AvgPool3d, padded",
            "nn.AvgPool3d(3, stride=2, padding=1)(volumes)",
            "nn.AvgPool3D(3, stride=2, padding=1)(volumes)",
            mended="nn.AvgPool3D(3, stride=2, padding=1, exclusive=False)(volumes)",
        ),
        Probe(
            "MaxPool2d, padded",
            "nn.MaxPool2d(3, stride=2, padding=1)(images)",
            "nn.MaxPool2D(3, stride=2, padding=1)(images)",
        ),
        Probe(
            "MaxPool2d, ceil_mode",
            "nn.MaxPool2d(2, stride=2, ceil_mode=True)(images)",
            "nn.MaxPool2D(2, stride=2, ceil_mode=True)(images)",
        ),
        Probe("MaxPool2d, gradient where all are equal", "F.max_pool2d(images * 0, 2)", way="gradient"),
        Probe(
            "MaxPool2d, indices",
            "F.max_pool2d(images, 2, return_indices=True)",
            "F.max_pool2d(images, 2, return_mask=True)",
        ),
        Probe("AdaptiveAvgPool2d", "nn.AdaptiveAvgPool2d(3)(images)", "nn.AdaptiveAvgPool2D(3)(images)"),
        Probe("AdaptiveMaxPool2d", "nn.AdaptiveMaxPool2d(3)(images)", "nn.AdaptiveMaxPool2D(3)(images)"),
        Probe("LPPool2d", "nn.LPPool2d(2, 3, stride=2)(images)", "nn.LPPool2D(2, 3, stride=2)(images)"),
        Probe(
            "MaxUnpool2d",
            "nn.MaxUnpool2d(2)(*F.max_pool2d(images[..., :6, :6], 2, return_indices=True))",
            "nn.MaxUnPool2D(2)(*F.max_pool2d(images[..., :6, :6], 2, return_mask=True))",
        ),
    ),
    {"images": _IMAGES, "rows": _RNG.normal(size=(2, 3, 9)), "volumes": _RNG.normal(size=(1, 2, 5, 5, 5))},
)

NORMS = Group(
    "normalisation",
    (
        Probe("BatchNorm2d, training, output", "nn.BatchNorm2d(4)(images)", "nn.BatchNorm2D(4)(images)"),
        Probe(
            "BatchNorm2d, running_mean after a step",
            "layer = nn.BatchNorm2d(4, momentum=0.1)\nlayer(images)\nlayer.running_mean",
            "layer = nn.BatchNorm2D(4, momentum=0.1)\nlayer(images)\nlayer._mean",
            mended="layer = nn.BatchNorm2D(4, momentum=0.9)\nlayer(images)\nlayer._mean",
            formula="0.1 * images.mean((0, 2, 3))",
            note="paddle's momentum is the share of the old value, torch's that of the new one",
        ),
        Probe(
            "BatchNorm2d, running_mean, momentum by default",
            "layer = nn.BatchNorm2d(4)\nlayer(images)\nlayer.running_mean",
            "layer = nn.BatchNorm2D(4)\nlayer(images)\nlayer._mean",
        ),
        Probe(
            "BatchNorm2d, running_var, momentum by default",
            "layer = nn.BatchNorm2d(4)\nlayer(images)\nlayer.running_var",
            "layer = nn.BatchNorm2D(4)\nlayer(images)\nlayer._variance",
            mended="layer = nn.BatchNorm2D(4)\nlayer(images)\nn = images.size / images.shape[1]\n"
            "0.9 + (layer._variance - 0.9) * n / (n - 1)",
            formula="0.9 + 0.1 * images.var((0, 2, 3), ddof=1)",
            note="paddle keeps the biased variance of a batch, torch the unbiased one: n / (n - 1) times it, with n "
            "values in a channel; no argument changes it",
        ),
        Probe(
            "BatchNorm2d, evaluating",
            "layer = nn.BatchNorm2d(4)\nlayer.eval()\nlayer(images)",
            "layer = nn.BatchNorm2D(4)\nlayer.eval()\nlayer(images)",
        ),
        Probe(
            "BatchNorm2d without running statistics, evaluating",
            "layer = nn.BatchNorm2d(4, track_running_stats=False)\nlayer.eval()\nlayer(images)",
            "layer = nn.BatchNorm2D(4, use_global_stats=False)\nlayer.eval()\nlayer(images)",
        ),
        Probe(
            "batch_norm, training by default",
            "F.batch_norm(images, stat_mean, stat_var)",
            formula="(images - stat_mean[:, None, None]) / np.sqrt(stat_var[:, None, None] + 1e-5)",
        ),
        Probe("BatchNorm1d of rows", "nn.BatchNorm1d(6)(x)", "nn.BatchNorm1D(6)(x)"),
        Probe(
            "LayerNorm",
            "nn.LayerNorm(6)(x)",
            formula="(x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)",
        ),
        Probe("LayerNorm of tiny values", "nn.LayerNorm(6)(x * 1e-3)"),
        Probe("layer_norm over two axes", "F.layer_norm(images, (7, 7))"),
        Probe("GroupNorm", "nn.GroupNorm(2, 4)(images)"),
        Probe("InstanceNorm2d", "nn.InstanceNorm2d(4)(images)", "nn.InstanceNorm2D(4)(images)"),
        Probe(
            "InstanceNorm2d, number of parameters by default",
            "len(list(nn.InstanceNorm2d(4).parameters()))",
            "len(list(nn.InstanceNorm2D(4).parameters()))",
            mended="len(list(nn.InstanceNorm2D(4, weight_attr=False, bias_attr=False).parameters()))",
            mended_torch="len(list(nn.InstanceNorm2d(4, affine=True).parameters()))",
            note="torch's has no weight and no bias unless `affine=True`",
        ),
        Probe(
            "RMSNorm",
            "nn.RMSNorm(6)(x)",
            mended="x * paddle.rsqrt((x**2).mean(-1, keepdim=True) + 2**-23)",
            formula="x / np.sqrt((x**2).mean(1, keepdims=True) + 2**-23)",
            note="paddle has no such layer; torch's epsilon is that of the dtype by default",
        ),
        Probe("normalize", "F.normalize(x)", formula="x / np.linalg.norm(x, axis=1, keepdims=True)"),
        Probe("normalize, tiny vectors", "F.normalize(x * 1e-13)"),
        Probe(
            "local_response_norm",
            "F.local_response_norm(images, 3, alpha=0.5)",
        ),
        Probe("weight_norm", "layer = nn.Linear(6, 3)\nnn.utils.weight_norm(layer)(x)"),
        Probe(
            "weight_norm, number of lengths",
            "layer = nn.Linear(6, 3)\nnn.utils.weight_norm(layer).weight_g.flatten().shape",
            mended="layer = nn.Linear(6, 3)\nnn.utils.weight_norm(layer, dim=1).weight_g.flatten().shape",
            note="`dim=0` is the outputs of torch's matrix, and the inputs of paddle's, which lies the other way round",
        ),
    ),
    {
        "images": _IMAGES,
        "x": _RNG.normal(size=(5, 6)),
        "stat_mean": _RNG.normal(size=4),
        "stat_var": _RNG.uniform(0.5, 2.0, size=4),
    },
)

DROPOUT = Group(
    "dropout",
    (
        Probe("dropout, values while training", "F.dropout(ones, 0.25).unique()"),
        Probe("Dropout, rate by default", "nn.Dropout()(ones).unique()"),
        Probe("Dropout, evaluating", "layer = nn.Dropout(0.25)\nlayer.eval()\nlayer(ones).unique()"),
        Probe(
            "dropout, share that is dropped",
            "(F.dropout(ones, 0.25) == 0).float().mean()",
            "(F.dropout(ones, 0.25) == 0).astype('float32').mean()",
            tolerance=0.1,
        ),
        Probe(
            "Dropout2d, values in a channel",
            "nn.Dropout2d(0.5)(maps).amax((2, 3)).unique() - nn.Dropout2d(0.5)(maps).amin((2, 3)).unique()",
            "nn.Dropout2D(0.5)(maps).amax((2, 3)).unique() - nn.Dropout2D(0.5)(maps).amin((2, 3)).unique()",
        ),
        Probe(
            "alpha_dropout, values",
            "F.alpha_dropout(ones, 0.25, training=True).unique()",
            "F.alpha_dropout(ones, 0.25, training=True).unique()",
        ),
        Probe(
            "alpha_dropout, training by default",
            "F.alpha_dropout(ones, 0.25).unique()",
            mended="F.alpha_dropout(ones, 0.25, training=False).unique()",
            note="torch's function does nothing unless `training=True`, paddle's does",
        ),
    ),
    {"ones": np.ones(4000), "maps": np.ones((8, 8, 3, 3))},
)
