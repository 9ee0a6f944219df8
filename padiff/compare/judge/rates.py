"""Learning rates: where each parameter's own agree, the groups only stand in another order."""

from __future__ import annotations

from collections.abc import Callable

from padiff.records import LOOP, Diff, Rule


def with_rates(diffs: list[list[Diff]], agree: Callable[[], bool]) -> list[list[Diff]]:
    """The diffs of each rank, where learning rates that differ by their groups pass if each parameter has its own.

    Args:
        agree: whether each parameter's rates do; asked only where a learning rate did not pass.
    """
    if not any(_is_rate(diff) and not diff.passed for rank in diffs for diff in rank) or not agree():
        return diffs
    return [[_of_groups(diff) if _is_rate(diff) else diff for diff in rank] for rank in diffs]


def _is_rate(diff: Diff) -> bool:
    return diff.pair.anchor.layer == LOOP and diff.pair.stage == "update"


def _of_groups(diff: Diff) -> Diff:
    judged = diff.judgement
    return diff if judged is None else diff.judged(True, judged.figure, judged.value, judged.limit, Rule.GROUPS)
