"""Sketches: what is looked at, and how well they stand for a tensor; expected values come from Python and numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from padiff.sketches.samples import Samples
from padiff.sketches.sketch import (
    BLOCK,
    BUCKETS,
    ELEMENTS,
    FIGURES,
    SPREAD,
    Sketch,
    block_rows,
    cut_of,
    places,
    sample,
    signs,
    sketch_of,
)

LARGE = (ELEMENTS + 1, ELEMENTS + 63, 3 * ELEMENTS + 17, 100_000, 1 << 20)


def error_l2(sketch, other, *scales):
    return float(np.linalg.norm(sketch.errors(other, *scales)))


def splitmix(count, seed):
    """SplitMix64 in Python's own integers."""
    found, mask = [], (1 << 64) - 1
    for index in range(1, count + 1):
        state = (index + seed * count) * 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        found.append(state ^ state >> 31)
    return found


def expected_places(size):
    if size <= ELEMENTS:
        return list(range(size))
    count = ELEMENTS // BLOCK
    first = splitmix(1, size)[0] % (size % BLOCK + 1)
    edges = [k * (size // BLOCK) // count for k in range(count + 1)]
    blocks = [low + number % (high - low) for low, high, number in zip(edges, edges[1:], splitmix(count, size))]
    return [first + block * BLOCK + k for block in blocks for k in range(BLOCK)]


def expected_projection(looked_at):
    """The projection of a sample, one number after the other."""
    sums = [0.0] * BUCKETS
    for k, (value, number) in enumerate(zip(looked_at, splitmix(ELEMENTS, 0))):
        sums[k % BUCKETS] += float(value) if number >> 40 & 1 else -float(value)
    return sums[: len(looked_at)]


# -- what is looked at -------------------------------------------------------------------------------------------------


def test_signs_are_those_of_splitmix():
    expected = [1 if number >> 40 & 1 else -1 for number in splitmix(ELEMENTS, 0)]
    assert signs().tolist() == expected
    assert signs().dtype == np.float32
    # Frozen: a run of today has to be comparable with one of next year.
    assert signs()[:16].tolist() == [-1, -1, 1, -1, 1, 1, -1, 1, -1, -1, -1, -1, -1, 1, 1, 1]


@pytest.mark.parametrize("size", LARGE)
def test_places_are_those_of_splitmix(size):
    found = places(size).tolist()
    assert found == expected_places(size)
    assert len(set(found)) == ELEMENTS
    assert found == sorted(found)
    assert found[0] >= 0
    assert found[-1] < size


def test_places_spread_over_the_whole_tensor():
    size, blocks = 1 << 20, ELEMENTS // BLOCK
    stretches = np.bincount(np.asarray(places(size)) * blocks // size, minlength=blocks)
    # One block in each stretch; one that lies across a border counts in both.
    assert stretches.min() > 0
    assert stretches.max() < 2 * BLOCK


def test_frozen_numbers():
    first, rows = block_rows(100_000)
    assert (first, rows[:5].tolist(), int(rows.sum())) == (65, [9, 38, 51, 96, 102], 13099)
    row = sketch_of(np.arange(100_000, dtype=np.float64)).row()
    figures = [1163.0, 99128.0, 50065.4375, 50065.4375, 3350088445.9375, 0.0, 0.0]
    assert row[: len(FIGURES) + 3].tolist() == pytest.approx([*figures, 342454.0, 683972.0, -74530.0], rel=1e-12)


@pytest.mark.parametrize("size", [0, 1, 60, 61, 62, 1000, ELEMENTS - 1, ELEMENTS])
def test_a_small_tensor_is_looked_at_whole(size):
    values = np.random.default_rng(size).normal(size=size)
    assert places(size).tolist() == list(range(size))
    sketch = sketch_of(values)
    assert sketch.looked_at == sketch.size == size
    assert sketch.projection == pytest.approx(expected_projection(values), abs=1e-9)


@pytest.mark.parametrize("size", LARGE[:3])
def test_projection_of_a_large_tensor(size):
    values = np.random.default_rng(size).normal(size=size)
    assert sketch_of(values).projection == pytest.approx(expected_projection(values[expected_places(size)]), abs=1e-9)


def arrays():
    data = np.random.default_rng(0)
    large = data.normal(size=(120, 200))
    return {
        "contiguous": large,
        "transposed": large.T,
        "strided": large[::2, 1::3],
        "backwards": large[::-1, ::-1],
        "broadcast": np.broadcast_to(large[:1], (90, 200)),
        "four axes": data.normal(size=(4, 16, 12, 20)).transpose(0, 2, 3, 1),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 5)),
        "bool": large > 0,
        "int64": data.integers(-(1 << 40), 1 << 40, (130, 70)),
        "uint8": data.integers(0, 255, (130, 70)).astype(np.uint8),
        "float16": large.astype(np.float16),
        "bfloat16": large.astype(ml_dtypes.bfloat16),
        "bfloat16 transposed": large.astype(ml_dtypes.bfloat16).T,
        "float8": large.astype(ml_dtypes.float8_e4m3fn),
        "float32": large.astype(np.float32),
        "small": large[:3, :3],
    }


@pytest.mark.parametrize("kind", arrays())
def test_sample(kind):
    array = arrays()[kind]
    before = array.copy()
    found = sample(array)
    flat = [array[index] for index in np.ndindex(*array.shape)]  # row by row, whatever lies where in memory
    expected = np.array([flat[k] for k in expected_places(len(flat))], array.dtype)
    assert found.dtype == array.dtype
    assert found.shape == expected.shape
    assert found.astype(np.float64).tolist() == expected.astype(np.float64).tolist()
    if found.size and array.flags.writeable:
        array[...] = 0  # a copy: training goes on under it
        assert found.astype(np.float64).tolist() == expected.astype(np.float64).tolist()
        array[...] = before


@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (4000,), (70, 80), (90, 101)])
def test_complex_numbers_are_two_numbers_each(shape):
    data = np.random.default_rng(1)
    values = (data.normal(size=shape) + 1j * data.normal(size=shape)).astype(np.complex64)
    pairs = np.stack([values.real, values.imag], axis=-1)
    sketch = sketch_of(values)
    assert sketch.size == 2 * values.size
    assert sketch.row().tolist() == sketch_of(pairs).row().tolist()
    if len(shape) == 2:
        assert sketch_of(values, transposed=True).row().tolist() == sketch_of(pairs.transpose(1, 0, 2)).row().tolist()
        assert sketch_of(values.T).row().tolist() == sketch_of(values, transposed=True).row().tolist()


