"""Figures are the same with the extra ``fast`` and without it, and those that numpy gives by their definitions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kit.records import info, memory_run, pair, plain, record, root, step

import padiff
from padiff.compare.measure import pairs, sums
from padiff.compare.measure.operands import Arrays
from padiff.compare.measure.pairs import figures_of, measure_pair
from padiff.records import UNSCALED, Both, Kind

LARGE = sums.LEAST + 1234
SHAPE = (LARGE // 7, 7)


def normal(seed=0, shape=SHAPE, dtype=np.float32):
    return (np.random.default_rng(seed).normal(size=shape) * 3).astype(dtype)


def near(values, seed=9):
    noise = np.random.default_rng(seed).integers(-2, 3, values.shape)
    return (values * (1 + 1e-7 * noise)).astype(values.dtype)


def with_some(values, *some):
    """A copy in which some places, the first and the last among them, hold other values."""
    values = values.copy()
    flat = values.reshape(-1)
    places = np.linspace(0, flat.size - 1, len(some) * 3).astype(int)
    flat[places] = np.resize(np.array(some, values.dtype), len(places))
    return values


def expected(reference, candidate, scales=UNSCALED):
    """The figures by their definitions, in float64 (complex128), with numpy's own reductions."""
    wide = [
        array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) / scale
        for array, scale in zip((reference, candidate), scales)
    ]
    finite = np.isfinite(wide[0]) & np.isfinite(wide[1])
    one_side = ~finite & ~((np.isnan(wide[0]) & np.isnan(wide[1])) | (wide[0] == wide[1]))
    r, c = (np.where(finite, side, 0) for side in wide)
    error, size = np.abs(c - r), np.abs(r)
    count = np.count_nonzero(finite)
    return {
        "max_abs": error.max(),
        "max_rel": np.max(error[size > 0] / size[size > 0], initial=0.0),
        "mean_abs": error.sum() / count if count else 0.0,
        "mean_reference": size.sum() / count if count else 0.0,
        "l2": np.sqrt(np.square(error).sum()),
        "reference_l2": np.sqrt(np.square(size).sum()),
        "candidate_l2": np.sqrt(np.square(np.abs(c)).sum()),
        "nonfinite": np.count_nonzero(one_side),
        "overflowed": np.count_nonzero(~np.isfinite(wide[0]) & ~np.isfinite(wide[1])),
        "size": reference.size,
        "index": np.unravel_index(error.argmax(), error.shape) if error.max() > 0 else (0,) * error.ndim,
    }


@pytest.fixture(scope="module")
def kernel():
    pytest.importorskip("numba")
    found = sums.load()
    assert found is not None
    return found


@pytest.fixture(params=["numpy", "compiled"])
def way(request, monkeypatch):
    """Measures as without the extra, or with it."""
    found = request.getfixturevalue("kernel") if request.param == "compiled" else None
    monkeypatch.setattr(sums._compiled, "kernel", found)
    monkeypatch.setattr(sums._compiled, "tried", True)
    return request.param


@pytest.fixture
def taken(monkeypatch, kernel):
    """What the kernel was given."""
    sizes: list[int] = []

    def noted(reference, candidate, *largest):
        sizes.append(reference.size)
        return kernel(reference, candidate, *largest)

    monkeypatch.setattr(sums._compiled, "kernel", noted)
    monkeypatch.setattr(sums._compiled, "tried", True)
    return sizes


