"""Parameters that train and have no record: nobody can say that they match."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from kit.records import info, linear, memory_run, parameter, plain, planted, record, root, step, toy_info, toy_steps

from padiff import Tolerance, compare_runs
from padiff.records import Coverage, Report, RunInfo, verdict
from padiff.report_formats import to_json, to_junit, to_markdown

RECORDED = {"recording": {"every_n_steps": 1, "layers": 4}}
PARAMETERS = ("weight", "grad", "update")


def without(*gone: str, numbers=(0, 1), recording=RECORDED, tree: RunInfo | None = None, notes=(), plant=None):
    """A toy run that has no record of some parameters, by ``layer/slot``."""
    steps = [
        replace(
            one,
            records=tuple(r for r in one.records if r.stage not in PARAMETERS or f"{r.layer}/{r.slot}" not in gone),
            notes=tuple(notes),
        )
        for one in toy_steps(numbers, plant=plant)
    ]
    return memory_run(replace(tree or toy_info(), **recording), *steps)


def test_runs_without_a_record_of_a_parameter_do_not_match():
    """Both sides left the weight out: nothing of it is compared, and all that is recorded agrees."""
    whole, less = compare_runs(without(), without()), compare_runs(without("fc2/weight"), without("fc2/weight"))
    assert whole.passed and whole.outcome == "match"
    assert not less.passed and not less and less.outcome == "cannot tell" and less.first_diff is None
    assert less.coverage.reference_unrecorded == less.coverage.candidate_unrecorded == ("fc2/weight",)
    # 22 records a step and side, of which weight, grad and update of one parameter are gone.
    assert less.coverage.share == pytest.approx(19 / 20) and not less.coverage.complete


def test_a_fault_in_what_is_not_recorded_is_never_a_match():
    tenfold = without("fc2/weight", plant=planted("fc2/grad/weight", lambda v: 10 * v))
    assert compare_runs(without(), without(plant=planted("fc2/grad/weight", lambda v: 10 * v))).outcome == "differ"
    assert compare_runs(without("fc2/weight"), tenfold).outcome == "cannot tell"


NOTES = ["3 tensor(s) of 1 layer(s) are not recorded (fc2): a DTensor has no memory of its own"]


def test_the_verdict_names_the_parameters_and_the_reason():
    run = without("fc2/weight", notes=NOTES)
    text = verdict(compare_runs(run, run))
    assert text.startswith(
        "Can't tell whether the runs match: parameters that train have no record, 1 of the reference (fc2/weight) "
        "and 1 of the candidate (fc2/weight)."
    )
    assert f"reference: {NOTES[0]}" in text and "What was recorded agrees: 38 tensors, 95%" in text


def test_a_parameter_that_only_one_side_could_record_is_no_diff():
    """One side is sharded, the other is not: a gap of the recording, nothing that the models do."""
    report = compare_runs(without(), without("fc2/weight", "fc2/bias", notes=NOTES))
    assert report.outcome == "cannot tell"
    assert report.coverage.candidate_unrecorded == ("fc2/weight", "fc2/bias")
    assert report.coverage.reference_unrecorded == ()
    assert "2 of the candidate (fc2/weight, fc2/bias)" in verdict(report)
    turned = compare_runs(without("fc2/bias"), without())
    assert turned.outcome == "cannot tell" and turned.coverage.reference_unrecorded == ("fc2/bias",)


def test_a_gradient_that_one_side_lacks_is_still_a_diff():
    """Its weight is recorded: the parameter gets no gradient there."""
    steps = [replace(s, records=tuple(r for r in s.records if r.site != "fc2/grad/weight")) for s in toy_steps([0, 1])]
    frozen = memory_run(replace(toy_info(), **RECORDED), *steps)
    assert compare_runs(without(), frozen).first_diff.stage == "grad"


def test_a_diff_is_a_diff_whatever_else_is_not_recorded():
    wrong = without("fc2/weight", plant=planted("fc1/forward/output.0", lambda v: v + 1))
    assert compare_runs(without("fc2/weight"), wrong).outcome == "differ"


def test_every_form_of_the_report_says_it():
    report = compare_runs(without("fc2/weight"), without("fc2/weight"))
    content = to_json(report)
    assert (content["passed"], content["outcome"], content["first_diff"]) == (False, "cannot tell", None)
    assert content["coverage"]["unrecorded_parameters"] == {"reference": ["fc2/weight"], "candidate": ["fc2/weight"]}
    suite = ElementTree.fromstring(to_junit(report))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("39", "0", "1")
    [error] = suite.iter("error")
    assert error.get("message") == verdict(report)
    assert to_markdown(report).startswith("## padiff: cannot tell\n")
    assert str(report).startswith("CANNOT TELL  parameters that train have no record\n") and verdict(report) in str(
        report
    )


FROZEN = toy_info()
FROZEN = replace(
    FROZEN,
    layers=tuple(
        replace(layer, parameters=tuple(replace(p, trainable=p.slot != "weight") for p in layer.parameters))
        for layer in FROZEN.layers
    ),
)
LISTED = replace(toy_info(), layers=tuple(replace(x, recorded=x.path != "fc2") for x in toy_info().layers))


@pytest.mark.parametrize(
    "options",
    [
        {"tree": FROZEN},
        {"tree": LISTED},
        {"recording": {"recording": {"detail": {"*": "full", "fc2/weight": "nothing"}}}},
        {"recording": {"recording": {"detail": {"*": "full", "weight": "nothing"}}}},
    ],
    ids=["frozen", "left out by a list", "left out by the level of detail", "no weights at all"],
)
def test_what_does_not_train_or_was_left_out_on_purpose_is_not_missed(options):
    assert compare_runs(without("fc2/weight", **options), without("fc2/weight", **options)).outcome == "match"


def test_a_parameter_that_is_tied_to_another_has_its_record_there():
    layers = info(root(2), linear("a", 4, 4), plain("b", "linear")).layers
    again = parameter("weight", 4, 4, tied_to="a/weight")
    tied = info(*layers[:2], replace(layers[2], parameters=(again,)), **RECORDED)
    own = [record("a", "weight", slot, np.ones(shape)) for slot, shape in (("weight", (4, 4)), ("bias", (4,)))]
    assert compare_runs(memory_run(tied, step(0, own)), memory_run(tied, step(0, own))).outcome == "match"


def test_a_parameter_that_came_later_has_its_record_in_a_later_step():
    """The tree is that of the latest step; a layer that was added in between is not in the steps before."""
    first, second = (without("fc2/weight", "fc2/bias", numbers=[0]), without(numbers=[0, 1]))
    grown = memory_run(replace(toy_info(), **RECORDED), first.steps(0)[0], second.steps(1)[0])
    assert compare_runs(grown, grown).outcome == "match"


def test_a_dump_says_not_what_was_asked_for_so_only_what_it_notes_is_missed():
    plain_dump, noted = {"recording": {}}, ["1 tensor(s) of 1 layer(s) are not recorded (fc2): no memory"]
    silent = without("fc2/weight", recording=plain_dump)
    reported = without("fc2/weight", recording=plain_dump, notes=noted)
    assert compare_runs(silent, silent).outcome == "match"
    assert compare_runs(reported, reported).outcome == "cannot tell"


def test_who_asks_for_outputs_alone_is_not_reported_of_parameters():
    run = without("fc2/weight")
    assert compare_runs(run, run, stages=["forward"]).outcome == "match"
    assert compare_runs(run, run, layers=["fc1"]).outcome == "match"
    assert compare_runs(run, run, layers=["fc2"]).outcome == "cannot tell"


def test_a_fixed_tolerance_can_not_tell_either():
    run = without("fc2/weight")
    assert compare_runs(run, run, policy=Tolerance()).outcome == "cannot tell"


def test_a_report_by_hand_is_a_match_if_nothing_is_wrong():
    assert Report((), Coverage()).passed
    assert not Report((), Coverage(candidate_unrecorded=("a/weight",))).passed
