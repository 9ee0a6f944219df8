"""Pass learning rates that differ only by the order of the parameter groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from padiff.compare.judge.site_facts import SiteFacts
from padiff.records import Rule
from padiff.records.diff_rows import RULE_NUMBERS
from padiff.records.step_diffs import StepDiffs


def with_rates(ranks: list[StepDiffs], agree: Callable[[], bool]) -> list[StepDiffs]:
    """Return the diffs of each rank, with all learning rates of groups passed if each parameter's rates agree.

    Args:
        agree: function that returns True if each parameter's rates agree; called only if a learning rate did not pass.
    """
    rates = [_rates(diffs) for diffs in ranks]
    failed = any((~diffs.rows["passed"][places]).any() for diffs, places in zip(ranks, rates))
    if not failed or not agree():
        return ranks
    return [_of_groups(diffs, places) for diffs, places in zip(ranks, rates)]


def _rates(diffs: StepDiffs) -> np.ndarray:
    places = diffs.sites.places["update"]
    return np.asarray(places[diffs.sites.fact(SiteFacts).of_loop[places]])


def _of_groups(diffs: StepDiffs, places: np.ndarray) -> StepDiffs:
    rows = diffs.rows.copy()
    judged = places[rows["figure"][places] != 0]
    rows["passed"][judged], rows["rule"][judged] = True, RULE_NUMBERS[Rule.GROUPS]
    return diffs.judged(rows)
