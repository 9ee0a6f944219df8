"""What diffs come to, stage by stage, is the same whether they are looked at one by one or as columns."""

from __future__ import annotations

import math
import random

import pytest
from kit.records import pair, record

from padiff.records import LOOP, STAGES, Both, Diff, Figure, Figures, Judgement, Pair, Rule
from padiff.records.report_data import Overview, StageCounts, table_of

NUMBERS = [0.0, 1e-9, 0.25, 1.0, 3.0, math.inf, math.nan]


def diffs_of(seed: int) -> list[Diff]:
    """Of any kind: with a side missing, not measured, not judged, with figures and limits that are no numbers."""
    rng = random.Random(seed)
    found = []
    for number in range(rng.choice([0, 1, 60])):
        stage = rng.choice(STAGES)
        one, other = (record("a" if number % 5 else LOOP, stage, f"s{number}", [1.0]) for _ in range(2))
        sides = rng.choice([(one, other), (one, other), (one, None), (None, other)])
        figures = Figures(l2=rng.choice(NUMBERS), reference_l2=rng.choice(NUMBERS), size=1)
        judged = Judgement(Figure.REL_L2, rng.choice(NUMBERS), rng.choice(NUMBERS), Rule.ROUNDING)
        found.append(
            Diff(
                Pair(0, *sides),
                figures if rng.random() < 0.8 else None,
                rng.random() < 0.7,
                judged if rng.random() < 0.8 else None,
            )
        )
    return found


def one_by_one(diffs: list[Diff]) -> tuple[Diff | None, dict[str, StageCounts]]:
    worst: list[Diff | None] = [None, None]
    largest = [-1.0, -1.0]
    stages: dict[str, StageCounts] = {}
    for diff in diffs:
        stage = stages.setdefault(diff.pair.stage, StageCounts())
        stage.differ += not diff.passed
        stage.compared += diff.counts
        stage.alone += not diff.counts
        if diff.figures is None or not diff.compared:
            continue
        error = diff.figures.rel_l2
        noise = diff.passed and diff.judgement is not None and diff.judgement.limit > 1
        if largest[noise] < error < math.inf:
            worst[noise], largest[noise] = diff, error
        excess = 0.0 if noise else diff.excess  # a limit that no error exceeds says nothing
        if excess > stage.excess and math.isfinite(error):
            stage.worst, stage.excess = diff, excess
    return worst[0] or worst[1], stages


@pytest.mark.parametrize("seed", range(40))
def test_columns_say_what_each_diff_says(seed):
    diffs = diffs_of(seed)
    worst, stages = one_by_one(diffs)
    for cut in (0, len(diffs) // 3):
        found = Overview([table_of(diffs[:cut]), table_of(diffs[cut:])])
        assert found.worst is worst
        assert list(found.stages) == list(stages)
        for stage, own in found.stages.items():
            assert own.worst is stages[stage].worst
            assert own == stages[stage]


def test_the_worst_is_the_first_of_those_that_are_as_far_off():
    diffs = [Diff(pair([1.0], [2.0]), Figures(l2=1.0, reference_l2=1.0, values=Both(1.0, 2.0))) for _ in range(3)]
    assert Overview([table_of(diffs)]).worst is diffs[0]
