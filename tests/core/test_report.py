from __future__ import annotations

import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from kit.records import info, linear, memory_run, plain, planted, record, root, step, toy_info, toy_run, toy_steps

from padiff import Tolerance, compare_runs
from padiff.records import Cause, Report, Rule, coverage_lines, failed_lines, stage_table, verdict
from padiff.report_formats import number, to_json, to_junit, to_markdown


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
    reference, candidate = (
        r.value.astype(np.float64) for r in (bad.failed[0].pair.reference, bad.failed[0].pair.candidate)
    )
    rel = np.linalg.norm(candidate.T - reference) / np.linalg.norm(reference)
    assert (diff["stage"], diff["reference"], diff["candidate"]) == ("grad", "fc2/grad/weight", "head/grad/weight")
    assert diff["rel_l2"] == pytest.approx(rel) and diff["judged"]["value"] == pytest.approx(rel)
    assert diff["judged"]["figure"] == "rel_l2" and diff["judged"]["limit"] < rel
    assert diff["judged"]["allowed_because"] == str(Rule[diff["judged"]["rule"].upper()])
    assert diff["l2"]["reference"] == pytest.approx(np.linalg.norm(reference))


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


def test_the_first_failure_of_a_junit_file_has_the_cause(bad):
    failures = [case.get("message") for case in ElementTree.fromstring(to_junit(bad)).iter("failure")]
    assert failures[0] == bad.first_diff.message and str(bad.first_diff.cause) in failures[0]


def test_what_was_excluded_is_reported_where_nothing_is_proven():
    cause = Cause("unknown", "unknown; it is here", excluded=("epsilon", "bias"))
    assert cause.text == "Cause: unknown; it is here. Tried and excluded: epsilon, bias."
    proven = Cause("beta", "beta2 is 0.9", True, "to 0.8 times the noise", "Adam(...)", ("epsilon",))
    assert proven.text == "Cause, proven: beta2 is 0.9 (to 0.8 times the noise). Fix: Adam(...)."


def test_junit_skips_what_one_side_lacks_and_escapes_names():
    tree = info(root(1), linear("a<b&c", 2, 2))
    reference = step(0, [record("a<b&c", "forward", slot, [1]) for slot in ("output.0", 'output."x"')])
    candidate = step(0, reference.records[:1])
    suite = ElementTree.fromstring(to_junit(compare_runs(memory_run(tree, reference), memory_run(tree, candidate))))
    assert [case.get("name") for case in suite] == ["a<b&c/forward/output.0", 'a<b&c/forward/output."x"']
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert suite[1].find("skipped").get("message") == "missing on the candidate"


def test_markdown_has_the_verdict_a_row_for_each_stage_and_the_coverage(bad):
    lines = to_markdown(bad).splitlines()
    assert lines[0] == "## padiff: differ" and bad.first_diff.message.replace("]:", r"\]:") in lines
    table = lines[lines.index("| stage | compared | differ | worst relative L2 | limit | where |") + 2 :]
    rows = [line.split("|")[1:4] for line in table[: table.index("")]]
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
    assert row.replace("\\|", "").count("|") == 7 and "a\\|b/forward/output.0" in row


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
        for c in [d.pair.candidate.value.T if d.pair.layout else d.pair.candidate.value]
        if np.linalg.norm(r)
    ]
    assert good.worst.figures.rel_l2 == pytest.approx(max(measured))


def test_long_lists_are_cut_with_a_count():
    layers = [plain(f"r{name}", "relu") for name in "abcdefghijkl"]
    [one] = toy_steps([0])
    report = compare_runs(memory_run(info(*toy_info().layers, *layers, name="big"), one), toy_run([0]))
    [line] = [line for line in coverage_lines(report) if line.startswith("layers of the big run")]
    assert line.endswith("rh, and 4 more")


def test_long_lists_of_names_that_differ_by_numbers_are_one_name():
    layers = [plain(f"r{k}", "relu") for k in range(12)]
    [one] = toy_steps([0])
    report = compare_runs(memory_run(info(*toy_info().layers, *layers, name="big"), one), toy_run([0]))
    [line] = [line for line in coverage_lines(report) if line.startswith("layers of the big run")]
    assert line == "layers of the big run without a partner: r0-11"


