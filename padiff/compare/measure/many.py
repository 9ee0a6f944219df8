"""Measuring all pairs of a step: those that are alike together, the others one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from padiff.compare.measure.pairs import measure_pair
from padiff.compare.measure.rows import measured_in_rows
from padiff.compare.measure.together import measure_together
from padiff.records import Pair
from padiff.records.planned import sites_of
from padiff.records.rows import empty_rows, odd_indexes, row_of
from padiff.records.step_diffs import StepDiffs


def measured(
    pairs: Sequence[Pair],
    elementwise: tuple[float, float] | None = None,
    done: Callable[[int], None] | None = None,
) -> StepDiffs:
    """The diffs of a step's pairs, not judged yet.

    Args:
        elementwise: as `padiff.compare.measure.pairs.measure_pair` takes it.
        done: called now and then, with how many pairs are measured.

    Raises:
        padiff.errors.RunFolderError: a tensor can't be read.
    """
    rows = empty_rows(len(pairs))
    places: Sequence[int] = range(len(pairs))
    if elementwise is None:
        places = (~measure_together(pairs, rows)).nonzero()[0].tolist()
    left = [pairs[place] for place in places]
    small = measured_in_rows(left) if elementwise is None else {}
    alone = {places[number]: diff for number, diff in small.items()}
    for number, (place, pair) in enumerate(zip(places, left)):
        if place not in alone:
            alone[place] = measure_pair(pair, elementwise)
            if done is not None:
                done(len(pairs) - len(places) + number + 1)
    for place, diff in alone.items():
        rows[place] = row_of(diff)
    problems = {place: diff.problem for place, diff in alone.items() if diff.problem is not None}
    return StepDiffs(pairs, sites_of(pairs), rows, problems, odd_indexes(alone))
