from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.browser import Browser, Tab, browser, find

from padiff_page import page
from page.reports import content_of


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests; each has a tab of its own, with nothing kept of others."""
    program = find()
    if program is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    if sys.platform != "linux":
        pytest.skip("the browser is driven through pipes as Linux has them")
    with browser(program, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Tab]:
    tab = chromium.tab()
    yield tab
    tab.close()


@pytest.fixture(scope="session")
def content() -> dict[str, Any]:
    """Return the JSON of a report whose runs differ."""
    return content_of()


@pytest.fixture(scope="session")
def file(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of its page."""
    return written(content, tmp_path_factory.mktemp("page"))


def written(content: dict[str, Any], folder: Path) -> str:
    (folder / "report.html").write_text(page(content), encoding="utf-8")
    return (folder / "report.html").as_uri()
