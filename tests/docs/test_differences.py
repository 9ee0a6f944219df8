"""The page of differences holds what its script finds; of those that need no more than the two frameworks."""

from __future__ import annotations

import importlib
import sys

import pytest

from .pages import DOCS, ROOT, Page

PAGE = Page.of(DOCS / "differences.md")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/differences"))
    for name in ("run", "entry", "functions", "models", "trainers"):  # of another benchmark
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    yield importlib.import_module("run")
    for name in ("run", "entry", "functions", "models", "trainers"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ignored_labels", ("stage loss", "paddle counts ignored", "Cause, proven")),
        ("padding_idx", ("(Embedding)", "padding_idx=0", "Cause, proven")),
    ],
)
def test_what_needs_the_frameworks_alone_is_reproduced(script, name, words):
    pytest.importorskip("torch")
    pytest.importorskip("paddle")
    (one,) = (one for one in script.differences() if one.name == name)
    said = script.found(one)
    assert one.reproduced(said)
    text = " ".join(text for _, text in PAGE.blocks)
    for word in words:
        assert word in said
        assert word in " ".join(text.split())


def test_every_difference_is_on_the_page_in_both_languages(script):
    pytest.importorskip("torch")
    pytest.importorskip("paddle")
    chinese = Page.of(DOCS / "zh/differences.md")
    for one in script.differences():
        for page, words in ((PAGE, one.english), (chinese, one.chinese)):
            assert f"## {words.title}\n" in page.text
            assert words.what in page.text
            assert words.equal in page.text
        section = PAGE.text.partition(f"## {one.english.title}\n")[2].partition("\n## ")[0]
        assert ("Reproduced here with" in section) != ("Not reproduced here" in section)
        assert ("```text" in section) == ("Reproduced here with" in section)


def test_a_package_that_is_missing_is_named_and_nothing_is_claimed(script):
    from dataclasses import replace

    lacking = replace(script.differences()[0], packages=("torch", "a-package-that-is-not-there"))
    assert script.found(lacking) is None
    text = script.section(lacking, lacking.english, None, script.ENGLISH)
    assert "Not reproduced here: a-package-that-is-not-there is not installed." in text
    assert "Reproduced here with" not in text


def test_a_verdict_that_is_another_one_is_not_called_reproduced(script):
    pytest.importorskip("torch")
    pytest.importorskip("paddle")
    one = script.differences()[0]
    assert "Reproduced here with" in script.section(one, one.english, f"... {one.shows} ...", script.ENGLISH)
    text = script.section(one, one.english, "The runs match.", script.ENGLISH)
    assert "Not reproduced here with torch" in text
    assert "Reproduced here with" not in text
