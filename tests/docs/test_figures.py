"""Figures of the pages are written by the benchmarks that measured them."""

from __future__ import annotations

import importlib
import json

import pytest

from .pages import ROOT


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("performance_page")


def test_a_figure_is_a_range_over_the_last_runs_that_measured_it(pages, tmp_path):
    for value in (9.0, 1.31, 1.052, 1.2, 1.19, 1.18):
        figures = pages.keep("one", {"sketch": value}, tmp_path)
    assert figures.values["sketch"] == [1.31, 1.052, 1.2, 1.19, 1.18]
    assert figures.text("sketch") == "1.05 to 1.31"
    assert figures.text("sketch", pages.CHINESE, digits=1) == "1.1 到 1.3"
    figures = pages.keep("one", {"other": 4879.0}, tmp_path)
    assert figures.text("other", digits=0) == "4,879"
    assert figures.text("sketch") == "1.05 to 1.31"
    assert figures.text("nothing") == "not measured"
    assert pages.kept("one", tmp_path) == figures
    assert pages.kept("two", tmp_path) is None


def test_figures_of_another_machine_are_no_part_of_a_range(pages, tmp_path):
    pages.keep("one", {"sketch": 1.0}, tmp_path)
    path = tmp_path / "one.json"
    known = json.loads(path.read_text())
    known["machine"]["name"] = "another processor"
    path.write_text(json.dumps(known))
    figures = pages.keep("one", {"sketch": 2.0}, tmp_path)
    assert figures.text("sketch") == "2.00"
    assert figures.machine == pages.machine()
    assert figures.machine["name"] in figures.measured_on()


def test_a_block_is_replaced_in_both_languages_and_nothing_else(pages, tmp_path):
    for path in ("docs/zh/performance.md", "docs/performance.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("# a\n\n<!-- one: begin -->\nold\n<!-- one: end -->\n\nb\n")
    texts = {pages.ENGLISH: pages.table(["", "x"], [["y", "1"]]), pages.CHINESE: "中文"}
    for _ in range(2):  # once more changes nothing
        pages.write("one", texts.get, root=tmp_path)
        english = (tmp_path / "docs/performance.md").read_text()
        table = "| | x |\n| --- | --- |\n| y | 1 |"
        assert english == f"# a\n\n<!-- one: begin -->\n\n{table}\n\n<!-- one: end -->\n\nb\n"
        assert "中文" in (tmp_path / "docs/zh/performance.md").read_text()


def test_a_page_without_the_block_stays_as_it_is(pages, tmp_path):
    (tmp_path / "README.md").write_text("<!-- one: begin -->\n<!-- one: end -->\n")
    (tmp_path / "README.zh.md").write_text("# 没有\n")
    with pytest.raises(ValueError, match="one: begin"):
        pages.write("one", str.upper, page="README.md", root=tmp_path)
    assert (tmp_path / "README.md").read_text() == "<!-- one: begin -->\n<!-- one: end -->\n"
