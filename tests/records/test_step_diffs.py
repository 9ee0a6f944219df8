"""The diffs of a step as columns: each diff is what it was before it became a row."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from kit.records import record

from padiff.records import Both, Diff, Figure, Figures, Float64Reference, Judgement, Kind, Pair, Problem, Rule
from padiff.records.pair_table import PairSchema
from padiff.records.step_diffs import StepDiffs


def some_diffs():
    one = record("l", "forward", "output.0", np.zeros((2, 3), np.float32))
    other = record("m", "grad", "weight", np.zeros((4,), np.float32))
    pairs = [Pair(3, one, one), Pair(3, one, None), Pair(3, None, other, optional=True), Pair(3, other, other)]
    seven = [0.1 * k for k in range(1, 8)]
    return [
        Diff(
            pairs[0],
            Figures(*seven, 6, (1, 2), Both(-0.0, np.inf), 3, 1, 2, None, "tensors", floor=1e-9),
            True,
            Judgement(Figure.BULK, 0.25, 0.5, Rule.HANDED_BACK),
        ),
        Diff(pairs[1], None, False, problem=Problem(Kind.MISSING, "missing on the candidate")),
        Diff(pairs[2], Figures(l2=1e-320, size=7, bulk_l2=2.5, basis="sketches", spread=0.09)),
        Diff(
            pairs[3],
            Figures(
                l2=np.inf,
                size=7,
                index=(5,),
                bulk_l2=0.0,
                basis="moments",
                third=Float64Reference(Both(1e-7, 3e-7), "candidate"),
            ),
            False,
            Judgement(Figure.REL_L2, np.inf, 0.0, Rule.EQUAL),
        ),
    ]


def test_rows_give_the_same_diffs_to_the_bit():
    diffs = some_diffs()
    step = StepDiffs.from_diffs(diffs)
    again = StepDiffs(step.pairs, step.sites, step.rows.copy(), step.problems, step.odd)
    assert again == diffs and list(again) == diffs and list(again[1:3]) == diffs[1:3] and again[-1] == diffs[-1]
    assert repr([astuple(d.figures) for d in again if d.figures]) == repr(
        [astuple(d.figures) for d in diffs if d.figures]
    )
    assert again[2] is again[2]
    assert again != [replace(diffs[0], passed=False), *diffs[1:]]


@pytest.mark.parametrize("name", ["compared", "measured", "relative"])
def test_columns_say_what_the_diffs_say(name):
    diffs = some_diffs()
    diffs.append(Diff(diffs[0].pair, Figures(l2=0.0, reference_l2=0.0, size=6)))
    diffs.append(Diff(diffs[0].pair, Figures(l2=2.0, reference_l2=0.0, size=6)))
    expected = {
        "compared": [diff.compared for diff in diffs],
        "measured": [diff.figures is not None for diff in diffs],
        "relative": [diff.figures.rel_l2 if diff.figures is not None else np.nan for diff in diffs],
    }
    np.testing.assert_array_equal(getattr(StepDiffs.from_diffs(diffs), name), expected[name])


def test_other_verdicts_leave_the_diffs_as_they_were():
    diffs = some_diffs()
    step = StepDiffs.from_diffs(diffs)
    failed = step.with_failures({0: (Figure.RATIO, 0.5, 0.25, Rule.SYSTEMATIC)})
    assert list(failed) == [diffs[0].judged(False, Figure.RATIO, 0.5, 0.25, Rule.SYSTEMATIC), *diffs[1:]]
    assert list(step.passing([3], True)) == [*diffs[:3], replace(diffs[3], passed=True)]
    assert step == diffs and step.passing([], True) is step and step.with_failures({}) is step


def test_the_diffs_of_several_processes_are_joined_and_split():
    one, other = StepDiffs.from_diffs(some_diffs()), StepDiffs.from_diffs(some_diffs()[2:])
    joined = StepDiffs.joined([one, other])
    assert joined == [*one, *other] and StepDiffs.joined([one]) is one
    assert joined.split([one.pairs, other.pairs]) == [one, other]


def test_a_fact_of_sites_is_found_out_once():
    sites, calls = PairSchema.from_pairs([diff.pair for diff in some_diffs()]), []

    def find(own):
        calls.append(own)
        return len(own)

    assert sites.fact(find) == sites.fact(find) == 4 and calls == [sites]
    assert sites.keys == [("l", "output.0"), ("l", "output.0"), ("m", "weight"), ("m", "weight")]
    assert sites.complete.tolist() == [True, False, False, True]
    assert sites.places["grad"].tolist() == [2, 3] and sites.places["loss"].tolist() == []
    assert sites.dtypes == Both(["float32", "float32", None, "float32"], ["float32", None, "float32", "float32"])
