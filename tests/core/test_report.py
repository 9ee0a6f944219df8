from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest

from padiff import Tolerance, compare_runs
from padiff.records import Report
from padiff.report import coverage_lines, number, stage_table, to_json, to_junit, to_markdown, verdict

from .making import info, linear, memory_run, plain, planted, record, root, step, toy_info, toy_run, toy_steps


@pytest.fixture
def good() -> Report:
    return compare_runs(toy_run(), toy_run(paddle=True))


@pytest.fixture
def bad() -> Report:
    return compare_runs(toy_run(), toy_run(paddle=True, plant=planted("head/grad/weight", lambda v: v + 1, at=1)))


def strict_json(report: Report) -> dict:
    return json.loads(json.dumps(to_json(report), allow_nan=False))


def test_a_report_is_true_in_a_condition_if_nothing_parted(good, bad):
    assert good and good.passed and good == True and good != False  # noqa: E712
    assert not bad and not bad.passed and bad == False and bad != True  # noqa: E712


def test_a_report_equals_itself_and_no_other(good, bad):
    assert good == good and good != bad
    assert good != 1 and len({good, bad}) == 2


def test_a_report_is_iterated_diff_by_diff(bad):
    assert list(bad) == list(bad.diffs)
    assert [d for d in bad if not d.passed] == list(bad.failed)


def test_json_has_what_the_design_promises(bad):
    content = strict_json(bad)
    assert {"schema_version", "passed", "first_diff", "coverage", "steps"} <= set(content)
    first = content["first_diff"]
    assert {k: first[k] for k in ("step", "stage", "reference", "candidate", "slot")} == {
        "step": 1,
        "stage": "grad",
        "reference": "fc2",
        "candidate": "head",
        "slot": "weight",
    }
    assert first["max_abs"] == pytest.approx(1, rel=1e-5) and first["message"] == bad.first_diff.message
    assert content["schema_version"] == 1 and content["passed"] is False
    assert [(s["step"], s["passed"], len(s["diffs"])) for s in content["steps"]] == [
        (0, True, 22),
        (1, False, 22),
        (2, True, 22),
    ]


def test_json_of_a_match_has_no_first_diff(good):
    content = strict_json(good)
    assert content["passed"] is True and content["first_diff"] is None
    coverage = content["coverage"]
    assert (coverage["share"], coverage["complete"], coverage["compared"]) == (1.0, True, 66)
    assert coverage["records"] == {"reference": 66, "candidate": 66}
    assert coverage["unmatched_containers"] == {"reference": [], "candidate": ["body"]}


def test_json_of_one_diff_has_its_sites_figures_and_limit(bad):
    [diff] = [d for d in strict_json(bad)["steps"][1]["diffs"] if not d["passed"]]
    ours, theirs = (r.value.astype(np.float64) for r in (bad.failed[0].pair.reference, bad.failed[0].pair.candidate))
    rel = np.linalg.norm(theirs.T - ours) / np.linalg.norm(ours)
    assert (diff["stage"], diff["reference"], diff["candidate"]) == ("grad", "fc2/grad/weight", "head/grad/weight")
    assert diff["rel_l2"] == pytest.approx(rel) and diff["judged"]["value"] == pytest.approx(rel)
    assert diff["judged"]["figure"] == "rel_l2" and diff["judged"]["limit"] < rel
    assert diff["l2"]["reference"] == pytest.approx(np.linalg.norm(ours))


def test_nan_and_infinity_stay_within_json():
    assert [number(x) for x in (None, math.nan, math.inf, -math.inf, 1.5)] == [None, None, "inf", "-inf", 1.5]
    zeros = planted("head/forward/output.0", lambda v: v * 0)
    report = compare_runs(
        toy_run([0], plant=planted("fc2/forward/output.0", lambda v: v * 0)), toy_run([0], paddle=True)
    )
    assert any(d.get("rel_l2") == "inf" for d in strict_json(report)["steps"][0]["diffs"])
    nan = compare_runs(toy_run([0]), toy_run([0], paddle=True, plant=planted("head/grad/bias", lambda v: v * np.nan)))
    assert strict_json(nan)["first_diff"]["slot"] == "bias" and zeros is not None


def test_json_of_numpys_own_tolerances_is_still_json():
    assert (
        strict_json(compare_runs(toy_run([0]), toy_run([0]), policy=Tolerance(atol=np.float64(0.1))))["passed"] is True
    )


def test_a_missing_side_is_null_in_json():
    [one] = toy_steps([0])
    less = step(0, [r for r in one.records if r.site != "fc2/grad/bias"])
    report = compare_runs(memory_run(toy_info(), one), memory_run(toy_info(), less))
    [diff] = [d for d in strict_json(report)["steps"][0]["diffs"] if d["candidate"] is None]
    assert (diff["reference"], diff["problem"]) == ("fc2/grad/bias", "missing on the candidate")
    assert "rel_l2" not in diff and strict_json(report)["first_diff"]["max_abs"] is None


