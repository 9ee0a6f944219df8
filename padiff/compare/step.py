"""Comparing one step of two runs: a pure function of the steps, of what holds for all of them, and of those before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from padiff.align import Alignment
from padiff.compare.judge.absent import absent_stages
from padiff.compare.judge.drift import NONE, Drift, drift
from padiff.compare.judge.history import NOTHING_YET, History
from padiff.compare.judge.policy import Policy
from padiff.compare.judge.unrecorded import excused
from padiff.compare.measure.floors import with_floors
from padiff.compare.measure.many import measured
from padiff.pair.plans import PairPlans
from padiff.pair.ranks import in_one, left_out, rank_steps, step_pairs, weights_known
from padiff.records import Both, Pair, Run, Step
from padiff.records.step_diffs import StepDiffs


@dataclass(frozen=True)
class ComparisonPlan:
    """What holds for all steps of a comparison.

    Attributes:
        runs: other steps of them show whether a stage that a step lacks is recorded at all.
        alignment: which layers answer to each other.
        policy: when a diff passes.
        stages: what is measured.
        measure: measures pairs. Default: one after the other, in this process.
        plans: what steps were seen to be paired like.
    """

    runs: Both[Run]
    alignment: Alignment
    policy: Policy
    stages: Collection[str]
    measure: Callable[[Sequence[Pair]], StepDiffs] | None = None
    plans: PairPlans = field(default_factory=PairPlans, compare=False)


@dataclass(frozen=True)
class Before:
    """What the steps that were compared so far leave to the next one.

    Attributes:
        drift: how far the runs were apart in the last one.
        history: what each run was seen to record.
        known: whether all weights that train are recorded in the last one.
    """

    drift: Drift = NONE
    history: Both[History] = NOTHING_YET
    known: bool = True


def compare_step(steps: Both[Sequence[Step]], plan: ComparisonPlan, before: Before) -> tuple[list[StepDiffs], Before]:
    """The judged diffs of one step, and what it leaves to the next one.

    Args:
        steps: the step of each run, as each rank saw it.
        plan: what holds for all steps.
        before: what the steps before leave.

    Returns:
        The diffs of each rank in causal order; first, what is not compared of any.
    """
    infos = plan.runs.map(lambda run: run.info)
    history = before.history.zip(steps).map(lambda side: side[0].after(side[1]))
    # A history stays what it is where a step records what the one before did.
    as_before = all(now is then for now, then in zip(history, before.history))
    ranks = rank_steps(steps, infos)
    pairs = step_pairs(ranks, plan.alignment, plan.stages, plan.plans)
    together = in_one(pairs)
    diffs = plan.measure(together) if plan.measure is not None else measured(together, plan.policy.elementwise)
    found = []
    for rank, own in zip(ranks, diffs.split(pairs)):
        # Every rank of a step is judged by the step before it, none by another rank.
        judged = plan.policy.judge(with_floors(own, steps), before.drift)
        judged = excused(judged, infos.zip(history), rank, plan.alignment)
        judged, history = absent_stages(judged, rank, history, plan.runs)
        found.append(judged)
    alone = left_out(steps, infos, ranks, plan.stages)
    found = [StepDiffs.of(alone), *found] if alone else found
    known = before.known if as_before else all(weights_known(*side) for side in infos.zip(steps))
    apart = drift(StepDiffs.joined(found), before.drift, known)
    return found, replace(before, drift=apart, history=history, known=known)
