"""Measurement of all pairs of a step: equally structured pairs together, the others one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from padiff.compare.measure.pairs import measure_pair
from padiff.compare.measure.sketch_batch import measure_together
from padiff.compare.measure.small_tensor_batch import measure_in_rows
from padiff.records import Diff, Pair, Problem
from padiff.records.diff_rows import empty_rows, odd_indexes, row_of
from padiff.records.pair_table import pair_schema_of
from padiff.records.step_batch import StepBatch
from padiff.records.step_diffs import StepDiffs


def measured(
    pairs: Sequence[Pair],
    elementwise: tuple[float, float] | None = None,
    done: Callable[[int], None] | None = None,
) -> StepDiffs:
    """Return the diffs of a step's pairs, not judged yet.

    Args:
        elementwise: tolerance in the form that `padiff.compare.measure.pairs.measure_pair` accepts.
        done: called now and then with the number of measured pairs.

    Raises:
        padiff.errors.RunFolderError: a tensor can't be read.
    """
    return measured_alike([pairs], elementwise, done)[0]


def measured_alike(
    steps: Sequence[Sequence[Pair]],
    elementwise: tuple[float, float] | None = None,
    done: Callable[[int], None] | None = None,
) -> list[StepDiffs]:
    """Return the unjudged diffs of several steps, all of whose pairs are `PairTable` with the same columns."""
    sites, count = pair_schema_of(steps[0]), len(steps[0])
    rows = empty_rows(len(steps) * count).reshape(len(steps), count)
    together = np.zeros(rows.shape, np.bool_) if elementwise is not None else measure_together(steps, rows)
    problems: list[dict[int, Problem]] = []
    odd = []
    for pairs, step_rows, done_mask in zip(steps, rows, together):
        places = np.flatnonzero(~done_mask).tolist()
        remaining = measure_in_rows(pairs, places, step_rows) if elementwise is None else places
        alone: dict[int, Diff] = {}
        for number, place in enumerate(remaining, count - len(remaining)):
            if done is not None and number:
                done(number)
            alone[place] = measure_pair(pairs[place], elementwise)
        for place, diff in alone.items():
            step_rows[place] = row_of(diff)
        problems.append({place: diff.problem for place, diff in alone.items() if diff.problem is not None})
        odd.append(odd_indexes(alone))
    block = StepBatch(sites, rows, problems)
    return [StepDiffs(pairs, sites, rows[k], problems[k], odd[k], block, k) for k, pairs in enumerate(steps)]