def test_junit_parses_and_counts(bad):
    suite = ElementTree.fromstring(to_junit(bad))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("66", "1", "0")
    cases = list(suite)
    assert len(cases) == 66
    [failed] = [case for case in cases if case.find("failure") is not None]
    assert (failed.get("classname"), failed.get("name")) == ("step 1.grad", "fc2/grad/weight")
    assert "relative L2" in failed.find("failure").get("message")


def test_junit_skips_what_one_side_lacks_and_escapes_names():
    tree = info(root(1), linear("a<b&c", 2, 2))
    ours = step(0, [record("a<b&c", "forward", slot, [1]) for slot in ("output.0", 'output."x"')])
    theirs = step(0, ours.records[:1])
    suite = ElementTree.fromstring(to_junit(compare_runs(memory_run(tree, ours), memory_run(tree, theirs))))
    assert [case.get("name") for case in suite] == ["a<b&c/forward/output.0", 'a<b&c/forward/output."x"']
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert suite[1].find("skipped").get("message") == "missing on the candidate"


def test_markdown_has_the_verdict_a_row_for_each_stage_and_the_coverage(bad):
    lines = to_markdown(bad).splitlines()
    assert lines[0] == "## padiff: differ" and bad.first_diff.message in lines
    rows = [line.split("|")[1:4] for line in lines if line.startswith("| ") and "---" not in line][1:]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["input", "3", "0"],
        ["weight", "12", "0"],
        ["forward", "12", "0"],
        ["loss", "3", "0"],
        ["backward", "9", "0"],
        ["grad", "12", "1"],
        ["update", "15", "0"],
    ]
    assert "- containers of the paddle run without a partner (another nesting): body" in lines


def test_a_pipe_in_a_name_does_not_break_the_markdown_table():
    tree = info(root(1), plain("a|b", "relu"))
    run = memory_run(tree, step(0, [record("a|b", "forward", "output.0", [1])]))
    [row] = [line for line in to_markdown(compare_runs(run, run)).splitlines() if line.startswith("| forward")]
    assert row.count("|") == 7


def test_the_verdict_of_a_match_tells_the_largest_diff_and_what_was_left_out(good):
    text = verdict(good)
    assert text.startswith("The runs match: 66 tensors in 3 steps compared, 100% of what was recorded")
    assert f"at {good.worst.pair.anchor.site}, step {good.worst.pair.step}" in text
    assert "Not compared" not in text
    less = compare_runs(toy_run([0, 1]), toy_run([0], paddle=True))
    assert verdict(less).endswith("Not compared: 1 step of the reference.")


def test_the_share_of_what_was_compared_is_that_of_the_compared_steps():
    """Half of one run's steps have no partner: a full share must not say that all was compared."""
    report = compare_runs(toy_run(range(4)), toy_run(range(2), paddle=True))
    text = verdict(report)
    assert "compared, 100% of what was recorded in them." in text and "Not compared: 2 steps of the reference" in text
    lines = coverage_lines(report)
    assert lines[0] == "44 pairs, 100.0% of what was recorded in the compared steps"
    assert "steps of the reference only: 2, 3" in lines


def test_the_worst_diff_is_the_one_with_the_largest_relative_error(good):
    measured = [
        np.linalg.norm(c.astype(np.float64) - r) / np.linalg.norm(r)
        for d in good
        for r in [d.pair.reference.value.astype(np.float64)]
        for c in [d.pair.candidate.value.T if d.pair.transform else d.pair.candidate.value]
        if np.linalg.norm(r)
    ]
    assert good.worst.figures.rel_l2 == pytest.approx(max(measured))


def test_long_lists_are_cut_with_a_count():
    layers = [plain(f"r{k}", "relu") for k in range(12)]
    [one] = toy_steps([0])
    report = compare_runs(memory_run(info(*toy_info().layers, *layers, name="big"), one), toy_run([0]))
    [line] = [line for line in coverage_lines(report) if line.startswith("layers of the big run")]
    assert line.endswith("r7, and 4 more")


def test_the_stage_table_names_the_diff_that_is_furthest_beyond_its_limit():
    tree = info(root(1), linear("a", 2, 2))

    def run(ids: list[int], scale: float):
        records = [record("(root)", "input", "input.x", np.asarray([1.0, 2.0]) * scale)]
        records.append(record("(root)", "input", "input.ids", np.asarray(ids)))
        return memory_run(tree, step(0, records))

    [row] = stage_table(compare_runs(run([1, 2], 1.0), run([1, 3], 1 + 1e-14)))
    assert row["differ"] == 1 and row["where"] == "(root)/input/input.ids, step 0"