TINY = np.float32(1e-42)
CASES = {
    "float32": (normal(), near(normal())),
    "float64": (normal(dtype=np.float64), near(normal(dtype=np.float64))),
    "equal": (normal(), normal()),
    "far apart": (normal(), normal(1)),
    "one differs": (normal(), with_some(normal(), 5.0)),
    "zeros": (np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32)),
    "a reference of zeros": (np.zeros(SHAPE, np.float32), normal()),
    "a candidate of zeros": (normal(), np.zeros(SHAPE, np.float32)),
    "a ReLU": (np.maximum(normal(), 0), np.maximum(near(normal()), 0)),
    "zeros, and noise on them": (np.maximum(normal(), 0), np.maximum(normal(), 0) + np.float32(1e-9)),
    "zeros of both signs": (np.zeros(SHAPE, np.float32), with_some(np.zeros(SHAPE, np.float32), -0.0)),
    "NaN on both sides": (with_some(normal(), np.nan), with_some(near(normal()), np.nan)),
    "NaN on one side": (normal(), with_some(near(normal()), np.nan)),
    "infinity on one side": (with_some(normal(), np.inf, -np.inf), near(normal())),
    "infinities of both signs": (with_some(normal(), np.inf), with_some(near(normal()), -np.inf)),
    "NaN alone": (np.full(SHAPE, np.nan, np.float32), np.full(SHAPE, np.nan, np.float32)),
    "denormals": (with_some(np.zeros(SHAPE, np.float32), TINY, -TINY), np.full(SHAPE, 3 * TINY)),
    "huge": (normal() * np.float32(1e37), near(normal()) * np.float32(1e37)),
    "small": (normal() * np.float32(1e-36), near(normal()) * np.float32(1e-36)),
    "of all sizes": (with_some(normal(), 1e30, 1e-30, 3e38), with_some(normal(), -1e30, 1e-31, -3e38)),
    "huge float64": (normal(dtype=np.float64) * 1e140, near(normal(dtype=np.float64)) * 1e140),
    "float32 against float64": (normal(), near(normal(dtype=np.float64))),
    "float16": (normal(dtype=np.float16), normal(2, dtype=np.float16)),
    "bfloat16": (normal(dtype=ml_dtypes.bfloat16), normal(2, dtype=ml_dtypes.bfloat16)),
    "bfloat16 against float32": (normal(dtype=ml_dtypes.bfloat16), normal()),
    "int64": (normal(dtype=np.int64), normal(2, dtype=np.int64)),
    "uint8": (normal(dtype=np.float64).astype(np.uint8), normal(2, dtype=np.float64).astype(np.uint8)),
    "bool": (normal() > 0, normal(2) > 0),
    "complex": ((normal() + 1j * normal(1)).astype(np.complex64), (normal() + 1j * normal(2)).astype(np.complex64)),
    "a transposed view": (normal(shape=(200, 180)).T, near(normal(shape=(180, 200)))),
    "every second row": (normal(shape=(400, 180))[::2], near(normal(shape=(200, 180)))),
    "permuted axes": (normal(shape=(9, 40, 100)).transpose(2, 0, 1), near(normal(shape=(100, 9, 40)))),
    "one row for all": (np.broadcast_to(normal(shape=(1, 400)), (100, 400)), near(normal(shape=(100, 400)))),
    "another byte order": (normal().astype(">f4"), near(normal())),
}
SMALL = {
    "no axes": (np.float64(3.0).reshape(()), np.float64(3.5).reshape(())),
    "one element": (np.array([3.0]), np.array([-3.5])),
    "small float64": (normal(shape=(5, 3), dtype=np.float64), near(normal(shape=(5, 3), dtype=np.float64))),
}


def checked(reference, candidate, scales):
    """The figures, after a look that they are as expected."""
    found = figures_of(Arrays(reference, candidate, scales))
    with np.errstate(all="ignore"):
        wanted = expected(reference, candidate, scales)
    for name, value in wanted.items():
        own = getattr(found, name)
        assert own == (pytest.approx(value, rel=1e-12, abs=0) if isinstance(own, float) else value), name
    return found


@pytest.mark.parametrize("case", [*CASES, *SMALL])
def test_figures_are_those_of_their_definitions(case, way):
    reference, candidate = {**CASES, **SMALL}[case]
    found = checked(reference, candidate, UNSCALED)
    there = [side[found.index] for side in (reference, candidate)]
    there = [float(abs(value)) if np.iscomplexobj(value) else float(value) for value in there]
    assert list(found.values) == pytest.approx(there, rel=0, abs=0, nan_ok=True)


def test_what_is_divided_by_a_scale(way):
    reference, candidate = normal(), near(normal()) * np.float32(1024)
    checked(reference, candidate, Both(1.0, 1024.0))


def test_nothing_is_measured_of_nothing(way):
    assert figures_of(Arrays(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), UNSCALED)).size == 0


