"""The HTML around the page, without a browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import tracemalloc
from html.parser import HTMLParser

import pytest

from padiff_cli.main import main
from padiff_hooks.step_lines import StepLines, page_lines
from padiff_page import page, page_parts
from padiff_page.bundle import static_files
from page.reports import EVIL, content_of, large


class Parsed(HTMLParser):
    """The elements of a page, and the text of those that hold text as it stands."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._inside = tag
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside][-1] += data


def lines(parsed: Parsed) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(base64.b64decode(parsed.texts["script"][0])).splitlines()]


def nearly(left: object, right: object) -> bool:
    """Equal, but for digits that no page shows."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(nearly(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(nearly, left, right))
    return left == pytest.approx(right, rel=1e-6) if isinstance(left, float) else left == right


def test_all_of_the_report_is_in_it_and_nothing_of_it_is_markup():
    content = content_of(evil=True)
    parsed = Parsed(page(content))
    tags = [tag for tag, _ in parsed.elements]
    assert tags.count("script") == 2 and len(parsed.texts["script"]) == 2
    assert EVIL in parsed.texts["title"][0]
    head, *steps = lines(parsed)
    assert nearly({**head, "steps": steps}, content)


def test_it_may_run_its_own_script_and_style_and_fetch_nothing():
    parsed = Parsed(page(content_of()))
    policy = next(a["content"] for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules
    for kind, text in (("script-src", parsed.texts["script"][1]), ("style-src", parsed.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert not [a for _, a in parsed.elements if "src" in a or "href" in a]


def test_no_module_makes_markup_of_text():
    for name, content in static_files().items():
        text = content.decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
        assert "</script" not in text and "</style" not in text and "<!--" not in text, name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name


def test_modules_are_short():
    for name, content in static_files().items():
        assert content.count(b"\n") < 330, name


def test_the_same_report_makes_the_same_page():
    assert page(content_of()) == page(content_of())


@pytest.mark.slow
@pytest.mark.parametrize("whole_bytes", [10_000, 1 << 40], ids=["packed", "whole"])
def test_of_a_long_report_only_a_step_is_held_at_a_time(whole_bytes):
    pattern = large(200, 1)

    def steps(many: int):
        for number in range(many):
            diffs = [
                {**diff, "judged": {**diff["judged"]}, "l2": {**diff["l2"]}} for diff in pattern["steps"][0]["diffs"]
            ]
            yield {**pattern["steps"][0], "step": number, "diffs": diffs}

    def peak(many: int) -> int:
        tracemalloc.start()
        for _ in page_parts(pattern, page_lines(steps(many), whole_bytes=whole_bytes)):
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(2)  # what is imported and kept
    few, many = peak(5), peak(40)
    held = 35 * 200 * 500  # a diff takes more than 500 bytes
    assert many < few + held / 5


def test_a_packed_page_holds_what_the_report_has():
    content = content_of()
    parsed = Parsed("".join(page_parts(content, page_lines(content["steps"], whole_bytes=0))))
    head, *steps = lines(parsed)
    assert head["first_diff"] == content["first_diff"] or nearly(head["first_diff"], content["first_diff"])
    reader = StepLines()
    for step, expected in zip(steps, content["steps"]):
        reader.learn(step)
        whole = reader.whole(step)
        assert "packed" in step and [d["reference"] for d in whole["diffs"]] == [
            d["reference"] for d in expected["diffs"]
        ]
        assert [d["passed"] for d in whole["diffs"]] == [d["passed"] for d in expected["diffs"]]


def test_compare_writes_it(tmp_path, capsys):
    from kit.records import toy_folder

    toy_folder(tmp_path / "a")
    toy_folder(tmp_path / "b", paddle=True)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "out.html")]) == 0
    head, *steps = lines(Parsed((tmp_path / "out.html").read_text(encoding="utf-8")))
    assert head["passed"] is True and [step["step"] for step in steps] == [0, 1, 2]
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err
