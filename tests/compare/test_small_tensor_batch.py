"""Small tensors that are measured at once have, to the bit, the figures that each has by itself."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from kit.records import info, kept, linear, pair, record, root, step, write_run

from padiff.align import align
from padiff.compare.measure.measure_step import measure_in_rows, measured
from padiff.compare.measure.pairs import measure_pair
from padiff.dump import open_run
from padiff.dump.storage import Storage
from padiff.errors import TensorFileError
from padiff.pair.plans import PairPlans
from padiff.records import SAME, TRANSPOSED, Both
from padiff.records.step_diffs import empty_rows, measured_and_judged

PACKED = Storage(pack=True)
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
        pair(normal((63,), 0), normal((63,), 1)),
        pair(one, other),
        pair(other, one),
    ]
    assert alike(pairs) == [13, 14, 15]
    assert list(measured(pairs)) == [measure_pair(each) for each in pairs]


# -- tensors of packed steps, which lie beside each other in a file ---------------------------------------------------


def packed(tmp_path, name, arrays, **rest):
    """A step of a run that holds tensors as outputs of a layer."""
    return _packed(
        tmp_path, name, [record("fc", "forward", f"output.{k}", array) for k, array in enumerate(arrays)], **rest
    )


def _packed(tmp_path, name, records, **rest):
    run = write_run(tmp_path / name, info(root(1), linear("fc", 4, 4)), [step(0, records, **rest)], storage=PACKED)
    return open_run(run).steps(0)[0]


def planned(reference, candidate, paddle=False):
    trees = [info(root(1), linear("fc", 4, 4, paddle=each)) for each in (False, paddle)]
    return PairPlans().pairs(reference, candidate, align(*trees))


def sides_of(sizes):
    return [[normal(shape, seed + 10 * k) for k, shape in enumerate(sizes)] for seed in (0, 1)]


SLOTS = [("weight", (4, 4)), ("bias", (4,))]
SHAPES = [(4, 4), (3,), (16,), (), (999,), (1000,), (4, 4), (2, 0), (16,), (7, 9), (5, 200)]


@pytest.mark.parametrize("near", [0.0, 1e-6])
def test_tensors_of_packed_steps_have_the_figures_that_each_has_by_itself(tmp_path, near):
    reference, noise = sides_of(SHAPES)
    candidate = [(r * (1 + np.float32(near) * n)).astype(np.float32) for r, n in zip(reference, noise)]
    pairs = planned(packed(tmp_path, "a", reference), packed(tmp_path, "b", candidate))
    rows = empty_rows(len(pairs))
    left = measure_in_rows(pairs, range(len(pairs)), rows)
    assert left == [place for place, shape in enumerate(SHAPES) if not 0 < np.prod(shape, dtype=int) < 1000]
    for place in set(range(len(pairs))) - set(left):
        figures, *_ = measured_and_judged(rows[place].item(), SHAPES[place])
        assert repr(figures) == repr(measure_pair(pairs[place]).figures)


def test_dtypes_layouts_and_scales_of_packed_steps_are_left_to_themselves(tmp_path):
    arrays = [normal((3, 5), 0), normal((3, 5), 1).astype(np.float16), normal((3, 5), 2), normal((3, 5), 3)]
    others = [arrays[0] + 1, arrays[1] + 1, arrays[2].T, arrays[3].astype(np.float64)]
    pairs = planned(packed(tmp_path, "a", arrays), packed(tmp_path, "b", others))
    assert measure_in_rows(pairs, range(4), empty_rows(4)) == [1, 2, 3]

    weights = [[record("fc", "weight", slot, normal(shape, 0)) for slot, shape in SLOTS] for _ in "ab"]
    turned = planned(*(_packed(tmp_path, name, side) for name, side in zip("gh", weights)), paddle=True)
    assert [pair.layout for pair in turned] == [TRANSPOSED, SAME]
    assert measure_in_rows(turned, range(2), empty_rows(2)) == [0]

    def gradients(name, scale):
        records = [record("fc", "backward", f"output.{k}", normal((3, 5), k)) for k in range(3)]
        return _packed(tmp_path, name, records, loss_scale=scale)

    scaled = planned(gradients("c", 2.0), gradients("d", 4.0))
    assert measure_in_rows(scaled, range(3), empty_rows(3)) == [0, 1, 2]
    unscaled = planned(gradients("e", 1.0), gradients("f", 1.0))
    assert measure_in_rows(unscaled, range(3), empty_rows(3)) == []


def test_a_file_that_is_cut_off_meanwhile_is_left_to_say_so(tmp_path):
    arrays = [normal((8,), k) for k in range(6)]
    pairs = planned(packed(tmp_path, "a", arrays), packed(tmp_path, "b", arrays))
    path = next((tmp_path / "b" / "steps").rglob("step.safetensors"))
    os.truncate(path, path.stat().st_size - 8)
    left = measure_in_rows(pairs, range(6), empty_rows(6))
    assert 5 in left
    with pytest.raises(TensorFileError, match="copy the run again"):
        pairs[5].candidate.value  # noqa: B018
