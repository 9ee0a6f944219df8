"""The first diff of a step that did not pass, over all of its processes."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.records import STAGES, Diff
from padiff.records.step_diffs import StepDiffs


def first_failed(diffs: Sequence[Diff]) -> Diff | None:
    """The first diff that did not pass, in causal order over all processes of a step; `None` if all passed."""
    if isinstance(diffs, StepDiffs) and diffs.passed:
        return None
    first = next((diff for diff in diffs if not diff.passed), None)
    if first is None:
        return None
    ranks = ranks_of([diff for diff in diffs if diff.pair.step == first.pair.step])
    firsts = [(*next((k, d) for k, d in enumerate(own) if not d.passed), own) for own in ranks if not _passed(own)]
    # Processes wait for each other in the backward: what parts before it in any of them comes first.
    return min(firsts, key=lambda one: (STAGES.index(one[1].pair.stage), one[0]))[1] if len(firsts) > 1 else first


def ranks_of(step: Sequence[Diff]) -> list[list[Diff]]:
    """A step's diffs by process; those of one come one after the other."""
    ranks: list[list[Diff]] = [[]]
    seen: set[tuple[bool, str]] = set()
    for one in step:
        site = one.pair.reference is None, one.pair.anchor.site
        if site in seen:
            ranks.append([])
            seen.clear()
        seen.add(site)
        ranks[-1].append(one)
    return ranks


def _passed(diffs: Sequence[Diff]) -> bool:
    return all(diff.passed for diff in diffs)
