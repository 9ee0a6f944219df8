"""The Chinese pages keep step with the English ones: the same headings, tables, lists and code."""

from __future__ import annotations

import importlib.util
import re

import pytest

from .pages import DOCS, ROOT, Page, partners


@pytest.mark.parametrize(("english", "chinese"), partners(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_and_its_partner_have_the_same_headings_tables_lists_and_code(english, chinese):
    assert chinese.exists(), f"{english.relative_to(ROOT)} has no Chinese partner: write {chinese.relative_to(ROOT)}"
    page, partner = Page.of(english), Page.of(chinese)
    assert page.levels == partner.levels, "the headings' levels"
    assert page.blocks == partner.blocks, "the blocks of code"
    assert page.rows == partner.rows, "the rows of the tables"
    assert page.items == partner.items, "the items of the lists"
    assert page.shown == partner.shown, "the names of the reference"


def test_no_chinese_page_is_left_without_an_english_one():
    assert {path for _, path in partners()} >= {*DOCS.glob("zh/**/*.md")}


def test_every_page_is_in_the_menu_once():
    pages = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(pages) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md"))


def test_the_chinese_atlas_is_written_from_the_english_one():
    path = DOCS / "zh/write_atlas.py"
    spec = importlib.util.spec_from_file_location("write_atlas", path)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    english = (DOCS / "atlas.md").read_text(encoding="utf-8")
    assert (DOCS / "zh/atlas.md").read_text(encoding="utf-8") == writer.page(english), f"run python {path}"


def test_blocks_headings_tables_and_names_are_found_as_they_stand():
    code = "```python\n# no heading\n| no table |\n```"
    text = f"# a\n\n| b |\n| - |\n\n{code}\n\n## c\n\n* d:\n\n  ```\n  e\n  ```\n\n::: f.g\n"
    page = Page(DOCS, text)
    assert page.levels == [1, 2]
    assert page.rows == [2]
    assert page.items == 1
    assert page.blocks == [("python", "# no heading\n| no table |\n"), ("", "  e\n")]
    assert page.shown == ["f.g"]