def test_the_stage_table_names_the_diff_that_is_furthest_beyond_its_limit():
    tree = info(root(1), linear("a", 2, 2))

    def run(ids: list[int], scale: float):
        records = [record("(root)", "input", "input.x", np.asarray([1.0, 2.0]) * scale)]
        records.append(record("(root)", "input", "input.ids", np.asarray(ids)))
        return memory_run(tree, step(0, records))

    [row] = stage_table(compare_runs(run([1, 2], 1.0), run([1, 3], 1 + 1e-14)))
    assert row["differ"] == 1 and row["where"] == "(root)/input/input.ids, step 0"


# -- one count, one meaning --------------------------------------------------------------------------------------


def lacking() -> Report:
    """Of 22 pairs a step 1 fails, 1 fails because a side is missing, and 1 is a gap."""
    [one] = toy_steps([0], plant=planted("fc1/forward/output.0", lambda v: v + 1))
    less = [r for r in one.records if r.site not in ("fc2/grad/bias", "fc2/backward/output.0")]
    return compare_runs(toy_run([0]), memory_run(toy_info(), step(0, less)))


def test_every_count_of_pairs_is_the_same_number():
    report = lacking()
    # 22 pairs, one of which could not be compared; the missing gradient is one that differs.
    assert report.coverage.compared == 21 and report.coverage.missing == 1 and len(report.failed) == 2
    assert sum(row["compared"] for row in stage_table(report)) == 21
    assert sum(row["differ"] for row in stage_table(report)) == 2
    assert coverage_lines(report)[0].startswith("21 pairs, ")
    assert "2 of 21 pairs differ" in str(report) and "2 of 21 pairs differ" in repr(report)
    suite = ElementTree.fromstring(to_junit(report))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("21", "2", "1")
    assert strict_json(report)["coverage"]["compared"] == 21
    # 20 pairs of two records each, of 22 records here and 20 there.
    assert report.coverage.share == pytest.approx(40 / 42)