def test_other_shapes_are_refused(way):
    diff = measure_pair(pair(normal(), normal(shape=SHAPE[:1])))
    assert diff.problem.kind is Kind.SHAPES and not diff.passed


@pytest.mark.parametrize("case", ["equal", "zeros", "zeros of both signs"])
def test_what_does_not_differ_is_0_to_the_bit(case, way):
    found = figures_of(Arrays(*CASES[case], UNSCALED))
    assert (found.max_abs, found.max_rel, found.mean_abs, found.l2) == (0.0, 0.0, 0.0, 0.0)


def test_the_kernel_takes_large_tensors_of_one_dtype(taken):
    for case in ("float32", "float64", "a transposed view"):
        figures_of(Arrays(*CASES[case], UNSCALED))
    assert taken[:2] == [SHAPE[0] * 7, SHAPE[0] * 7] and sum(taken[2:]) == 200 * 180
    taken.clear()
    for case in ("float32 against float64", "bfloat16", "int64", "complex", "another byte order"):
        figures_of(Arrays(*CASES[case], UNSCALED))
    figures_of(Arrays(normal(shape=(100,)), normal(shape=(100,)), UNSCALED))
    figures_of(Arrays(*CASES["float32"], UNSCALED), elementwise=(1e-5, 1e-5))
    assert taken == []


def test_one_pass_looks_at_each_element_once(taken, monkeypatch):
    monkeypatch.setattr(pairs.Sums, "add", None)  # numpy's way is not taken besides
    figures_of(Arrays(normal(shape=(1_000_000,)), near(normal(shape=(1_000_000,))), UNSCALED))
    assert taken == [1_000_000]


def test_the_kernel_is_loaded_once_so_much_was_measured_that_it_pays(monkeypatch):
    state = sums._Compiled()
    monkeypatch.setattr(sums, "_compiled", state)
    monkeypatch.setattr(sums, "_loaded", lambda: "kernel")
    monkeypatch.setattr(sums, "_PAYS", 3 * LARGE)
    one = np.zeros(LARGE, np.float32)
    assert [sums.kernel_for(one, one) for _ in range(4)] == [None, None, "kernel", "kernel"]
    assert sums.kernel_for(one[:10], one[:10]) is None


def test_without_numba_it_is_not_tried_again(monkeypatch):
    calls = []
    monkeypatch.setattr(sums, "_compiled", sums._Compiled())
    monkeypatch.setattr(sums, "_loaded", lambda: calls.append(1))
    assert sums.load() is None and sums.load() is None and calls == [1]
    one = np.zeros(LARGE, np.float32)
    assert sums.kernel_for(one, one) is None


def test_a_numba_that_does_not_work_is_gone_without(monkeypatch):
    # What Python sees of a package that is not installed, or that raises while it is imported.
    monkeypatch.setitem(__import__("sys").modules, "padiff.compare.measure.kernel", None)
    assert sums._loaded() is None


def test_arrays_stay_writable(kernel):
    values = normal()
    kernel(values.reshape(-1), values.reshape(-1), 0.0, 0.0)
    assert values.flags.writeable


def test_verdicts_are_the_same_with_and_without_it(monkeypatch, kernel):
    tree = info(root(2), plain("a", "relu"), plain("b", "relu"))

    def run(off):
        steps = []
        for number in range(2):
            values = {layer: normal(number + k) for k, layer in enumerate("ab")}
            values["b"] = (values["b"] * (1 + off * 10.0**number * normal(7))).astype(np.float32)
            steps.append(
                step(number, [record(x, s, "output.0", v) for s in ("forward", "backward") for x, v in values.items()])
            )
        return memory_run(tree, *steps)

    found = []
    for way in (None, kernel):
        monkeypatch.setattr(sums._compiled, "kernel", way)
        monkeypatch.setattr(sums._compiled, "tried", True)
        report = padiff.compare_runs(run(0), run(1e-5))
        found.append([(d.pair.anchor.site, d.passed, d.figures.index, d.figures.l2 == 0) for d in report.diffs])
        assert str(report.first_diff.message).startswith("The runs differ first at step")
    assert found[0] == found[1]
    assert {passed for _, passed, *_ in found[0]} == {True, False}
