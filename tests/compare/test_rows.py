"""Small tensors that are measured at once have, to the bit, the figures that each has by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.records import kept, pair

from padiff.compare.measure.many import measured
from padiff.compare.measure.pairs import measure_pair
from padiff.compare.measure.rows import measure_in_rows
from padiff.records import TRANSPOSED, Both
from padiff.records.rows import empty_rows, measured_and_judged

SIZES = [1, 2, 7, 16, 33, 64, 255, 256, 500, 999]


def normal(shape, seed):
    return (np.random.default_rng(seed).normal(size=shape) * 3).astype(np.float32)


def pairs_of(shape):
    """Near, far, equal, with zeros, of zeros, and the other way round."""
    found = []
    for seed in range(5):
        r, far = normal(shape, seed), normal(shape, seed + 50)
        near = (r * (1 + 1e-6 * far)).astype(np.float32)
        holed = np.where(far > 0, r, 0).astype(np.float32)
        found += [(r, near), (r, far), (r, r.copy()), (holed, near), (holed, holed + np.float32(1e-9))]
        found += [(r, np.zeros_like(r)), (np.zeros_like(r), r), (np.zeros_like(r), -np.zeros_like(r))]
    return [pair(*sides) for sides in found]


def alike(pairs):
    """The places that were measured together, after a look that each has its own figures."""
    rows = empty_rows(len(pairs))
    left = measure_in_rows(pairs, range(len(pairs)), rows)
    done = sorted(set(range(len(pairs))) - set(left))
    for place in done:
        own = measure_pair(pairs[place])
        figures, passed, judged = measured_and_judged(rows[place].item(), pairs[place].anchor.shape)
        assert passed and judged is None and own.problem is None
        assert repr(figures) == repr(own.figures)
    assert not rows["basis"][left].any()  # which nobody measured yet
    return done


@pytest.mark.parametrize("shape", [*((size,) for size in SIZES), (), (7, 9), (3, 4, 5)], ids=str)
def test_each_has_the_figures_that_it_has_by_itself(shape):
    pairs = pairs_of(shape)
    assert alike(pairs) == list(range(len(pairs)))


def test_more_than_a_block():
    pairs = [pair(normal((999,), k), normal((999,), k + 1)) for k in range(70)]
    assert alike(pairs) == list(range(70))


def test_what_lies_in_another_order():
    pairs = [pair(normal((20, 30), k).T, normal((30, 20), k + 9)) for k in range(3)]
    assert alike(pairs) == [0, 1, 2]


def test_what_is_not_ordinary_is_left_out():
    one, other = normal((8, 8), 0), normal((8, 8), 1)
    broken = one.copy()
    broken[2, 3] = np.nan
    pairs = [
        pair(one, broken),
        pair(broken, broken),
        pair(one, one.astype(np.float64)),
        pair(one.astype(np.float64), other.astype(np.float64)),
        pair(one, other, layout=TRANSPOSED),
        pair(one, other.reshape(4, 16)),
        pair(one, other, scales=Both(8.0, 1.0)),
        pair(one * np.float32(1e20), other),
        pair(one * np.float32(1e-25), other),
        kept(one, other),
        replace(pair(one, other), candidate=None),
        pair(normal((1000,), 0), normal((1000,), 1)),
        pair(normal((0,), 0), normal((0,), 1)),
        pair(normal((63,), 0), normal((63,), 1)),  # alone of its size
        pair(one, other),
        pair(other, one),
    ]
    assert alike(pairs) == [14, 15]
    assert list(measured(pairs)) == [measure_pair(each) for each in pairs]