def test_turned_is_the_transposed():
    values = np.random.default_rng(2).normal(size=(90, 130))
    looked_at, stored = sketch_of(values, transposed=True), sketch_of(np.ascontiguousarray(values.T))
    assert looked_at.transposed
    assert not stored.transposed
    assert looked_at.row().tolist() == stored.row().tolist()
    assert looked_at.row().tolist() != sketch_of(values).row().tolist()


# -- figures -----------------------------------------------------------------------------------------------------------


def assert_figures(sketch, values, rel=1e-6):
    """Of a tensor that was looked at whole, against numpy in float64."""
    wide = values.astype(np.float64).reshape(-1)
    finite = np.isfinite(wide)
    cleared = np.where(finite, wide, 0)
    scale = float(np.abs(cleared).mean())
    least, most = (wide[finite].min(), wide[finite].max()) if finite.any() else (0, 0)
    assert (sketch.minimum, sketch.maximum) == pytest.approx((least, most), rel=rel)
    assert sketch.mean == pytest.approx(cleared.mean(), rel=rel, abs=rel * scale)
    assert sketch.mean_abs == pytest.approx(scale, rel=rel)
    assert sketch.mean_square == pytest.approx(np.square(cleared).mean(), rel=rel)
    assert sketch.zeros == pytest.approx((wide == 0).mean(), abs=1e-12)
    assert sketch.nonfinite == pytest.approx((~finite).mean(), abs=1e-12)
    assert sketch.l2 == pytest.approx(np.linalg.norm(cleared), rel=rel)
    assert sketch.projection == pytest.approx(expected_projection(cleared), rel=1e-5, abs=1e-4 * scale)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int8", "bool"]
)
@pytest.mark.parametrize("size", [1, 50, 3001])
def test_figures(dtype, size):
    values = np.random.default_rng(size).normal(size=size) * 3
    values[values < -2] = 0
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = (values * 20 if kind.kind == "i" else values).astype(kind)
    assert_figures(sketch_of(array), array)


