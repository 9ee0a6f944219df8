"""Probes of interpolation, padding, sampling of images, and convolutions."""

from __future__ import annotations

import numpy as np

from padiff_atlas.probe import Group, Probe

_RNG = np.random.default_rng(3)

IMAGES = Group(
    "images",
    (
        Probe("interpolate, bilinear", "F.interpolate(images, size=(9, 11), mode='bilinear')"),
        Probe("interpolate, bilinear, smaller", "F.interpolate(images, size=(3, 4), mode='bilinear')"),
        Probe(
            "interpolate, bilinear, corners aligned",
            "F.interpolate(images, size=(9, 11), mode='bilinear', align_corners=True)",
        ),
        Probe(
            "interpolate, bilinear, antialias", "F.interpolate(images, size=(3, 4), mode='bilinear', antialias=True)"
        ),
        Probe("interpolate, bicubic", "F.interpolate(images, size=(9, 11), mode='bicubic')"),
        Probe(
            "interpolate, bicubic, corners aligned",
            "F.interpolate(images, size=(9, 11), mode='bicubic', align_corners=True)",
        ),
        Probe("interpolate, nearest", "F.interpolate(images, size=(9, 11), mode='nearest')"),
        Probe("interpolate, nearest, smaller", "F.interpolate(images, size=(3, 4), mode='nearest')"),
        Probe("interpolate, nearest, factor 1.5", "F.interpolate(images, scale_factor=1.5, mode='nearest')"),
        Probe("interpolate, bilinear, factor 1.3", "F.interpolate(images, scale_factor=1.3, mode='bilinear')"),
        Probe("interpolate, area", "F.interpolate(images, size=(3, 4), mode='area')"),
        Probe(
            "interpolate, linear",
            "F.interpolate(rows, size=13, mode='linear')",
            "F.interpolate(rows, size=[13], mode='linear', data_format='NCW')",
        ),
        Probe(
            "interpolate, trilinear",
            "F.interpolate(volumes, size=(3, 4, 7), mode='trilinear')",
            "F.interpolate(volumes, size=(3, 4, 7), mode='trilinear', data_format='NCDHW')",
        ),
        Probe("Upsample", "nn.Upsample(scale_factor=2, mode='bilinear')(images)"),
        Probe(
            "UpsamplingBilinear2d",
            "nn.UpsamplingBilinear2d(scale_factor=2)(images)",
            "nn.UpsamplingBilinear2D(scale_factor=2)(images)",
        ),
        Probe("pad, reflect", "F.pad(images, (1, 2, 3, 1), mode='reflect')"),
        Probe("pad, replicate", "F.pad(images, (1, 2, 3, 1), mode='replicate')"),
        Probe("pad, circular", "F.pad(images, (1, 2, 3, 1), mode='circular')"),
        Probe("pad, constant", "F.pad(images, (1, 2, 3, 1), value=0.5)"),
        Probe(
            "pad, all axes",
            "F.pad(images, (1, 2, 0, 0, 0, 0, 3, 1))",
            mended="F.pad(images, (1, 2, 0, 0, 0, 0, 3, 1), pad_from_left_axis=False)",
            note="paddle begins with the first axis where all are given, torch always with the last one",
        ),
        Probe(
            "pad of a matrix",
            "F.pad(images[0, 0], (1, 2, 0, 0))",
            mended="F.pad(images[0, 0], (1, 2, 0, 0), pad_from_left_axis=False)",
            note="as with all axes",
        ),
        Probe(
            "grid_sample",
            "F.grid_sample(images, grid)",
            mended="F.grid_sample(images, grid, align_corners=False)",
            mended_torch="F.grid_sample(images, grid, align_corners=True)",
            note="corners are aligned by default in paddle",
        ),
        Probe("grid_sample, corners aligned", "F.grid_sample(images, grid, align_corners=True)"),
        Probe("grid_sample, border", "F.grid_sample(images, grid, padding_mode='border', align_corners=False)"),
        Probe("grid_sample, reflection", "F.grid_sample(images, grid, padding_mode='reflection', align_corners=False)"),
        Probe(
            "grid_sample, bicubic",
            "F.grid_sample(images, grid, mode='bicubic', align_corners=False)",
            note="paddle has no such mode",
        ),
        Probe(
            "affine_grid",
            "F.affine_grid(theta, (2, 3, 4, 5))",
            "F.affine_grid(theta, [2, 3, 4, 5])",
            mended="F.affine_grid(theta, [2, 3, 4, 5], align_corners=False)",
            mended_torch="F.affine_grid(theta, (2, 3, 4, 5), align_corners=True)",
            note="corners are aligned by default in paddle",
        ),
        Probe("pixel_shuffle", "F.pixel_shuffle(channels, 2)"),
        Probe("pixel_unshuffle", "F.pixel_unshuffle(images4, 2)"),
        Probe("channel_shuffle", "F.channel_shuffle(channels, 2)", "F.channel_shuffle(channels, 2)"),
        Probe("unfold", "F.unfold(images, 3, padding=1)", "F.unfold(images, 3, paddings=1)"),
        Probe("fold", "F.fold(columns, (4, 4), (2, 2))"),
        Probe("conv2d", "F.conv2d(images, kernel, padding=1)"),
        Probe("conv2d, stride and dilation", "F.conv2d(images, kernel, stride=2, dilation=2, padding=2)"),
        Probe("conv2d, same", "F.conv2d(images, even, padding='same')"),
        Probe(
            "Conv2d, padding_mode reflect",
            "layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode='reflect')\nlayer(images)",
            "layer = nn.Conv2D(3, 4, 3, padding=1, padding_mode='reflect')\nlayer(images)",
        ),
        Probe(
            "conv_transpose2d",
            "F.conv_transpose2d(images, turned, stride=2, padding=1, output_padding=1)",
            "F.conv2d_transpose(images, turned, stride=2, padding=1, output_padding=1)",
        ),
        Probe("conv1d", "F.conv1d(rows, kernel1, padding=1)"),
    ),
    {
        "images": _RNG.normal(size=(2, 3, 6, 7)),
        "images4": _RNG.normal(size=(2, 3, 4, 4)),
        "rows": _RNG.normal(size=(2, 3, 8)),
        "volumes": _RNG.normal(size=(1, 2, 4, 5, 5)),
        "channels": _RNG.normal(size=(2, 8, 3, 3)),
        "columns": _RNG.normal(size=(2, 8, 9)),
        "grid": _RNG.uniform(-1.3, 1.3, size=(2, 4, 5, 2)),
        "theta": _RNG.normal(size=(2, 2, 3)),
        "kernel": _RNG.normal(size=(4, 3, 3, 3)),
        "even": _RNG.normal(size=(4, 3, 2, 2)),
        "turned": _RNG.normal(size=(3, 4, 3, 3)),
        "kernel1": _RNG.normal(size=(4, 3, 3)),
    },
)
