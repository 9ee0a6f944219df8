"""Log folders as the tab reads them: by bytes, whole lines only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from padiff.records import Both
from padiff_hooks.stream import DiffStream
from padiff_page import logs
from page.reports import REFERENCE, STEP, step_reports

NAMES = Both("/runs/torch", "/runs/paddle")


def lines(folder: Path, *texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / logs.LINES, "a", encoding="utf-8", newline="") as file:
        file.write("".join(texts))
    return folder


def test_what_is_new_is_read_and_a_line_that_is_being_written_waits(tmp_path):
    folder = lines(tmp_path, "{}\n", '{"step": 0}\n', '{"st')
    first = logs.part(folder, 0)
    assert [text for _, _, text in first["lines"]] == ["{}", '{"step": 0}'] and first["next"] == 15
    assert logs.part(folder, 15)["lines"] == []
    lines(folder, 'ep": 1}\n')
    second = logs.part(folder, first["next"])
    assert second["lines"] == [[15, 27, '{"step": 1}']] and second["next"] == second["size"] == 27
    assert second["log"] == first["log"]
    # One line again, by the place that was named.
    assert logs.part(folder, 15, 27)["lines"] == [[15, 27, '{"step": 1}']]


def test_a_log_that_begins_anew_is_another_one(tmp_path):
    before = logs.part(lines(tmp_path, '{"recordings": ["a", "b"]}\n'), 0)
    (tmp_path / logs.LINES).unlink()
    after = logs.part(lines(tmp_path, '{"recordings": ["a", "c"]}\n'), before["next"])
    assert after["log"] != before["log"]


@pytest.mark.parametrize("size", [10, 300])
def test_lines_come_in_parts_also_those_that_are_longer_than_one(tmp_path, monkeypatch, size):
    monkeypatch.setattr(logs, "PART", 64)
    written = [json.dumps({"step": k, "more": "x" * size}) for k in range(20)]
    folder, place, found = lines(tmp_path, *(f"{one}\n" for one in written)), 0, []
    while place < (folder / logs.LINES).stat().st_size:
        part = logs.part(folder, place)
        found += [text for _, _, text in part["lines"]]
        assert part["next"] > place
        place = part["next"]
    assert found == written


def test_pairs_are_found_below_the_log_folder_by_their_paths(tmp_path):
    for name in (".", "one", "two/three", ".hidden"):
        lines(tmp_path / name, "{}\n")
    assert set(logs.pairs({"": tmp_path})) == {tmp_path.name, "one", "two/three"}
    assert set(logs.pairs({"mine": tmp_path / "two"})) == {"mine/three"}
    assert logs.pairs({"": tmp_path / "none"}) == {}


def test_a_report_lies_beside_the_lines_and_says_what_it_came_to(tmp_path):
    stream = DiffStream(tmp_path, NAMES)
    reports = step_reports()
    for report in reports[:STEP]:
        stream.write(report)
    assert logs.outcome(tmp_path) == "match" and logs.report(tmp_path)["first_diff"] is None
    clean = logs.version(tmp_path)
    for report in reports[STEP:]:
        stream.write(report)
    stream.close()
    found = logs.report(tmp_path)
    assert logs.outcome(tmp_path) == found["outcome"] == "differ" and logs.version(tmp_path) != clean
    assert found["first_diff"]["site"]["reference"] == REFERENCE and found["first_diff"]["step"] == STEP
    assert found["step"] == STEP and found["coverage"]["compared"] == reports[STEP].coverage.compared
    assert "steps" not in found and [one["candidate"] for one in found["models"]["partners"]][-1] == "head"
    # A restart that writes nothing new knows it as well.
    again = DiffStream(tmp_path, NAMES)
    for report in reports:
        again.write(report)
    again.close()
    assert logs.report(tmp_path) == found


def test_the_report_of_another_recording_is_not_kept(tmp_path):
    stream = DiffStream(tmp_path, NAMES)
    stream.begin(Both("a", "b"))
    for report in step_reports():
        stream.write(report)
    assert logs.outcome(tmp_path) == "differ"
    stream.begin(Both("a", "c"))
    assert logs.report(tmp_path) is None
    stream.write(step_reports()[0])
    stream.close()
    assert logs.outcome(tmp_path) == "match"


def test_a_report_that_is_damaged_is_none(tmp_path):
    for content in ("", "[]", '{"outcome"', "\x00"):
        (tmp_path / logs.REPORT).write_text(content)
        assert logs.report(tmp_path) is None and logs.outcome(tmp_path) == ""
