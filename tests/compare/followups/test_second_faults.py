"""Two faults in one run are two, and one fault is one, wherever else it shows."""

from __future__ import annotations

import functools
import json
from xml.etree import ElementTree

import pytest

import padiff
from compare.followups.programs import reference, trained
from padiff.records import Standing
from padiff.report_formats import to_json, to_junit, to_markdown

BOTH = pytest.mark.parametrize("framework", ["torch", "paddle"])

# Style, the two faults; the first diff's stage and layer; the second's, with its kind of cause or words of it.
TWO = [
    ("towers", ("conv:scaled", "norm:eps"), ("forward", "conv"), ("forward", "norm", "")),
    ("towers", ("conv:no_bias", "act:tanh_gelu"), ("forward", "conv"), ("forward", "act", "tanh-form GELU")),
    ("towers", ("bn:shifted", "down:scaled"), ("forward", "bn"), ("forward", "down", "is not scaled by 1.25")),
    ("towers", ("pool:halved", "norm:eps"), ("forward", "pool"), ("forward", "norm", "")),
    ("towers", ("relu:tanh", "up:negated"), ("forward", "relu"), ("forward", "up", "the sign of what linear()")),
    ("towers", ("conv:weight", "act:relu"), ("weight", "conv"), ("forward", "act", "ReLU")),
    ("towers", ("flipped", "pool:halved"), ("input", "(root)"), ("forward", "pool", "is not scaled by 0.5")),
    ("towers", ("norm:eps", "tanh:relu"), ("forward", "norm"), ("forward", "tanh", "ReLU for the reference's tanh")),
    ("towers", ("norm:eps", "head:scaled"), ("forward", "norm"), ("forward", "head", "1.25 times")),
    ("towers", ("conv:scaled", "no_smoothing"), ("forward", "conv"), ("loss", "(loop)", "label_smoothing 0.1 against")),
    ("towers", ("norm:eps", "labels_rolled"),
        ("forward", "norm"), ("loss", "(loop)", "of the one before it")),
    ("towers", ("norm:eps", "no_decay"), ("forward", "norm"), ("update", "conv", "weight decay is 0")),
    ("towers", ("norm:eps", "rate"), ("forward", "norm"), ("update", "conv", "0.05 against 0.075")),
    ("towers", ("conv:scaled", "rate_of_norms"), ("forward", "conv"), ("update", "conv", "0.05 against 0.1")),
    ("towers", ("act:tanh_gelu", "momentum"), ("forward", "act"), ("update", "(loop)", "momentum 0.9 against 0.5")),
    ("towers", ("norm:eps", "clip_missing"), ("forward", "norm"), ("grad", "conv", "not clipped")),
    ("towers", ("norm:eps", "gradients_doubled"), ("forward", "norm"), ("grad", "conv", "times what its layers'")),
    ("towers", ("norm:eps", "skip"), ("forward", "norm"), ("grad", "conv", "optimizer did not step in this step")),
    ("towers", ("norm:eps", "reload"), ("forward", "norm"), ("weight", "squeeze", "start of step 1 again")),
    ("towers", ("conv:scaled", "other_batch"), ("forward", "conv"), ("input", "(root)", "")),
    ("stack", ("1:eps", "4:tanh"), ("forward", "1"), ("forward", "4", "tanh for the reference's sigmoid")),
    ("stack", ("0:weight", "2:relu"), ("weight", "0"), ("forward", "2", "ReLU for the reference's tanh")),
    ("stack", ("no_decay", "rate_of_norms"), ("update", "0"), ("update", "0", "0.05 against 0.1")),
    ("words", ("first.norm:eps", "second.act:tanh_gelu"), ("forward", "first.norm"), ("forward", "second.act", "")),
    ("words", ("emb:scaled", "second.act:relu"), ("forward", "emb"), ("forward", "second.act", "ReLU")),
    ("words", ("first.out:scaled", "norm:eps"), ("forward", "first.out"), ("forward", "norm", "")),
    ("words", ("first.v:negated", "rate"), ("forward", "first.v"), ("update", "(loop)", "0.05 against 0.075")),
    ("words", ("first.norm:eps", "no_smoothing"), ("forward", "first.norm"), ("loss", "(loop)", "label_smoothing")),
    ("words", ("second.down:shifted", "skip"), ("forward", "second.down"), ("grad", "emb", "did not step")),
]  # fmt: skip
# Each by itself, in every style; and those of the loop.
ONE = {
    "towers": (
        "conv:scaled", "bn:eval", "bn:shifted", "relu:tanh", "pool:halved", "up:negated", "norm:eps",
        "norm:declared_eps", "act:tanh_gelu", "down:shifted", "tanh:relu", "head:scaled", "conv:weight", "norm:weight",
        "flipped",
    ),
    "stack": ("0:scaled", "1:eps", "2:relu", "4:tanh", "5:eps", "8:shifted", "3:weight"),
    "words": (
        "emb:scaled", "first.norm:eps", "first.v:negated", "second.act:tanh_gelu", "second.down:shifted", "emb:weight",
    ),
}  # fmt: skip
LOOP = (
    "no_decay", "decay_on_norms", "rate_of_norms", "rate", "momentum", "no_smoothing", "labels_rolled", "other_batch",
    "reload", "skip", "clip_missing", "clip_limit", "gradients_doubled", "adam_eps", "beta2",
)  # fmt: skip
FRAMEWORKS, STYLES = ("torch", "paddle"), tuple(ONE)
# Each is recorded by one framework, and a loop's in one style: what explains it is one code.
ALONE = [(style, fault, FRAMEWORKS[k % 2]) for style, faults in ONE.items() for k, fault in enumerate(faults)]
ALONE += [(STYLES[k % 3], fault, FRAMEWORKS[k % 2]) for k, fault in enumerate(LOOP)]


