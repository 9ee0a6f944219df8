"""The first diff of a step that did not pass, over all of its processes."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.records import STAGES, Diff
from padiff.records.step_diffs import StepDiffs


def first_failed(diffs: Sequence[Diff]) -> Diff | None:
    """Return the first diff that did not pass, in causal order over all processes of a step; `None` if all passed."""
    if isinstance(diffs, StepDiffs) and diffs.passed:
        return None
    first = next((diff for diff in diffs if not diff.passed), None)
    if first is None:
        return None
    ranks = ranks_of([diff for diff in diffs if diff.pair.step == first.pair.step])
    firsts = [
        (*next((k, d) for k, d in enumerate(rank_diffs) if not d.passed), rank_diffs)
        for rank_diffs in ranks
        if not _passed(rank_diffs)
    ]
    # Processes wait for each other in the backward: a diff before the backward in any process comes first.
    return min(firsts, key=lambda one: (_stage_number(one[1]), one[0]))[1] if len(firsts) > 1 else first


def _stage_number(diff: Diff) -> int:
    return STAGES.index("forward" if diff.pair.derived else diff.pair.stage)


def ranks_of(step: Sequence[Diff]) -> list[list[Diff]]:
    """Split a step's diffs by process; the diffs of one process follow each other."""
    ranks: list[list[Diff]] = [[]]
    sites: set[tuple[bool, str]] = set()
    for diff in step:
        site = diff.pair.reference is None, diff.pair.anchor.site
        if site in sites:
            ranks.append([])
            sites.clear()
        sites.add(site)
        ranks[-1].append(diff)
    return ranks


def _passed(diffs: Sequence[Diff]) -> bool:
    return all(diff.passed for diff in diffs)
