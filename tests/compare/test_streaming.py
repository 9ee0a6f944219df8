"""Comparing keeps no tensors, and reads ordinary files the short way."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kit.records import info, pair, plain, record, root, step, toy_folder, write_run

from padiff import compare_runs
from padiff.compare.measure.pairs import measure_pair
from padiff.dump.tensor_file import TensorFile, read_plain
from padiff.records import UNSCALED, Both

LARGE = 1 << 16
RNG = np.random.default_rng(5)


def large_run(path: Path, noise: float, count: int = 6) -> Path:
    """Two steps of layers whose outputs are large enough to be looked at in pieces."""
    rng = np.random.default_rng(0)
    steps = []
    for number in (0, 1):
        values = [rng.normal(size=LARGE + k).astype(np.float32) for k in range(count)]
        records = [
            record(f"l{k}", stage, "output.0", v * np.float32(1 + noise * k))
            for stage in ("forward", "backward")
            for k, v in enumerate(values)
        ]
        steps.append(step(number, records))
    return write_run(path, info(root(count), *(plain(f"l{k}", "relu") for k in range(count))), steps)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return large_run(tmp_path / "a", 0), large_run(tmp_path / "b", 1e-6)


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="counts the open files of the process as Linux tells them"
)
def test_a_report_holds_no_file_open(runs):
    before = len(os.listdir("/proc/self/fd"))
    report = compare_runs(*runs)
    assert len(os.listdir("/proc/self/fd")) == before
    assert report.diffs[0].pair.reference.value.size == LARGE  # they can still be read


def test_records_of_all_steps_share_their_words(tmp_path):
    report = compare_runs(toy_folder(tmp_path / "a"), toy_folder(tmp_path / "b"))
    first, last = (
        next(d.pair.reference for d in report.diffs if d.pair.step == n and d.pair.anchor.slot == "weight")
        for n in (0, 2)
    )
    assert first is not last and first.source.folder != last.source.folder
    for name in ("layer", "stage", "slot", "layer_type", "dtype", "shape"):
        assert getattr(first, name) is getattr(last, name)
    assert first.source.file is last.source.file and first.source.site is last.source.site


FILES = {
    "small": RNG.normal(size=(3, 5)).astype(np.float32),
    "large": RNG.normal(size=(200, 300)),
    "of many axes": np.zeros([1] * 40),
    "transposed": np.asfortranarray(RNG.normal(size=(130, 140))),
    "a scalar": np.asarray(2.5),
    "empty": np.zeros((0, 4), np.float16),
    "booleans": np.asarray([True, False]),
    "complex": np.asarray([1j, 2]),
}


@pytest.mark.parametrize("name", FILES)
def test_an_ordinary_file_is_read_as_numpy_reads_it(name, tmp_path):
    (tmp_path / "tensors").mkdir()
    np.save(tmp_path / "tensors" / "a.npy", FILES[name])
    wanted = np.load(tmp_path / "tensors" / "a.npy")
    array = read_plain(str(tmp_path), "tensors/a.npy", wanted.dtype, wanted.shape)
    if name in ("of many axes", "transposed"):  # a longer header, another order
        assert array is None
        array = TensorFile(tmp_path, "tensors/a.npy", str(wanted.dtype), wanted.shape, "a").read()
    assert array.dtype == wanted.dtype and array.shape == wanted.shape
    np.testing.assert_array_equal(array, wanted)


def test_what_is_not_ordinary_is_left_to_the_thorough_way(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for folder in (outside, inside / "tensors"):
        folder.mkdir(parents=True)
        np.save(folder / "a.npy", np.zeros(3))
    (inside / "linked.npy").symlink_to(outside / "a.npy")
    (inside / "folder").symlink_to(outside)
    (inside / "short.npy").write_bytes((outside / "a.npy").read_bytes()[:-1])
    os.mkfifo(inside / "pipe.npy")
    like = np.dtype(np.float64), (3,)
    assert read_plain(str(inside), "tensors/a.npy", *like) is not None
    for file in (
        "linked.npy",
        "folder/a.npy",
        "short.npy",
        "pipe.npy",
        "tensors",
        "gone.npy",
        "../outside/a.npy",
        "tensors/../tensors/a.npy",
        str(outside / "a.npy"),
        "",
        "tensors/\0.npy",
    ):
        assert read_plain(str(inside), file, *like) is None, file


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


LAYOUTS = {
    "one row": lambda a: a.reshape(-1),
    "a matrix": lambda a: a,
    "turned": lambda a: np.asfortranarray(a),
    "every other column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "one long sample": lambda a: a.reshape(1, -1)[:, ::-1],
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "complex64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", [UNSCALED, Both(1.0, 4.0)], ids=["unscaled", "scaled"])
def test_the_figures_of_several_chunks_are_those_of_the_formulas(dtype, layout, scales):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    scale = 100 if dtype == "int32" else 1
    r = (np.random.default_rng(1).normal(size=(230, 311)) * scale).astype(kind)
    c = (wide(r) * 1.5 + scale).astype(kind)
    c[:50] = r[:50]  # chunks that are equal first
    r[::7, ::5] = 0
    if dtype not in ("int32", "complex64"):
        r[60, 7], c[60, 7], c[61, 8] = np.nan, np.nan, np.inf
    r, c = LAYOUTS[layout](r), c if layout == "a matrix" else LAYOUTS[layout](c)
    figures = measure_pair(pair(r, c, scales=scales, stage="backward"), elementwise=(0.5, 0.1)).figures
    a, b = wide(r), wide(c) / scales.candidate
    finite = np.isfinite(a) & np.isfinite(b)
    assert figures.nonfinite == (0 if dtype in ("int32", "complex64") else 1)
    with np.errstate(all="ignore"):
        error, size = np.where(finite, np.abs(b - a), 0), np.where(finite, np.abs(a), 0)
    some = size > 0
    close = {"rel": 1e-12}
    assert figures.max_abs == error.max()
    assert figures.index == np.unravel_index(error.argmax(), error.shape)
    assert figures.max_rel == pytest.approx((error[some] / size[some]).max(), **close)
    assert figures.mean_abs == pytest.approx(error.sum() / finite.sum(), **close)
    assert figures.mean_reference == pytest.approx(size.sum() / finite.sum(), **close)
    assert figures.l2 == pytest.approx(np.sqrt(np.square(error).sum()), **close)
    assert figures.reference_l2 == pytest.approx(np.sqrt(np.square(size).sum()), **close)
    assert figures.candidate_l2 == pytest.approx(np.sqrt(np.square(np.abs(np.where(finite, b, 0))).sum()), **close)
    assert figures.mismatched == np.count_nonzero(error > 0.5 + 0.1 * size)


@pytest.mark.parametrize("shape", [(10_000,), (3, 40_000), (200, 400), (9, 50_000), (2000, 40)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("stage", ["backward", "update"])
@pytest.mark.parametrize("few", [True, False], ids=["elements", "a sample"])
def test_the_bulk_is_what_is_left_without_the_largest_elements_or_the_worst_samples(shape, turned, stage, few):
    rng = np.random.default_rng(2)
    r = rng.normal(size=shape).astype(np.float32)
    c = r + rng.normal(size=shape).astype(np.float32) * np.float32(0.01)
    if few:
        c.reshape(-1)[rng.integers(0, r.size, 4)] += 1e9  # they must not drown the rest
    else:
        c[-1] += 3.0
    r, c = (np.asfortranarray(r), np.asfortranarray(c)) if turned else (r, c)
    squares = np.square(c.astype(np.float64) - r.astype(np.float64))
    expected = np.sort(squares.reshape(-1))[: -(4 + r.size // 20_000)].sum()
    if stage == "backward" and shape[0] >= 8:
        samples = np.sort(squares.reshape(shape[0], -1).sum(axis=1))
        expected = min(expected, samples[: -(shape[0] // 8)].sum())
    assert measure_pair(pair(r, c, stage=stage)).figures.bulk_l2 == pytest.approx(np.sqrt(expected), rel=1e-9)


@pytest.mark.parametrize("errors", ["all equal", "few", "none but one", "steps"])
@pytest.mark.parametrize("size", [1000, 1024, 1500, 70_000, 200_000])
def test_the_bulk_leaves_out_as_many_elements_where_errors_are_equal_or_zero(errors, size):
    r = np.ones(size)
    c = r.copy()
    if errors == "all equal":
        c += 0.5
    elif errors == "few":
        c[:: size // 10] += np.arange(len(c[:: size // 10])) / 8
    elif errors == "none but one":
        c[size // 2] += 3.0
    else:
        c += np.repeat([0.125, 0.25, 0.5, 1.0], size // 4)[np.random.default_rng(3).permutation(size)]
    squares = np.sort(np.square(c - r))[: -(4 + size // 20_000)]
    bulk = measure_pair(pair(r, c, stage="update")).figures.bulk_l2
    assert bulk == pytest.approx(np.sqrt(squares.sum()), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_relative_error_is_over_elements_that_have_one(dtype):
    r = np.maximum(RNG.normal(size=50_000), 0).astype(dtype)
    c = (r * (1 + 1e-3 * RNG.normal(size=50_000))).astype(dtype)
    for stray in (False, True):
        c[np.flatnonzero(r == 0)[::7]] = 0.25 * stray  # beside 0 / 0 also something / 0
        some = r > 0
        expected = (np.abs(c[some].astype(float) - r[some]) / r[some]).max()
        assert measure_pair(pair(r, c)).figures.max_rel == pytest.approx(expected, rel=1e-6)


def test_equal_bits_that_are_no_numbers_are_equal_and_left_out():
    values = np.ones(100_000, np.float32)
    values[70_000:70_003] = np.nan, np.inf, -np.inf
    figures = measure_pair(pair(values, values.copy())).figures
    assert (figures.nonfinite, figures.max_abs, figures.mean_reference) == (0, 0.0, 1.0)
    assert figures.reference_l2 == figures.candidate_l2 == pytest.approx(np.sqrt(100_000 - 3))


def test_squares_beyond_float64_are_infinite_but_their_elements_are_compared():
    r, c = np.asarray([1e200, 1.0]), np.asarray([1e200, 2.0])
    figures = measure_pair(pair(r, c)).figures
    assert (figures.max_abs, figures.l2, figures.reference_l2, figures.nonfinite) == (1.0, 1.0, np.inf, 0)
