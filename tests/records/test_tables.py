"""All pairs of a report, as a table of pandas and of Arrow."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from docs.pages import DOCS
from kit.records import planted, sketched_run, toy_run

from padiff import compare_runs
from padiff.errors import UsageError
from padiff.records.report import COLUMNS


@pytest.fixture
def report():
    plant = planted("head/grad/weight", lambda value: value + 1, at=1)
    return compare_runs(toy_run(), toy_run(paddle=True, plant=plant))


def test_arrow_has_a_row_for_each_pair(report):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = report.to_arrow().to_pylist()
    assert len(rows) == len(report.diffs)
    assert [(row["step"], row["stage"], row["slot"]) for row in rows] == [
        (diff.pair.step, diff.pair.stage, diff.pair.anchor.slot) for diff in report.diffs
    ]
    wrong = [row for row in rows if row["outcome"] == "differs"]
    assert len(wrong) == len(report.failed) and {row["standing"] for row in rows} >= {"first", None}
    first = wrong[0]
    assert (first["step"], first["stage"], first["reference"], first["slot"]) == (1, "grad", "fc2", "weight")
    assert first["max_abs"] == pytest.approx(1) and first["mean_abs"] == pytest.approx(1)
    assert first["l2"] == pytest.approx(math.sqrt(first["size"]))
    assert first["times_limit"] == pytest.approx(first["value"] / first["limit"]) and first["value"] > first["limit"]


def test_pandas_has_the_same_rows_as_arrow(report):
    pandas, _ = pytest.importorskip("pandas", reason="no pandas"), pytest.importorskip("pyarrow", reason="no pyarrow")
    frame = report.to_pandas()
    assert [*frame.columns] == [column.name for column in COLUMNS]
    for name, values in report.to_arrow().to_pydict().items():
        got = [None if pandas.isna(value) else value for value in frame[name]]
        assert got == values, name
    assert frame.step.dtype == "Int64" and frame.rel_l2.dtype == np.float64


def test_what_is_not_known_is_missing():
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = compare_runs(sketched_run(toy_run()), sketched_run(toy_run(paddle=True))).to_arrow().to_pylist()
    sketched = [row for row in rows if row["basis"] == "sketches"]
    assert sketched and all(row["max_abs"] is None and row["rel_l2"] is not None for row in sketched)


def test_every_column_is_documented():
    for page in (DOCS / "comparing.md", DOCS / "zh" / "comparing.md"):
        lines = page.read_text().splitlines()
        assert [line for line in lines if line.startswith(tuple(f"| `{c.name}` | {c.kind} |" for c in COLUMNS))] != []
        assert all(any(line.startswith(f"| `{c.name}` | {c.kind} |") for line in lines) for c in COLUMNS)


@pytest.mark.parametrize(("name", "package"), [("to_pandas", "pandas"), ("to_arrow", "pyarrow")])
def test_the_error_says_what_to_install(report, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    with pytest.raises(UsageError, match=rf"{name}\(\) needs {package}.*pip install 'padiff-hooks\[tables\]'"):
        getattr(report, name)()