@pytest.mark.parametrize("factor", [1e-44, 1e-38, 1e-30, 1e-16, 1e16, 1e30, 1e37])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tiny_and_huge_values(factor, dtype):
    values = (np.random.default_rng(3).normal(size=2000) * factor).astype(dtype)
    sketch = sketch_of(values)
    assert_figures(sketch, values)
    other = sketch_of((values * 1.5).astype(dtype))
    assert error_l2(sketch, other) / sketch.l2 == pytest.approx(0.5, rel=4 * SPREAD)


@pytest.mark.parametrize("factor", [5e-324, 1e-310, 1e-200, 1e200, 1e300])
def test_the_ends_of_float64(factor):
    values = np.array([1.0, -1.0, 2.0, 0.0] * 50) * factor
    sketch = sketch_of(values)
    assert (sketch.minimum, sketch.maximum, sketch.zeros) == (values.min(), values.max(), 0.25)
    assert np.isfinite(sketch.projection).all()
    assert sketch.mean_abs == pytest.approx(factor, rel=1e-6, abs=5e-324)


@pytest.mark.parametrize(
    "values",
    [
        np.full(100, np.nan),
        np.full(100, np.inf),
        np.full(100, -np.inf),
        np.array([np.inf, *np.ones(99)]),
        np.array([np.nan, np.inf, -np.inf, 0.0, 2.0, -3.0] * 10),
        np.zeros(100),
        np.full(100, 0.1),
        np.full(5000, 1e6),
        np.full(5000, -1e-6),
    ],
    ids=["nan", "inf", "-inf", "one inf", "mixed", "zeros", "constant", "large constant", "small constant"],
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_is_not_finite_and_constants(values, dtype):
    array = values.astype(getattr(ml_dtypes, dtype, dtype))
    assert_figures(sketch_of(array), array)


def test_an_empty_tensor():
    sketch = sketch_of(np.zeros((0, 3)))
    assert (sketch.size, sketch.l2, sketch.mean, sketch.zeros, sketch.projection.size) == (0, 0, 0, 0, 0)
    assert error_l2(sketch, sketch) == 0


def test_figures_of_a_large_tensor_are_estimates():
    values = np.random.default_rng(4).normal(2, 1, size=300_000)
    sketch = sketch_of(values)
    assert sketch.l2 == pytest.approx(np.linalg.norm(values), rel=0.03)
    assert sketch.mean == pytest.approx(2, abs=0.05)
    # Of the sample they are exact.
    assert sketch.mean == pytest.approx(values[expected_places(values.size)].mean(), rel=1e-12)


# -- estimates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [200, 3000, 40_000])
def test_relative_error_is_unbiased_and_spreads_as_reported(size):
    found = []
    for seed in range(300):
        data = np.random.default_rng(seed)
        reference = data.normal(size=size)
        candidate = reference + 1e-3 * data.normal(size=size)
        of_reference, of_candidate = sketch_of(reference), sketch_of(candidate)
        truth = np.linalg.norm(candidate - reference) / np.linalg.norm(reference)
        found.append(error_l2(of_reference, of_candidate) / of_reference.l2 / truth)
    squares = np.square(found)
    assert squares.mean() == pytest.approx(1, abs=0.03)  # it is the square that is unbiased
    assert np.mean(found) == pytest.approx(1, abs=0.03)
    assert 0.75 * SPREAD < np.std(found) < 1.25 * SPREAD
    assert pytest.approx(0.09, abs=0.005) == SPREAD


def test_structured_differences_are_seen_in_full():
    """One channel, one row, one image that is off: whatever power of two the shape has."""
    data = np.random.default_rng(5)
    for axis in range(4):
        ratios = []
        for index in range(8):
            reference = data.normal(size=(8, 16, 8, 8))
            candidate = reference.copy()
            np.moveaxis(candidate, axis, 0)[index] *= 1.01
            truth = np.linalg.norm(candidate - reference)
            ratios.append(error_l2(sketch_of(reference), sketch_of(candidate)) / truth)
        assert np.mean(np.square(ratios)) == pytest.approx(1, abs=0.35), axis
        assert min(ratios) > 0.5, axis


def test_linear():
    data = np.random.default_rng(6)
    one, other = data.normal(size=(2, 30_000))
    whole = sketch_of(2 * one - 3 * other)
    parts = 2 * sketch_of(one).projection - 3 * sketch_of(other).projection
    assert whole.projection == pytest.approx(parts, rel=1e-9, abs=1e-9)
    of_reference, of_candidate = sketch_of(8 * one), sketch_of(2 * one)
    assert error_l2(of_reference, of_candidate, 8.0, 2.0) == pytest.approx(0, abs=1e-9)
    assert error_l2(of_reference, of_candidate) == pytest.approx(np.linalg.norm(6 * one), rel=4 * SPREAD)


def test_equal_tensors_have_no_error():
    values = np.random.default_rng(7).normal(size=20_000).astype(np.float32)
    assert error_l2(sketch_of(values), sketch_of(values.copy())) == 0


def test_float32_sums_keep_what_rounding_noise_is():
    """The sums in float32 may not add an error of the size of what is looked for."""
    values = np.random.default_rng(8).normal(size=ELEMENTS).astype(np.float32)
    narrow, wide = sketch_of(values), sketch_of(values.astype(np.float64))
    assert error_l2(narrow, wide) / wide.l2 < 5e-7


# -- many at once, and rows --------------------------------------------------------------------------------------------


def test_many_at_once_are_the_same_bits_as_one_by_one():
    data = np.random.default_rng(9)
    tensors = []
    for size in (1, 5, 61, 62, 999, ELEMENTS, 20_000):
        for dtype in ("float32", "float64", "int64", "bfloat16", "float16"):
            for factor in (1, 1e-42, 1e34):
                values = data.normal(size=size) * (factor if dtype in ("float32", "float64") else 10)
                tensors.append(values.astype(getattr(ml_dtypes, dtype, dtype)))
    data.shuffle(tensors)
    tensors[3] = tensors[3].astype(np.float32)
    tensors[3][:1] = np.nan
    many = Samples()
    numbers = [many.add(cut_of(t)) for t in tensors]
    for number, tensor in zip(numbers, tensors):
        together = Sketch.of_row(many.table[number], tensor.size, False)
        alone = sketch_of(tensor)
        assert together.size == alone.size
        assert together.row().tobytes() == alone.row().tobytes()


@pytest.mark.parametrize("size", [0, 1, 30, 61, 500, 50_000])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_come_back(size, turned):
    sketch = sketch_of(np.random.default_rng(10).normal(size=(size, 1)), turned)
    row = sketch.row()
    assert row.shape == (len(FIGURES) + BUCKETS,)
    assert row.dtype == np.float64
    back = Sketch.of_row(row, sketch.size, turned)
    assert back.transposed == turned
    assert back.projection.size == min(size, BUCKETS)
    assert all(getattr(back, name) == getattr(sketch, name) for name in ("size", *FIGURES))
    assert back.projection.tolist() == sketch.projection.tolist()
