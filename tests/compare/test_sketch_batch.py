"""Pairs of sketches that are measured at once have the figures that each has by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.records import kept, pair

from padiff.compare.measure.measure_step import measure_together
from padiff.compare.measure.pairs import measure_pair
from padiff.records import TRANSPOSED, Both
from padiff.records.pair_table import PairSchema
from padiff.records.step_diffs import StepDiffs, empty_rows
from padiff.sketches.sketch import BUCKETS, ELEMENTS

SHAPES = [(1,), (2,), (7, 8), (BUCKETS,), (BUCKETS + 1,), (40, 70), (ELEMENTS,), (ELEMENTS + 1,), (150, 200)]
DTYPES = ("float32", "float16", "float64", "int64", "complex64", "bool")


def values(shape, seed, dtype="float32"):
    found = np.random.default_rng(seed).normal(size=shape) * 3
    if dtype == "complex64":
        found = found + 1j * np.random.default_rng(seed + 50).normal(size=shape)
    return found.astype(dtype)


def sketched(reference, candidate, **rest):
    return kept(reference, candidate, **rest)


def alike(pairs):
    """The places that were measured together, after a look that each has its own figures."""
    rows = empty_rows(len(pairs))
    done = measure_together(pairs, rows)
    diffs = StepDiffs(pairs, PairSchema.from_pairs(pairs), rows, {}, {})
    for place in np.flatnonzero(done).tolist():
        diff, own = diffs[place], measure_pair(pairs[place])
        assert diff.pair is pairs[place] and diff.passed and diff.problem is None and own.problem is None
        for name in own.figures.__slots__:
            one, other = getattr(diff.figures, name), getattr(own.figures, name)
            if isinstance(other, Both):
                one, other = tuple(one), tuple(other)
            assert one == (pytest.approx(other, rel=1e-13) if isinstance(other, (float, tuple)) else other), name
    return np.flatnonzero(done).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1024.0, 1.0), (8.0, 8.0)], ids=str)
def test_each_has_the_figures_that_it_has_by_itself(dtype, scales):
    pairs = []
    for seed, shape in enumerate(SHAPES):
        reference, other = values(shape, seed, dtype), values(shape, seed + 20, dtype)
        for candidate in (reference, other, np.zeros_like(reference)):
            pairs += [sketched(*sides, scales=Both(*scales)) for sides in ((reference, candidate), (candidate, other))]
    assert alike(pairs) == list(range(len(pairs)))


def test_a_matrix_that_lies_transposed():
    given = [
        (values(shape, seed), values(shape, seed + 9)) for seed, shape in enumerate([(5, 3), (40, 70), (150, 200)])
    ]
    pairs = [sketched(one, other.T.copy(), layout=TRANSPOSED, turned="candidate") for one, other in given]
    assert alike(pairs) == [0, 1, 2]


def test_what_is_not_ordinary_is_left_out():
    full, small = values((40, 70), 0), values((3, 4), 1)
    broken, tiny = full.copy(), small.copy()
    broken[3, 5], tiny[1, 1] = np.nan, np.inf
    pairs = [
        pair(full, full),
        kept(full, full, "candidate full"),
        sketched(broken, full),
        sketched(full, broken),
        sketched(small, tiny),
        sketched(tiny, tiny),
        sketched(full, full.reshape(70, 40)),
        sketched(full, full.T.copy(), layout=TRANSPOSED),
        sketched(full[:0], full[:0]),
        replace(sketched(full, full), candidate=None),
        sketched(full, full),
    ]
    assert alike(pairs) == [10]
