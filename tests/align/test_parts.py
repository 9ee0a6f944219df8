"""Parts of parameters against plain numpy, and taking and putting as each other's inverse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from padiff.align import Slice


def stored(*shape):
    return np.arange(np.prod(shape), dtype="float32").reshape(shape) + 1


MATRIX = stored(12, 5)

#: A part, a stored parameter, and what is meant of it, by plain numpy.
CASES = {
    "whole": (Slice("a", "weight", (12, 5)), MATRIX, MATRIX),
    "rows": (Slice("a", "weight", (12, 5), start=4, stop=8), MATRIX, MATRIX[4:8]),
    "first rows": (Slice("a", "weight", (12, 5), stop=1), MATRIX, MATRIX[:1]),
    "transposed": (Slice("a", "weight", (5, 12), "in_out"), MATRIX.T, MATRIX),
    "rows of a transposed one": (Slice("a", "weight", (5, 12), "in_out", start=8, stop=12), MATRIX.T, MATRIX[8:]),
    "head by head": (
        Slice("a", "weight", (12, 5), groups=2, start=2, stop=4),
        MATRIX,
        MATRIX.reshape(2, 3, 2, 5)[:, 1].reshape(4, 5),
    ),
    "row by row": (Slice("a", "weight", (12, 5), groups=4, start=1, stop=2), MATRIX, MATRIX[1::3]),
    "head by head, transposed": (
        Slice("a", "weight", (5, 12), "in_out", groups=3, start=0, stop=2),
        MATRIX.T,
        MATRIX.reshape(3, 2, 2, 5)[:, 0].reshape(6, 5),
    ),
    "columns": (Slice("a", "weight", (12, 5), columns=(2, 5)), MATRIX, MATRIX[:, 2:5]),
    "columns of a transposed one": (Slice("a", "weight", (5, 12), "in_out", columns=(0, 2)), MATRIX.T, MATRIX[:, :2]),
    "rows and columns": (Slice("a", "weight", (12, 5), start=3, stop=6, columns=(1, 3)), MATRIX, MATRIX[3:6, 1:3]),
    "rows of a bias": (Slice("a", "bias", (12,), start=4, stop=8), stored(12), stored(12)[4:8]),
    "a bias head by head": (
        Slice("a", "bias", (12,), groups=2, start=0, stop=2),
        stored(12),
        stored(12).reshape(2, 3, 2)[:, 0].ravel(),
    ),
    # A bias has no layout.
    "a bias is not transposed": (Slice("a", "bias", (12,), "in_out"), stored(12), stored(12)),
    "axes": (
        Slice("a", "weight", (2, 3, 4, 5), axes=(0, 2, 3, 1)),
        stored(2, 3, 4, 5),
        np.moveaxis(stored(2, 3, 4, 5), 1, -1),
    ),
    "rows of a convolution": (
        Slice("a", "weight", (6, 3, 2, 2), start=2, stop=4),
        stored(6, 3, 2, 2),
        stored(6, 3, 2, 2)[2:4],
    ),
    "a scalar": (Slice("a", "scale", ()), np.full((), 3.0, "float32"), np.full((), 3.0, "float32")),
}
each = pytest.mark.parametrize(("part", "array", "meant"), CASES.values(), ids=CASES)


@each
def test_what_is_taken_is_what_is_meant(part, array, meant):
    np.testing.assert_array_equal(part.read(array), meant)


@each
def test_the_size_is_that_of_what_is_taken(part, array, meant):
    assert part.shape == array.shape
    assert part.result_shape == meant.shape


@each
def test_what_was_taken_is_put_back_where_it_was(part, array, meant):
    empty = np.zeros_like(array)
    part.write(empty, part.read(array))
    touched = empty != 0
    np.testing.assert_array_equal(empty[touched], array[touched])
    assert touched.sum() == meant.size
    np.testing.assert_array_equal(part.read(empty), meant)


@each
def test_what_was_put_is_taken_again_and_nothing_else_is_touched(part, array, meant):
    values, changed = -stored(*meant.shape), array.copy()
    part.write(changed, values)
    np.testing.assert_array_equal(part.read(changed), values)
    assert (changed != array).sum() == meant.size


@pytest.mark.parametrize(("groups", "layout"), itertools.product((1, 2, 4), ("", "in_out")))
def test_parts_that_make_up_a_whole_leave_nothing_out_and_nothing_twice(groups, layout):
    whole = MATRIX.T.copy() if layout else MATRIX.copy()
    height = 12 // groups
    cuts = [0, 1, height - 1, height]
    parts = [Slice("a", "weight", whole.shape, layout, groups, a, b) for a, b in itertools.pairwise(cuts)]
    again, counted = np.zeros_like(whole), np.zeros_like(whole)
    for part in parts:
        part.write(again, part.read(whole))
        part.write(counted, part.read(counted) + 1)
    np.testing.assert_array_equal(again, whole)
    assert (counted == 1).all()


def test_query_key_and_value_head_by_head_are_those_of_megatron():
    heads, size, width = 3, 2, 4
    q, k, v = (np.random.default_rng(seed).normal(size=(heads * size, width)) for seed in range(3))
    fused = np.concatenate([np.concatenate([x[h * size : (h + 1) * size] for x in (q, k, v)]) for h in range(heads)])
    for number, matrix in enumerate((q, k, v)):
        part = Slice("a", "weight", fused.shape, "", heads, number * size, (number + 1) * size)
        np.testing.assert_array_equal(part.read(fused), matrix)


def test_parts_say_in_words_what_they_are():
    assert Slice("fc", "weight", (12, 5)).site == "fc/weight"
    assert Slice("fc", "weight", (12, 5)).whole
    assert Slice("fc", "weight", (12, 5), start=4, stop=8).site == "fc/weight[4:8]"
    assert Slice("fc", "weight", (12, 5), groups=2, start=2, stop=4).site == "fc/weight[2:4 of each of 2]"
    assert Slice("fc", "weight", (12, 5), columns=(0, 2)).site == "fc/weight[:, 0:2]"
    assert not Slice("fc", "weight", (12, 5), columns=(0, 2)).whole
