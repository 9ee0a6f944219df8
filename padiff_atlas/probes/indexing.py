"""Probes of indexing, shapes, and products over named axes."""

from __future__ import annotations

import numpy as np

from padiff_atlas.probe import Group, Probe

_RNG = np.random.default_rng(7)

INDEXING = Group(
    "indexing",
    (
        Probe(
            "gather",
            "torch.gather(x, 1, picks)",
            "paddle.gather(x, picks, 1)",
            mended="paddle.take_along_axis(x, picks, 1, broadcast=False)",
            note="paddle's gather takes whole rows, as torch's index_select does",
        ),
        Probe(
            "index_select",
            "torch.index_select(x, 1, places)",
            "paddle.index_select(x, places, 1)",
        ),
        Probe("gather of rows", "x[places]", "paddle.gather(x, places)"),
        Probe(
            "scatter",
            "torch.scatter(x, 1, picks, y)",
            "paddle.scatter(x, picks, y)",
            mended="paddle.put_along_axis(x, picks, y, 1, broadcast=False)",
            note="paddle's scatter writes whole rows",
        ),
        Probe(
            "scatter_add",
            "torch.scatter_add(x, 1, picks, y)",
            "paddle.put_along_axis(x, picks, y, 1, reduce='add', broadcast=False)",
        ),
        Probe(
            "scatter_add, index twice",
            "torch.scatter_add(x, 1, picks * 0, y)",
            "paddle.put_along_axis(x, picks * 0, y, 1, reduce='add', broadcast=False)",
        ),
        Probe(
            "scatter_reduce, mean",
            "torch.scatter_reduce(x, 1, picks, y, 'mean')",
            "paddle.put_along_axis(x, picks, y, 1, reduce='mean', broadcast=False)",
        ),
        Probe("index_add", "torch.index_add(x, 1, places, y)", "paddle.index_add(x, places, 1, y)"),
        Probe(
            "index_add, index twice", "torch.index_add(x, 1, places * 0, y)", "paddle.index_add(x, places * 0, 1, y)"
        ),
        Probe(
            "x[places] += 1, index twice",
            "flat = x[0].clone()\nflat[places * 0] += 1\nflat",
            "flat = x[0].clone()\nflat[places * 0] += 1\nflat",
        ),
        Probe(
            "split by a number",
            "torch.split(wide, 2, dim=1)",
            "paddle.split(wide, 2, axis=1)",
            mended="paddle.split(wide, wide.shape[1] // 2, axis=1)",
            mended_torch="torch.chunk(wide, 2, dim=1)",
            note="the number is the size of a part in torch, and the number of parts in paddle",
        ),
        Probe("chunk", "torch.chunk(wide, 3, dim=1)", "paddle.chunk(wide, 3, axis=1)"),
        Probe(
            "chunk of a size that does not divide",
            "torch.chunk(wide, 4, dim=1)",
            "paddle.chunk(wide, 4, axis=1)",
            mended="paddle.split(wide, [2, 2, 2], axis=1)",
            note="torch makes parts of equal size, perhaps fewer than asked for; paddle refuses",
        ),
        Probe("transpose of two axes", "torch.transpose(cube, 0, 1)"),
        Probe("x.T of 2 axes", "x.T"),
        Probe("flatten", "torch.flatten(cube, 1)"),
        Probe("Flatten", "nn.Flatten()(cube)"),
        Probe("reshape with -1", "x.reshape(2, -1)", "x.reshape([2, -1])"),
        Probe("squeeze of all axes", "torch.squeeze(thin)"),
        Probe("x.size", "x.size()", "x.size", mended="x.shape", note="the number of elements in paddle"),
        Probe("repeat", "x.repeat(2, 1)", "x.tile([2, 1])"),
        Probe("repeat_interleave", "torch.repeat_interleave(x, 2, dim=1)", "paddle.repeat_interleave(x, 2, axis=1)"),
        Probe("repeat_interleave without an axis", "torch.repeat_interleave(x, 2)"),
        Probe("expand", "thin.expand(3, 2, 4)", "thin.expand([3, 2, 4])"),
        Probe("roll", "torch.roll(x, 1, 1)"),
        Probe("flip", "torch.flip(x, [1])"),
        Probe("tril", "torch.tril(x, -1)"),
        Probe("nonzero", "torch.nonzero(x > 0)"),
        Probe("where with one argument", "torch.where(x > 0)"),
        Probe("masked_fill", "x.masked_fill(x > 0, 0.0)"),
        Probe("masked_select", "torch.masked_select(x, x > 0)"),
        Probe("stack", "torch.stack([x, y2], dim=1)", "paddle.stack([x, y2], axis=1)"),
        Probe(
            "cat of floats and whole numbers",
            "torch.cat([y, picks])",
            "paddle.concat([y, picks])",
            mended="paddle.concat([y, picks.astype(y.dtype)])",
            note="paddle casts nothing",
        ),
        Probe("meshgrid", "torch.meshgrid(places, places * 2)", "paddle.meshgrid(places, places * 2)"),
        Probe(
            "linear, matrix (out, in)",
            "F.linear(x, matrix)",
            mended="F.linear(x, matrix.T)",
            note="paddle's matrix is (in, out)",
            formula="x @ matrix.T",
        ),
        Probe("einsum", "torch.einsum('ij,kj->ik', x, y2)"),
        Probe("tensordot", "torch.tensordot(x, y2, 2)"),
        Probe("searchsorted", "torch.searchsorted(sorted_, x)"),
        Probe("diff", "torch.diff(x)"),
        Probe("scalar's shape", "x.sum().shape"),
    ),
    {
        "x": _RNG.normal(size=(4, 4)),
        "wide": _RNG.normal(size=(4, 6)),
        "y": _RNG.normal(size=(4, 2)),
        "y2": _RNG.normal(size=(4, 4)),
        "matrix": _RNG.normal(size=(4, 4)),
        "cube": _RNG.normal(size=(2, 3, 4)),
        "thin": _RNG.normal(size=(1, 2, 1)),
        "picks": np.array([[0, 2], [1, 3], [3, 0], [2, 1]]),
        "places": np.array([0, 2]),
        "sorted_": np.array([-1.0, 0.0, 1.0]),
    },
)
