"""Faults between the processes of one run as the cause of a diff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, whole_of
from padiff.compare.first_failed import ranks_of
from padiff.compare.replicas import RankFault, RankFinding, check_replicas
from padiff.errors import PadiffError
from padiff.records import SIDES, Both, Cause, Diff, Run

# The largest relative error of a mean over processes that counts as equal: only the order of the sum may differ.
_IS_MEAN = 1e-5


@dataclass(frozen=True)
class RankDiff:
    """A diff, with all diffs of its process.

    Attributes:
        diff: the diff.
        own: the diffs of its step and process, in causal order.
        rank: the number of the process; 0 if there is only one.
    """

    diff: Diff
    own: Sequence[Diff]
    rank: int


def placed(diff: Diff, step: Sequence[Diff]) -> RankDiff:
    """Return a diff with all diffs of its process."""
    ranks = ranks_of(step)
    number = next((k for k, rank_diffs in enumerate(ranks) if any(d is diff for d in rank_diffs)), 0)
    return RankDiff(diff, ranks[number], number)


def rank_cause(scene: DiffContext, step: Sequence[Diff]) -> Cause | None:
    """Return a fault between the processes of one run that the other run does not have; else `None`.

    Args:
        scene: the diff and its step.
        step: the diffs of the step, of all processes.
    """
    if all(run.info.world_size == 1 for run in scene.runs):
        return None
    findings = scene.runs.map(lambda run: _findings(run, scene))
    kinds = findings.map(lambda side: {finding.kind for finding in side})
    for side, side_findings, others in zip(SIDES, findings, kinds.swapped()):
        for finding in side_findings:
            if finding.kind not in others and _explains(finding, scene.stage):
                proven = finding.kind is RankFault.NOT_REDUCED and _is_mean(side, step)
                evidence = "their mean over the ranks is the other side's gradient" if proven else ""
                clause = f"{finding.sentence[0].lower()}{finding.sentence[1:].rstrip('.')}"
                sentence = f"the {side}'s ranks differ from each other: {clause}"
                return Cause("ranks", sentence, proven=proven, evidence=evidence)
    return None


def _findings(run: Run, scene: DiffContext) -> list[RankFinding]:
    """Return the findings on a run's processes in the scene's step and in the step compared before it."""
    if run.info.world_size == 1:
        return []
    before = [number for number in scene.numbers if number < scene.number]
    try:
        return check_replicas(run.info, [run.steps(number) for number in (*before[-1:], scene.number)])
    except PadiffError:
        return []  # the values can no longer be read


def _explains(finding: RankFinding, stage: str) -> bool:
    """Return True if a finding can be the reason of a diff at a stage."""
    if finding.kind is RankFault.SAME_BATCH:
        return stage == "input"
    return finding.kind.fault and stage in ("weight", "grad", "update")


def _is_mean(side: str, step: Sequence[Diff]) -> bool:
    """Return True if the mean of one side's gradients over the processes is the gradient of the other side."""
    sites: dict[str, list[Both[np.ndarray]]] = {}
    for diff in step:
        if diff.pair.stage == "grad" and not diff.passed and diff.pair.complete:
            tensors = whole_of(diff.pair)
            if tensors is None:
                return False
            sites.setdefault(diff.pair.anchor.site, []).append(tensors)
    ranks = max(map(len, sites.values()), default=0)
    if ranks < 2:
        return False
    for arrays in sites.values():
        # A process whose gradient passes is missing here, so that the mean can't be computed.
        oriented = [both if side == SIDES.reference else both.swapped() for both in arrays]
        mean, expected = np.mean([both.reference for both in oriented], axis=0), oriented[0].candidate
        if len(arrays) == ranks and np.linalg.norm(mean - expected) > _IS_MEAN * np.linalg.norm(expected):
            return False
    return True
