"""The page as a tab of a real TensorBoard, while the log folder grows."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.browser import Tab

from padiff.records import Both
from padiff_hooks.stream import DiffStream
from page.reports import EVIL, REFERENCE, STEP, STEPS, step_reports
from page.tensorboards import tensorboard

pytestmark = pytest.mark.slow

NAMES = Both("/runs/torch", "/runs/paddle")
FRAME = "document.querySelector('iframe').contentWindow"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    logs = tmp_path_factory.mktemp("logs")
    with tensorboard(logs, tmp_path_factory.mktemp("installed")) as address:
        yield logs, address


@pytest.fixture
def logs(served: tuple[Path, str]) -> Path:
    return served[0]


@pytest.fixture
def address(served: tuple[Path, str]) -> str:
    return served[1]


def asked(address: str, route: str) -> dict:
    with urllib.request.urlopen(f"{address}data/plugin/padiff/{route}") as answer:
        return json.loads(answer.read())


def in_tab(tab: Tab, address: str) -> None:
    """Open TensorBoard at its tab."""
    tab.open(f"{address}#padiff", 1500, 1000)
    tab.wait(f"{FRAME}.padiff?.heat.frames.length && {FRAME}.document.querySelector('#verdict .stats')", 60)


def own(tab: Tab) -> list[str]:
    """What the page complained about, without TensorBoard's own."""
    return [one for one in tab.troubles if "Three.js" not in one and "WebGL" not in one]


def test_a_live_run_adds_columns_and_then_the_verdict(tab, logs, address):
    reports = step_reports()
    with contextlib.closing(DiffStream(logs / "live", NAMES)) as stream:
        for report in reports[:STEP]:
            stream.write(report)
    in_tab(tab, address)
    tabs = "[...document.querySelectorAll('[role=tab]')].map(one => one.innerText.trim().toLowerCase())"
    tab.wait(f"{tabs}.includes('padiff')")
    steps = f"{FRAME}.padiff.store.steps"
    tab.wait(f"{steps}.length === {STEP}")
    assert "match" in tab.run(f"{FRAME}.document.querySelector('#verdict').innerText").lower()
    with contextlib.closing(DiffStream(logs / "live", NAMES)) as stream:
        for report in reports[STEP:]:
            stream.write(report)
    tab.wait(f"{steps}.length === {STEPS}")
    tab.wait(f"{FRAME}.document.querySelector('#verdict').innerText.includes('Step {STEP}')")
    assert tab.run(f"{FRAME}.padiff.heat.first.node.path") == "fc2"
    assert tab.run(f"(c => c.site.reference)({FRAME}.padiff.store.firstCell())") == REFERENCE
    # The rest of a line is read again when its card is opened.
    tab.run(f"{FRAME}.padiff.select({FRAME}.padiff.store.firstCell())")
    tab.wait(f"{FRAME}.document.querySelector('#card .stats')")
    shown = tab.run(f"{FRAME}.document.querySelector('#card').innerText")
    assert "fc2" in shown and "head" in shown and "Distributions" in shown
    assert own(tab) == []


def test_the_tab_is_as_dark_as_tensorboard_is(tab, logs, address):
    with contextlib.closing(DiffStream(logs / "dark", NAMES)) as stream:
        stream.write(step_reports()[0])
    tab.dark(True)  # the browser's own setting
    in_tab(tab, address)
    paper = f"{FRAME}.getComputedStyle({FRAME}.document.body).backgroundColor"
    tab.run("document.body.classList.remove('dark-mode')")
    tab.wait(f"{paper} === 'rgb(247, 247, 245)' && !{FRAME}.padiff.scheme.matches", 10)
    tab.run("document.body.classList.add('dark-mode')")
    tab.wait(f"{paper} === 'rgb(19, 19, 21)' && {FRAME}.padiff.scheme.matches", 10)
    tab.run("document.body.classList.remove('dark-mode')")
    tab.wait(f"{paper} === 'rgb(247, 247, 245)'", 10)


def test_several_pairs_are_a_list_and_one_that_parts_is_opened(tab, logs, address):
    reports = step_reports()
    for name, some in (("a/clean", reports[:2]), ("b/parts", reports)):
        with contextlib.closing(DiffStream(logs / name, NAMES)) as stream:
            for report in some:
                stream.write(report)
    in_tab(tab, address)
    options = f"[...{FRAME}.document.querySelectorAll('.top select option')].map(one => one.value)"
    tab.wait(f"{options}.includes('a/clean') && {options}.includes('b/parts')")
    assert tab.run(f"{FRAME}.document.querySelector('.top select').value") in ("b/parts", "live")
    tab.run(
        f"(choice => {{ choice.value = 'a/clean'; choice.dispatchEvent(new Event('change')); }})"
        f"({FRAME}.document.querySelector('.top select'))"
    )
    tab.wait(f"{FRAME}.padiff.store.steps.length === 2")
    tab.wait(f"{FRAME}.document.querySelector('#verdict .chip').innerText === 'match'")
    assert own(tab) == []


def test_the_tab_is_in_the_language_of_the_log_folder(tab, logs, address, monkeypatch):
    monkeypatch.setenv("PADIFF_LANG", "zh")
    with contextlib.closing(DiffStream(logs / "chinese", NAMES)) as stream:
        for report in step_reports():
            stream.write(report)
    in_tab(tab, address)
    options = f"[...{FRAME}.document.querySelectorAll('.top select option')].map(one => one.value)"
    tab.wait(f"{options}.includes('chinese')")
    assert asked(address, "words?pair=chinese")["words"]
    tab.run(
        f"(choice => {{ choice.value = 'chinese'; choice.dispatchEvent(new Event('change')); }})"
        f"({FRAME}.document.querySelector('.top select'))"
    )
    tab.wait(f"{FRAME}.document.documentElement.lang === 'zh' && {FRAME}.padiff.store.steps.length === {STEPS}")
    tab.wait(f"/[\u3400-\u9fff]/.test({FRAME}.document.querySelector('#verdict .chip').innerText)")
    assert own(tab) == []


@pytest.mark.parametrize("name", ["..", "/etc", "live/../..", EVIL, ""])
def test_only_folders_that_were_found_are_read(address, name):
    query = urllib.request.quote(name, safe="")
    with pytest.raises(urllib.error.HTTPError) as refused:
        asked(address, f"follow?pair={query}&start=0")
    with refused.value as answer:  # its connection is still open
        assert answer.code == 404