def test_a_layer_whose_parameters_are_compared_within_another_is_not_called_left_out():
    """One side has query, key and value in one matrix; the three layers' outputs have no counterpart."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(12, 4)).astype(np.float32)
    names = ("q_proj", "k_proj", "v_proj")
    fused = info(root(1), plain("attn", "attention", 1), plain("attn.core", "core"), linear("attn.qkv", 4, 12))
    apart = info(root(1), plain("attn", "attention", 3), *(linear(f"attn.{name}", 4, 4) for name in names))
    reference = step(
        0, [record("attn.qkv", "weight", "weight", matrix), record("attn.qkv", "weight", "bias", matrix[:, 0])]
    )
    candidate = step(
        0,
        [
            record(f"attn.{name}", "weight", slot, values[4 * k : 4 * k + 4])
            for k, name in enumerate(names)
            for slot, values in (("weight", matrix), ("bias", matrix[:, 0]))
        ],
    )
    report = compare_runs(memory_run(fused, reference), memory_run(apart, candidate))
    assert report.passed and report.coverage.compared == 6
    left = {*report.coverage.reference_layers, *report.coverage.candidate_layers}
    assert not left & {"attn.qkv", *(f"attn.{name}" for name in names)}
    assert "Not compared: 1 layer of the reference" in verdict(report) or "attn.core" not in left


# -- what print shows ----------------------------------------------------------------------------------------------


def test_a_printed_report_is_the_verdict_the_table_and_what_differs(bad):
    head, _, details = str(bad).partition("\n\nstage")
    assert head.splitlines()[0] == "DIFFER  step 1, grad: fc2.weight against head" and details.endswith(
        bad.first_diff.message
    )
    lines = ["", "", *f"stage{details}".splitlines()]
    assert lines[2].split() == ["stage", "pairs", "differ", "rel", "L2", "allowed", "closest", "to", "its", "limit"]
    rows = {line.split()[0]: line.split()[1:3] for line in lines[3:10]}
    assert rows == {
        "input": ["3", "0"],
        "weight": ["12", "0"],
        "forward": ["12", "0"],
        "loss": ["3", "0"],
        "backward": ["9", "0"],
        "grad": ["12", "1"],
        "update": ["15", "0"],
    }
    reasons = [line for line in lines[10:] if line.startswith("allowed at ")]
    assert lines[10 : 11 + len(reasons)] == [*reasons, "1 of 66 pairs differ, in causal order:"]
    assert lines[11 + len(reasons)].startswith("  step 1  fc2/grad/weight: max |diff| 1, ")
    assert len(str(bad)) < 3_600


def test_the_short_forms_are_short(bad, good):
    assert repr(good) == "<Report: match, 0 of 66 pairs differ, torch against paddle>"
    [diff] = bad.failed
    assert repr(diff) == "<Diff step 1 fc2/grad/weight failed>" and str(diff).startswith("step 1  fc2/grad/weight: ")
    assert str(bad.first_diff) == bad.first_diff.message


def test_diffs_that_are_alike_are_one_line():
    def doubled(seen, number):
        return 2 * seen.value if seen.stage == "update" and seen.layer != "(loop)" else None

    lines = failed_lines(compare_runs(toy_run(), toy_run(paddle=True, plant=doubled)))
    text = "update: 4 of 4 are 2 times the reference's (fc1/weight, fc1/bias, fc2/weight, ...)"
    assert lines == [
        "12 of 66 pairs differ, in causal order:",
        *(f"  step {n}  {text}{'' if n else '  (first difference)'}" for n in range(3)),
    ]


def test_diffs_that_only_look_alike_are_not_folded():
    def rotated(seen, number):
        """Of the same norm times two, but in another direction."""
        return 2 * seen.value[::-1].copy() if seen.stage == "update" and seen.layer != "(loop)" else None

    lines = failed_lines(compare_runs(toy_run([0]), toy_run([0], paddle=True, plant=rotated)))
    assert len(lines) == 5 and not any("times the reference's (" in line for line in lines)


def test_what_a_side_lacks_throughout_is_one_line():
    [one] = toy_steps([0])
    less = step(0, [r for r in one.records if r.stage != "grad" or r.site == "fc1/grad/weight"])
    lines = failed_lines(compare_runs(toy_run([0]), memory_run(toy_info(), less)))
    reported = (
        "  step 0  grad: 3 of 4 are missing on the candidate (fc1/bias, fc2/weight, fc2/bias, ...)  (first difference)"
    )
    assert reported in lines


def unlike() -> Report:
    """24 diffs of 2 stages in 3 steps, each off by noise of its own."""

    def plant(seen, number):
        rng = np.random.default_rng(sum(map(ord, seen.site)))
        return seen.value + rng.normal(size=seen.value.shape) if seen.stage in ("grad", "forward") else None

    return compare_runs(toy_run(), toy_run(paddle=True, plant=plant))


def test_long_lists_of_diffs_are_folded_and_none_is_left_out():
    report = unlike()
    assert len(report.failed) == 24 and len(failed_lines(report, None)) == 25
    for most in (3, 5, 8, 10):
        reported = failed_lines(report, most)
        assert reported[0] == "24 of 66 pairs differ, in causal order:" and len(reported) <= most + 1
        assert reported[1].startswith("  step 0  fc1/forward/output.0: max |diff| ") and reported[1].endswith(
            "  (first difference)"
        )
        counts = [re.search(r": (\d+) (?:more )?(?:outputs|gradients)[ ,]", line) for line in reported[1:]]
        assert sum(int(found[1]) if found else 1 for found in counts) == 24
    reported = failed_lines(report, 3)
    norms = [diff.figures.rel_l2 for diff in report.failed if diff.pair.stage == "grad"]
    worst = max(diff.excess for diff in report.failed if diff.pair.stage == "grad")
    assert reported[2].startswith("  steps 0 to 2  forward: 11 more outputs (4 layers, act to (root)), relative L2 ")
    assert reported[3] == (
        f"  steps 0 to 2  grad: 12 gradients (2 layers, fc1 to fc2), relative L2 {min(norms):.2g} to {max(norms):.2g}, "
        f"up to {worst:.3g} times the limit"
    )
    assert [line for line in failed_lines(report, 5) if line.startswith("  steps 0 to 2  fc1-2/grad/")] == []
    assert any(line.startswith("  steps 0 to 2  fc1-2/grad/weight: 6 gradients, ") for line in failed_lines(report, 8))


def test_a_report_says_why_more_than_rounding_is_allowed():
    # The other side's weights have noise, so all that is computed with them may differ by more.
    report = compare_runs(toy_run(), toy_run(paddle=True))
    lines = [line for line in str(report).splitlines() if line.startswith("allowed at ")]
    reasons = dict(line.removeprefix("allowed at ").split(": ", 1) for line in lines)
    rules = {diff.judgement.rule.value for diff in report.diffs if diff.judgement}
    assert reasons and set(reasons.values()) <= rules
    assert Rule.ROUNDING.value not in reasons.values()
    assert all(f"- {line}" in to_markdown(report) for line in lines)
    same = compare_runs(toy_run(), toy_run())
    assert "allowed at forward" not in str(same)
