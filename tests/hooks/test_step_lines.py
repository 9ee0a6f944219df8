"""Lines of steps: what they keep of a step's diffs, how large they are, and that old ones are read."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from kit.records import planted, toy_run

from padiff.compare import RunComparison
from padiff.errors import UsageError
from padiff.records import Both
from padiff.report_formats import to_json
from padiff_hooks.figure_codes import NO_FIGURE, codes, numbers_of
from padiff_hooks.step_lines import StepLines, read
from padiff_hooks.stream import DiffStream

NAMES = Both("/runs/torch", "/runs/paddle")


def reports(numbers, **rest):
    comparison = RunComparison(toy_run(numbers), toy_run(numbers, paddle=True, **rest))
    return [comparison.compare(number) for number in numbers]


def faulty(numbers=range(6), at=3):
    return reports(numbers, plant=planted("head/forward/output.0", lambda v: v + 0.5, at=at))


def written(folder, made):
    stream = DiffStream(folder, NAMES)
    for report in made:
        stream.write(report)
    stream.close()
    return folder


def numbers(value):
    """Like `float`, of what JSON holds."""
    return math.nan if value is None else float(value)


def nearly(found, expected) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(nearly(found[key], expected[key]) for key in expected)
    if isinstance(expected, float):
        return numbers(found) == pytest.approx(expected, rel=4e-3, abs=0)
    return found == expected


def without(diff):
    """A diff without what only those have that stand whole."""
    return {key: value for key, value in diff.items() if key not in ("worst", "shape")}


def test_figures_are_true_to_four_parts_in_a_thousand_over_all_that_floats_reach():
    values = np.concatenate([[0.0], 10.0 ** np.random.default_rng(0).uniform(-80, 80, 2000)])
    assert np.allclose(numbers_of(codes(values.tolist())), values, rtol=4e-3, atol=0)
    assert numbers_of(codes(["inf", "-inf"])).tolist() == [math.inf, -math.inf]
    assert np.isnan(numbers_of(codes([None, NO_FIGURE, math.nan]))).all()
    assert len(set(codes([None, NO_FIGURE, 0.0, "inf"]).tolist())) == 4


def test_every_diff_is_read_again_and_those_that_tell_most_to_the_last_digit(tmp_path):
    made = faulty()
    found = list(read(written(tmp_path, made)))
    assert [line["step"] for line in found] == list(range(6))
    for line, report in zip(found, made):
        whole = to_json(report)
        expected = whole["steps"][0]["diffs"]
        assert len(line["diffs"]) == len(expected)
        for one, other in zip(line["diffs"], expected):
            assert nearly(one, other) if one.get("worst") else nearly(one, without(other)), (one, other)
    first = next(one for one in found[3]["diffs"] if one.get("standing") == "first")
    assert first in to_json(made[3])["steps"][0]["diffs"]
    assert found[3]["first_diff"] == json.loads(json.dumps(to_json(made[3])["first_diff"]))
    assert found[3]["first_diff"]["picture"]


def test_a_line_is_a_tenth_of_what_its_diffs_take_and_names_what_is_new_only(tmp_path):
    lines = [json.loads(line) for line in (written(tmp_path, faulty()) / "diffs.jsonl").read_text().splitlines()]
    assert "sites" in lines[1] and not any("sites" in line for line in lines[2:])
    # 24 bytes each, by the table; with their names as JSON more than 400.
    size = len(lines[2]["packed"]["figures"])
    assert size == pytest.approx(22 * 9 * 2 * 4 / 3, rel=0.02)


@pytest.mark.parametrize(
    "sites",
    [
        ("a//b/forward/output.0", "a//b/forward/output.0"),
        ("a/forward/output.0", "/forward//forward/output.0"),
        ("a/forward/output.0", None),
        (None, "b/forward/output.0#1"),
        ("0", "0"),
        ("", "//"),
    ],
)
def test_sites_of_any_name_are_read_as_they_were(sites):
    diff = {"stage": "forward", "reference": sites[0], "candidate": sites[1], "passed": True, "max_abs": 0.5}
    line = json.loads(json.dumps({"step": 0, **StepLines().packed([diff])}))
    reader = StepLines()
    reader.learn(line)
    [found] = reader.whole(line)["diffs"]
    assert (found["reference"], found["candidate"]) == sites


def test_only_ten_diffs_of_a_step_stand_whole_the_first_and_further_faults_before_others():
    [report] = reports([0], plant=lambda seen, number: seen.value * 3 + 1)
    whole = to_json(report)
    assert len(report.failed) > 10
    [*_, last] = [one for one in whole["steps"][0]["diffs"] if not one["passed"]]
    last["standing"] = "new"
    line = StepLines().line(report, whole)
    assert len(line["diffs"]) == 10
    assert {"first", "new"} <= {one["standing"] for one in line["diffs"]}


def test_beyond_its_bound_a_file_keeps_how_many_times_the_allowed_and_all_of_the_verdict():
    made = faulty()
    whole = [to_json(report) for report in made]
    lines = StepLines(folded_after=0)
    reader = StepLines()
    for report, content in zip(made, whole):
        line = json.loads(json.dumps(lines.line(report, content)))
        reader.learn(line)
        for one, other in zip(reader.whole(line)["diffs"], content["steps"][0]["diffs"]):
            if "judged" in one:
                assert one == json.loads(json.dumps(other))
                continue
            assert one["passed"] == other["passed"] and one["reference"] == other["reference"]
            judged = other.get("judged")
            if judged is None:
                assert "times" not in one
            elif other["max_abs"] == 0:
                assert one["times"] == one["max_abs"] == 0
            else:
                assert one["times"] == pytest.approx(judged["value"] / judged["limit"], rel=4e-3)
        if report.first_diff is not None:
            assert line["first_diff"] == json.loads(json.dumps(content["first_diff"]))
    assert len(json.dumps(line["packed"])) < 220


def test_lines_of_an_older_padiff_are_read_and_followed(tmp_path):
    made = faulty()
    head = {"schema_version": 1, **dict(zip(("reference", "candidate"), NAMES)), "recordings": ["", ""]}
    old = [head]
    for report in made[:5]:
        whole = to_json(report)
        old.append({"step": whole["steps"][0]["step"], "passed": report.passed, "outcome": report.outcome})
        old[-1] |= {"first_diff": whole["first_diff"], "coverage": 1.0, "diffs": whole["steps"][0]["diffs"]}
    (tmp_path / "diffs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    assert list(read(tmp_path)) == [json.loads(json.dumps(line)) for line in old[1:]]
    found = list(read(written(tmp_path, made)))
    assert [line["step"] for line in found] == list(range(6)) and found[-1]["first_diff"] is None
    assert len(found[-1]["diffs"]) == 22
    again = json.loads((tmp_path / "diffs.jsonl").read_text().splitlines()[-1])
    assert "sites" not in again  # the old lines have named them


@pytest.mark.parametrize(
    "damage",
    [{"packed": {"rows": [[0, 99]], "at": [], "figures": "AAAA"}}, {"packed": 5}, {"sites": 3}, {"diffs": [{}]}],
    ids=["rows", "packed", "sites", "diffs"],
)
def test_a_damaged_table_is_reported_with_its_line(tmp_path, damage):
    written(tmp_path, faulty(range(2)))
    path = tmp_path / "diffs.jsonl"
    with open(path, "a") as file:
        file.write(json.dumps({"step": 2, "diffs": [], "first_diff": None, **damage}) + "\n")
    with pytest.raises(UsageError, match=r"diffs\.jsonl, line 4, is damaged"):
        list(read(tmp_path))
    with pytest.raises(UsageError, match=r"diffs\.jsonl, line 4, is damaged"):
        DiffStream(tmp_path, NAMES)


def test_a_folder_without_lines_is_reported(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*diffs\.jsonl: .*Give the log folder of a comparison"):
        list(read(tmp_path))
