"""A stage that one side lacks in one step, though it records it in others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.records import memory_run, step, toy_info, toy_run, toy_steps

from padiff import Tolerance, compare_runs
from padiff.compare import RunComparison


def without(stages: tuple[str, ...], at: tuple[int, ...], numbers=range(6), paddle: bool = True):
    """A toy run that recorded nothing of some stages in some steps; the learning rate stays."""
    steps = [
        replace(one, records=tuple(r for r in one.records if one.number not in at or r.stage not in stages))
        for one in toy_steps(numbers, paddle)
    ]
    return memory_run(toy_info(paddle), *steps)


@pytest.mark.parametrize("policy", [None, Tolerance(1e-3)], ids=["noise", "fixed"])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_an_optimizer_that_did_not_step_is_found_in_that_very_step(at, policy):
    report = compare_runs(toy_run(range(6)), without(("grad", "update"), (at,)), policy=policy)
    first = report.first_diff
    assert (first.step, first.stage, first.slot) == (at, "grad", "weight")
    assert first.cause.sentence == "the candidate's optimizer did not step in this step, as it did in others"
    assert {d.pair.stage for d in report.failed} == {"grad", "update"} and {d.pair.step for d in report.failed} == {at}


def test_the_side_that_lacks_it_is_named():
    first = compare_runs(without(("grad", "update"), (2,), paddle=False), toy_run(range(6), paddle=True)).first_diff
    assert first.step == 2 and first.cause.sentence.startswith("the reference's optimizer did not step in this step")


def test_a_backward_that_did_not_run_is_found():
    first = compare_runs(toy_run(range(6)), without(("backward", "grad", "update"), (4,))).first_diff
    assert (first.step, first.stage) == (4, "backward")
    assert first.cause.sentence == "no backward ran on the candidate in this step, as it did in others"


def test_a_step_that_both_skipped_is_no_diff():
    both = [without(("grad", "update"), (3,), paddle=side) for side in (False, True)]
    assert compare_runs(*both).passed


def test_a_stage_that_a_side_never_records_is_a_gap():
    report = compare_runs(toy_run(range(6)), without(("backward",), tuple(range(6))))
    assert report.passed and report.coverage.candidate_sites == () and len(report.coverage.reference_sites) == 3


def test_a_loss_that_is_logged_now_and_then_is_no_diff():
    assert compare_runs(toy_run(range(6)), without(("loss",), (1, 2, 4, 5))).passed


def test_of_a_run_that_grows_the_steps_before_show_it():
    lacking = without(("grad", "update"), (2,), numbers=range(3))
    growing = RunComparison(toy_run(range(3)), lacking)
    assert [bool(growing.compare(number).first_diff) for number in range(3)] == [False, False, True]


def test_other_steps_are_looked_at_once_where_they_show_nothing():
    class Counted:
        def __init__(self, run):
            self._run, self.reads = run, 0

        def steps(self, number):
            self.reads += 1
            return self._run.steps(number)

        def __getattr__(self, name):
            return getattr(self._run, name)

    lacking = Counted(without(("backward",), tuple(range(20)), numbers=range(20)))
    assert compare_runs(toy_run(range(20)), lacking).passed
    assert lacking.reads <= 20 + 8 + 1  # and once for tokens


@pytest.mark.parametrize(("times", "words"), [(2, "twice"), (3, "3 times")])
def test_an_optimizer_that_stepped_more_than_once_is_named(times, words):
    steps = toy_steps(range(3), True)
    more = [
        replace(r, call=call)
        for call in range(1, times)
        for r in steps[1].records
        if r.stage in ("grad", "update") and r.layer != "(loop)"
    ]
    candidate = memory_run(toy_info(True), steps[0], step(1, [*steps[1].records, *more]), steps[2])
    first = compare_runs(toy_run(range(3)), candidate).first_diff
    assert (first.step, first.stage) == (1, "grad")
    assert first.cause.sentence == f"the candidate's optimizer stepped {words} in this step, the reference's once"
    turned = compare_runs(candidate, toy_run(range(3), paddle=True)).first_diff
    assert turned.cause.sentence == f"the reference's optimizer stepped {words} in this step, the candidate's once"


def test_gradients_of_zeros_stand_for_none():
    """paddle has zeros where torch has no gradient: a step in which no parameter got one is no diff."""

    def plant(seen, number):
        return np.zeros_like(seen.value) if number == 3 and seen.stage in ("grad", "update") else None

    none = without(("grad", "update"), (3,), numbers=range(4), paddle=False)
    report = compare_runs(none, toy_run(range(4), paddle=True, plant=plant))
    assert report.passed and not report.failed
