from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from kit.records import pair, record

from padiff.records import Coverage, Diff, Figure, Figures, Judgement, Kind, Pair, Problem, Report, Rule, TensorSource


def test_a_site_names_the_call_from_the_second_on():
    assert record("encoder.0", "forward", "output.0", [1]).site == "encoder.0/forward/output.0"
    assert record("encoder.0", "forward", "output.0", [1], call=1).site == "encoder.0/forward/output.0#1"


def test_a_records_values_are_read_from_its_source_each_time():
    class Counting(TensorSource):
        reads = 0

        def read(self) -> np.ndarray:
            self.reads += 1
            return np.zeros(1)

    source = Counting()
    one = dataclasses.replace(record("a", "forward", "x", [1]), source=source)
    _ = one.value, one.value
    assert source.reads == 2


def test_the_types_that_flow_are_frozen():
    for value in (record("a", "forward", "x", [1]), pair([1], [1]), Figures(), Coverage(), Diff(pair([1], [1]))):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            value.step = value.layer = 1


def test_a_pair_is_named_by_the_reference_or_by_the_side_there_is():
    both = pair([1], [2])
    assert both.anchor is both.reference and both.complete
    lone = Pair(0, None, both.candidate)
    assert lone.anchor is both.candidate and not lone.complete and lone.stage == "forward"


def test_the_relative_error_against_zeros_is_none_or_infinite():
    assert Figures(l2=3, reference_l2=6).rel_l2 == 0.5
    assert Figures(l2=3).rel_l2 == math.inf
    assert Figures().rel_l2 == 0.0


@pytest.mark.parametrize(
    ("diff", "excess"),
    [
        ({"judgement": Judgement(Figure.L2, 3.0, 2.0, Rule.ROUNDING)}, 1.5),
        ({"judgement": Judgement(Figure.L2, 3.0, 0.0, Rule.ROUNDING)}, math.inf),
        ({"judgement": Judgement(Figure.L2, 0.0, 0.0, Rule.ROUNDING)}, 0.0),
        ({"passed": False, "problem": Problem(Kind.SHAPES, "shapes differ")}, math.inf),
        ({}, 0.0),
    ],
)
def test_the_excess_is_the_judged_figure_in_multiples_of_its_limit(diff, excess):
    assert Diff(pair([1], [1]), **diff).excess == excess


def test_coverage_counts_both_sides():
    coverage = Coverage(compared=3, reference_records=4, candidate_records=8)
    assert coverage.share == 0.5 and not coverage.complete
    assert Coverage(compared=3, reference_records=3, candidate_records=3).complete
    assert Coverage().share == 0.0


def test_the_worst_diff_passes_over_what_has_no_finite_error():
    diffs = [Diff(pair([1], [1]), Figures(l2=x, reference_l2=r)) for x, r in ((1, 2), (3, 0), (3, 4))]
    diffs.append(Diff(pair([1], [1]), problem=Problem(Kind.SHAPES, "shapes differ")))
    assert Report(tuple(diffs), Coverage()).worst is diffs[2]
    assert Report((), Coverage()).worst is None