@functools.cache
def report_of(style, faults, framework):
    clips = any("clip" in fault for fault in faults)
    rule = "adamw" if {"adam_eps", "beta2"} & set(faults) else "sgd"
    return padiff.compare_runs(
        reference(style, rule, clips), trained(framework, style, rule, frozenset(faults), clips=clips)
    )


@pytest.mark.parametrize(
    ("style", "faults", "first", "second", "framework"), [(*two, FRAMEWORKS[k % 2]) for k, two in enumerate(TWO)]
)
def test_a_second_fault_is_reported_as_one(style, faults, first, second, framework):
    report = report_of(style, faults, framework)
    found = report.first_diff
    assert (found.stage, found.reference, found.standing) == (*first, Standing.FIRST)
    [other] = report.independent
    stage, layer, words = second
    assert (other.stage, other.reference, other.standing) == (stage, layer, Standing.NEW)
    assert words in other.message
    assert other.message.startswith("A second fault, which does not follow from the first: at step ")
    assert str(report).endswith(f"{found.message} {other.message}")


@pytest.mark.parametrize(
    ("style", "faults", "first", "second", "framework"), [(*two, FRAMEWORKS[k % 2]) for k, two in enumerate(TWO[1::6])]
)
def test_a_second_fault_is_reported_from_sketches_too(style, faults, first, second, framework):
    clips = any("clip" in fault for fault in faults)
    candidate = trained(framework, style, "sgd", frozenset(faults), clips=clips, detail="sketch")
    report = padiff.compare_runs(reference(style, "sgd", clips, "sketch"), candidate)
    assert (report.first_diff.stage, report.first_diff.reference) == first
    [found] = report.independent
    assert (found.stage, found.reference) == second[:2]
    assert second[2] in found.message


@pytest.mark.parametrize(("style", "fault", "framework"), ALONE)
def test_one_fault_is_one(style, fault, framework):
    report = report_of(style, (fault,), framework)
    assert not report.passed and report.independent == ()
    standings = [report.standing(diff) for diff in report.failed]
    assert Standing.NEW not in standings and standings.count(Standing.FIRST) <= 1


@BOTH
@pytest.mark.parametrize("style", ONE)
def test_one_fault_in_many_places_is_one(style, framework):
    """A class of somebody's own is used wherever it is."""
    many = {
        "towers": ("conv:scaled", "squeeze:scaled", "up:scaled", "head:scaled"),
        "stack": ("1:eps", "5:eps"),
        "words": ("first.norm:eps", "first.norm2:eps", "second.norm:eps", "norm:eps"),
    }
    assert report_of(style, many[style], framework).independent == ()


