"""The picture of a first diff: distributions, worst elements, where in the tensor the error is."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from kit.records import as_sketch, pair, planted, record, toy_run

from padiff.compare import compare_runs
from padiff.compare.measure.operands import picture_of
from padiff.records import BROADCAST, TRANSPOSED, Pair
from padiff.report_formats import to_json


def test_histograms_count_each_side_over_one_axis(rng):
    reference, candidate = rng.normal(size=5000).astype(np.float32), rng.normal(2, 3, size=5000).astype(np.float32)
    found = picture_of(pair(reference, candidate))
    edges = np.array(found.edges)
    assert len(edges) == 33 and edges[0] == min(reference.min(), candidate.min()) and edges[-1] == candidate.max()
    for counts, values in zip(found.counts, (reference, candidate)):
        places = np.minimum(np.searchsorted(edges, values.astype(np.float64), side="right"), 32) - 1
        assert counts == tuple(np.bincount(places, minlength=32).tolist()) and sum(counts) == 5000


def test_the_worst_elements_come_with_their_places_and_both_values():
    reference = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    candidate = reference.copy()
    candidate[1, 2, 3] += 5
    candidate[0, 1, 0] -= 7
    found = picture_of(pair(reference, candidate))
    assert [(one.index, *one.values) for one in found.worst] == [((0, 1, 0), 4, -3), ((1, 2, 3), 23, 28)]
    assert found.shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("shape", "stage", "place", "row", "rows"),
    [
        ((8, 5, 3, 3), "forward", (2, 4, 1, 1), 4, "5 channels (axis 1)"),
        ((8, 5), "forward", (6, 1), 6, "8 samples (axis 0)"),
        ((8, 5, 3, 3), "weight", (6, 4, 1, 1), 6, "8 rows (axis 0)"),
        ((7,), "weight", (3,), 0, ""),
    ],
)
def test_the_grid_shows_where_in_the_tensor_the_error_is(shape, stage, place, row, rows):
    reference = np.zeros(shape, np.float32)
    candidate = reference.copy()
    candidate[place] = 2
    found = picture_of(pair(reference, candidate, stage, "weight" if stage == "weight" else "output.0"))
    grid = np.array(found.error)
    assert found.rows == rows and grid.max() == 2 and np.count_nonzero(grid) == 1
    assert np.argwhere(grid)[0][0] == row


def test_a_large_tensor_is_folded_by_its_maximum(rng):
    error = np.abs(rng.normal(size=(500, 1000)))
    found = picture_of(pair(np.zeros((500, 1000)), error, "weight", "weight"))
    grid = np.array(found.error)
    assert grid.shape == (24, 48) and grid.max() == error.max()
    assert len(json.dumps(found.error)) < 30_000
    # Each field is the largest of a block of its own.
    rows, columns = (np.linspace(0, n, k + 1).astype(int) for n, k in zip((500, 1000), (24, 48)))
    assert grid[3, 7] == error[rows[3] : rows[4], columns[7] : columns[8]].max()


def test_what_is_not_finite_on_one_side_only_is_worst():
    found = picture_of(pair([1, math.nan, math.inf, 4], [1, math.nan, 3, 5]))
    assert found.worst[0].index == (2,) and found.error == ((0, 0, math.inf, 1),)
    assert sum(found.counts.reference) == 2 and sum(found.counts.candidate) == 3


@pytest.mark.parametrize("value", [0.0, 1e-30, 3e38, -5.0])
def test_tensors_of_one_value_have_a_histogram_all_the_same(value):
    found = picture_of(pair([value] * 4, [value] * 4))
    assert np.all(np.diff(found.edges) > 0) and sum(found.counts.reference) == 4 and not found.worst


def test_another_layout_is_brought_into_the_reference_s(rng):
    values = rng.normal(size=(3, 4)).astype(np.float32)
    other = values.T.copy()
    other[2, 1] += 1
    found = picture_of(pair(values, other, "weight", "weight", layout=TRANSPOSED))
    assert [one.index for one in found.worst] == [(1, 2)]


def test_there_is_none_where_the_tensors_are_not_there(monkeypatch):
    full = record("fc", "forward", "output.0", np.ones(5000, np.float32))
    assert picture_of(Pair(0, as_sketch(full), full)) is None
    assert picture_of(pair(None, [1.0])) is None
    assert picture_of(pair([1.0], [1.0, 2.0])) is None
    assert picture_of(pair(np.ones(2, np.complex64), np.ones(2, np.complex64))) is None
    assert picture_of(pair(np.ones((0, 3)), np.ones((0, 3)))) is None
    assert picture_of(pair(np.ones((4, 2)), np.ones(2), layout=BROADCAST)) is not None
    monkeypatch.setattr("padiff.compare.measure.operands._MOST", 3)
    assert picture_of(pair(np.ones(4), np.zeros(4))) is None


def test_a_report_has_the_picture_of_its_first_diff_and_both_models():
    plant = planted("head/forward/output.0", lambda v: v + 0.5, at=1)
    report = compare_runs(toy_run(), toy_run(paddle=True, plant=plant))
    content = json.loads(json.dumps(to_json(report), allow_nan=False))
    first = content["first_diff"]
    assert first["site"] == {"reference": "fc2/forward/output.0", "candidate": "head/forward/output.0"}
    worst = first["picture"]["worst"][0]
    assert worst["candidate"] - worst["reference"] == pytest.approx(0.5, abs=1e-5)
    diff = next(d for d in content["steps"][1]["diffs"] if not d["passed"])
    assert diff["shape"] == first["picture"]["shape"] == [16, 2]
    assert diff["worst"]["candidate"] - diff["worst"]["reference"] == pytest.approx(0.5, abs=1e-5)
    models = content["models"]
    assert models["reference"]["layers"] == [["(root)", "Net"], ["fc1", "Linear"], ["act", "Relu"], ["fc2", "Linear"]]
    assert models["candidate"]["framework"] == "paddle 2.0"
    partners = {one["reference"]: one["candidate"] for one in models["partners"]}
    assert partners == {"(root)": "(root)", "fc1": "body.0", "act": "body.1", "fc2": "head"}
    assert all(0 < one["confidence"] <= 1 and one["reason"] for one in models["partners"])


def test_reports_that_match_have_none():
    content = to_json(compare_runs(toy_run(), toy_run(paddle=True)))
    assert content["first_diff"] is None and content["models"] is not None
    assert not [d for step in content["steps"] for d in step["diffs"] if "worst" in d]
