"""Reports and runs as a notebook shows them."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from kit.records import memory_run, planted, toy_folder, toy_run

from padiff.compare import compare_runs
from padiff.dump import open_run

EVIL = "<script>alert(1)</script>"


class Parsed(HTMLParser):
    """The elements of a card and its text; each element has to be ended."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.names.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_shows_its_verdict_and_a_row_for_each_stage():
    plant = planted("head/forward/output.0", lambda v: v + 0.5, at=1)
    report = compare_runs(toy_run(), toy_run(paddle=True, plant=plant))
    card = Parsed(report._repr_html_())
    assert report.text(96) in card.text and card.text.startswith("differ torch against paddle")
    stages = re.findall(r"input|weight|forward|loss|backward|grad|update", card.text.split("closest to its limit")[1])
    assert list(dict.fromkeys(stages)) == [
        "input", "weight", "forward", "loss", "backward", "grad", "update",
    ]  # fmt: skip
    assert card.names == {"div", "b", "span", "pre", "table", "tr", "th", "td"}


def test_runs_show_their_model_and_steps_from_memory_and_from_a_folder(tmp_path):
    for run in (toy_run(), open_run(toy_folder(tmp_path / "torch"))):
        card = Parsed(run._repr_html_())
        assert "4 layers" in card.text and "3 recorded steps, finished" in card.text and run.name in card.text


def test_names_are_text():
    run = toy_run()
    named = memory_run(replace(run.info, name=EVIL), *(step for n in run.numbers() for step in run.steps(n)))
    for shown in (named, compare_runs(named, toy_run(paddle=True))):
        card = Parsed(shown._repr_html_())
        assert EVIL in card.text and "script" not in card.names