def test_places_that_the_first_diff_does_not_reach_are_marked():
    report = report_of("towers", ("conv:scaled", "up:scaled"), "torch")
    marked = {diff.pair.anchor.site: report.standing(diff) for diff in report.failed if diff.pair.step == 0}
    assert marked["conv/forward/output.0"] is Standing.FIRST
    # The other tower has the same fault: it is no second one, and does not follow.
    assert marked["up/forward/output.0"] is Standing.AGAIN
    assert marked["conv/backward/output.0"] is Standing.FOLLOWS
    assert report.independent == ()


def test_all_later_steps_follow():
    report = report_of("towers", ("norm:eps",), "torch")
    later = [report.standing(diff) for diff in report.failed if diff.pair.step > 0]
    assert set(later) <= {Standing.FOLLOWS}
    assert all(report.standing(diff) is None for diff in report.diffs if diff.passed)


def test_reports_hold_second_faults_and_what_follows():
    report = report_of("towers", ("conv:no_bias", "act:tanh_gelu"), "torch")
    found = json.loads(json.dumps(to_json(report)))
    [second] = found["independent"]
    assert (second["stage"], second["reference"], second["standing"]) == ("forward", "act", "new")
    assert second["why"]["kind"] == "activation" and second["why"]["proven"]
    assert found["first_diff"]["standing"] == "first"
    diffs = {diff["reference"]: diff for diff in found["steps"][0]["diffs"]}
    assert diffs["conv/forward/output.0"]["standing"] == "first"
    assert diffs["act/forward/output.0"]["standing"] == "new"
    assert diffs["join/forward/output.0"]["standing"] == "follows"
    assert "standing" not in diffs["up/forward/output.0"]
    [message] = report.independent
    assert message.message in to_markdown(report)
    cases = {
        case.get("name"): case.find("failure").get("message")
        for case in ElementTree.fromstring(to_junit(report)).iter("testcase")
        if case.get("classname") == "step 0.forward" and case.find("failure") is not None
    }
    assert cases["act/forward/output.0"] == message.message
    assert cases["conv/forward/output.0"] == report.first_diff.message
    assert cases["join/forward/output.0"].endswith("(follows)")
    lines = str(report).splitlines()
    marked = [line.partition(":")[0] for line in lines if line.endswith(" difference)")]
    assert marked == ["  step 0  conv/forward/output.0", "  step 0  act/forward/output.0"]
    start = next(k for k, line in enumerate(lines) if line.endswith("pairs differ, in causal order:"))
    assert lines.index("", start) - start <= 11


def test_second_faults_of_settings_are_in_every_report():
    report = report_of("towers", ("act:tanh_gelu", "momentum"), "torch")
    [second] = report.independent
    assert second.diff is None and second.cause.fix == "torch.optim.SGD(..., momentum=0.9)"
    assert to_json(report)["independent"][0]["why"]["kind"] == "optimizer_setting"
    suite = ElementTree.fromstring(to_junit(report))
    reported = [case for case in suite.iter("testcase") if case.get("classname") == "settings"]
    assert [case.find("failure").get("message") for case in reported] == [second.message]
    assert int(suite.get("failures")) == len(report.failed) + 1


def test_marks_hold_for_folded_diffs(tmp_path, monkeypatch):
    from padiff.compare import coverage

    monkeypatch.setattr(coverage, "_UNFOLDED", 10)
    faults = frozenset(["conv:no_bias", "act:tanh_gelu"])
    for name, some in (("one", frozenset()), ("other", faults)):
        trained("torch", "towers", "sgd", some, dir_path=str(tmp_path / name))
    report = padiff.compare_runs(tmp_path / "one", tmp_path / "other", workers=1)
    assert type(report.diffs).__name__ == "CompactDiffs"
    plain = report_of("towers", tuple(sorted(faults)), "torch")
    assert [report.standing(diff) for diff in report.failed] == [plain.standing(diff) for diff in plain.failed]
    assert [one.reference for one in report.independent] == ["act"]


def test_layers_that_are_not_asked_for_have_no_second_fault():
    runs = reference("towers"), trained("torch", "towers", "sgd", frozenset(["conv:no_bias", "act:tanh_gelu"]))
    assert padiff.compare_runs(*runs, layers=["conv", "bn"]).independent == ()
