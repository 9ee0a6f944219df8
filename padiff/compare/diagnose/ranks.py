"""A diff among those of its process, and what speaks for a fault between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.scene import Scene, whole_of
from padiff.compare.first_failed import ranks_of
from padiff.compare.replicas import RankFault, RankFinding, check_replicas
from padiff.errors import PadiffError
from padiff.records import SIDES, Both, Cause, Diff, Run

# The mean of the processes' gradients is the one that was reduced, but for the order in which they are added up.
_IS_MEAN = 1e-5


@dataclass(frozen=True)
class RankDiff:
    """A diff of a process.

    Attributes:
        diff: the diff.
        own: the diffs of its step and process, in causal order.
        rank: which process; 0 where there is one.
    """

    diff: Diff
    own: Sequence[Diff]
    rank: int


def placed(diff: Diff, step: Sequence[Diff]) -> RankDiff:
    """A diff among those of its process."""
    ranks = ranks_of(step)
    number = next((k for k, own in enumerate(ranks) if any(one is diff for one in own)), 0)
    return RankDiff(diff, ranks[number], number)


def rank_cause(scene: Scene, step: Sequence[Diff]) -> Cause | None:
    """A fault between the processes of one run that the other run has not.

    Args:
        step: the diffs of the step, of all processes.
    """
    if all(run.info.world_size == 1 for run in scene.runs):
        return None
    found = scene.runs.map(lambda run: _findings(run, scene))
    kinds = found.map(lambda side: {finding.kind for finding in side})
    for side, own, others in zip(SIDES, found, kinds.swapped()):
        for finding in own:
            if finding.kind not in others and _explains(finding, scene.stage):
                proven = finding.kind is RankFault.NOT_REDUCED and _is_mean(side, step)
                evidence = "their mean over the ranks is the other side's gradient" if proven else ""
                sentence = f"the {side}'s ranks part: {finding.sentence[0].lower()}{finding.sentence[1:].rstrip('.')}"
                return Cause("ranks", sentence, proven=proven, evidence=evidence)
    return None


def _findings(run: Run, scene: Scene) -> list[RankFinding]:
    """Of a step and of the one that was compared before it."""
    if run.info.world_size == 1:
        return []
    before = [number for number in scene.numbers if number < scene.number]
    try:
        return check_replicas(run.info, [run.steps(number) for number in (*before[-1:], scene.number)])
    except PadiffError:
        return []  # the values are no longer there to look at


def _explains(finding: RankFinding, stage: str) -> bool:
    """Whether a finding may be why a stage parts."""
    if finding.kind is RankFault.SAME_BATCH:
        return stage == "input"
    return finding.kind.fault and stage in ("weight", "grad", "update")


def _is_mean(side: str, step: Sequence[Diff]) -> bool:
    """Whether the mean of the processes' gradients of one side is what the other side's optimizers were given."""
    sites: dict[str, list[Both[np.ndarray]]] = {}
    for diff in step:
        if diff.pair.stage == "grad" and not diff.passed and diff.pair.complete:
            whole = whole_of(diff.pair)
            if whole is None:
                return False
            sites.setdefault(diff.pair.anchor.site, []).append(whole)
    ranks = max(map(len, sites.values()), default=0)
    if ranks < 2:
        return False
    for arrays in sites.values():
        # A process whose gradient happens to pass is missing here, and the mean with it.
        own = [both if side == SIDES.reference else both.swapped() for both in arrays]
        mean, expected = np.mean([both.reference for both in own], axis=0), own[0].candidate
        if len(arrays) == ranks and np.linalg.norm(mean - expected) > _IS_MEAN * np.linalg.norm(expected):
            return False
    return True
