"""Comparison of one step of two runs: a pure function of the steps, the plan and the state left by earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from padiff.align import Alignment
from padiff.compare.choices import Flips, chooses, flips_of
from padiff.compare.judge.averages import with_averages
from padiff.compare.judge.drift import NONE, Drift, drift
from padiff.compare.judge.flipped_rows import EarlierFlips, judged_by_rows
from padiff.compare.judge.history import NOTHING_YET, History
from padiff.compare.judge.missing_records import absent_stages
from padiff.compare.judge.policy import Policy
from padiff.compare.judge.unrecorded import excused
from padiff.compare.measure.floors import with_floors
from padiff.compare.measure.measure_step import measured
from padiff.compare.measure.pairs import measure_pair
from padiff.compare.row_orders import with_row_orders
from padiff.pair.plans import PairPlans
from padiff.pair.ranks import in_one, left_out, rank_steps, step_pairs, weights_known
from padiff.records import Both, Pair, Run, Step
from padiff.records.choice_counts import ChoiceCounts
from padiff.records.step_diffs import StepDiffs


@dataclass(frozen=True)
class ComparisonPlan:
    """Constants of a comparison, the same for all steps.

    Attributes:
        runs: the runs; their other steps show if a stage that is absent in one step is recorded at all.
        alignment: the paired layers.
        policy: the rule that passes or fails a diff.
        stages: stages to measure.
        measure: function that measures pairs. Default: one after the other, in this process.
        plans: cache of pairings of earlier steps.
    """

    runs: Both[Run]
    alignment: Alignment
    policy: Policy
    stages: Collection[str]
    measure: Callable[[Sequence[Pair]], StepDiffs] | None = None
    plans: PairPlans = field(default_factory=PairPlans, compare=False)


@dataclass(frozen=True)
class Before:
    """State that the compared steps leave to the next one.

    Attributes:
        drift: distance of the runs in the last step.
        history: records seen in each run so far.
        known: True if all trainable weights are recorded in the last step.
        choices: what the choices that differ within rounding cost, of each step that has some.
        flips: what they leave to later steps, by rank.
        last: the last step of each rank that chooses.
    """

    drift: Drift = NONE
    history: Both[History] = NOTHING_YET
    known: bool = True
    choices: tuple[ChoiceCounts, ...] = ()
    flips: Mapping[int, EarlierFlips] = field(default_factory=dict)
    last: Mapping[int, tuple[Both[Step], ...]] = field(default_factory=dict)


def compare_step(steps: Both[Sequence[Step]], plan: ComparisonPlan, before: Before) -> tuple[list[StepDiffs], Before]:
    """Return the judged diffs of one step, and the state for the next step.

    Args:
        steps: the step of each run, one entry per rank.
        plan: constants of the comparison.
        before: state left by the earlier steps.

    Returns:
        The diffs of each rank in causal order, preceded by the records that no rank compares, if any; and the new
        state.
    """
    infos = plan.runs.map(lambda run: run.info)
    history = before.history.zip(steps).map(lambda side: side[0].after(side[1]))
    # A history object stays identical if a step records the same as the step before.
    as_before = all(now is then for now, then in zip(history, before.history))
    ranks = rank_steps(steps, infos)
    pairs = step_pairs(ranks, plan.alignment, plan.stages, plan.plans)
    together = in_one(pairs)
    diffs = plan.measure(together) if plan.measure is not None else measured(together, plan.policy.elementwise)
    measure = partial(measure_pair, elementwise=plan.policy.elementwise)
    diffs_by_rank: list[StepDiffs] = []
    chosen: list[ChoiceCounts] = []
    flips_left, last = dict(before.flips), dict(before.last)
    for rank, rank_diffs in zip(ranks, diffs.split(pairs)):
        # Every rank of a step is judged by the step before it, none by another rank.
        judged = plan.policy.judge(with_floors(rank_diffs, steps), before.drift)
        if not judged.passed and plan.policy.in_context:
            again = with_row_orders(judged, rank.reference, measure)
            judged = plan.policy.judge(with_floors(again, steps), before.drift) if again is not None else judged
        judged = excused(judged, infos.zip(history), rank, plan.alignment)
        judged, history = absent_stages(judged, rank, history, plan.runs)
        judged = with_averages(judged, len(diffs_by_rank), plan.runs, plan.alignment, before.drift)
        if plan.policy.in_context and chooses(rank):
            number = len(diffs_by_rank)
            left = before.flips.get(number, EarlierFlips()).with_trace(rank.reference.trace)
            if not judged.passed:
                # A step that passes may leave flips, too: they are looked up when a later step does not pass.
                left = left.with_places([each for some in before.last.get(number, ()) for each in _flips(some, plan)])
                flips = _flips(rank, plan)
                judged, counts = judged_by_rows(
                    judged,
                    flips,
                    rank.reference,
                    lambda some: plan.policy.judge(with_floors(some, steps), before.drift),
                    left,
                )
                if counts is not None:
                    chosen.append(counts)
                    left = left.with_grads(judged)
            flips_left[number], last[number] = left, (rank,)
        diffs_by_rank.append(judged)
    alone = left_out(steps, infos, ranks, plan.stages)
    diffs_by_rank = [StepDiffs.from_diffs(alone), *diffs_by_rank] if alone else diffs_by_rank
    weights_recorded = before.known if as_before else all(weights_known(*side) for side in infos.zip(steps))
    apart = drift(StepDiffs.joined(diffs_by_rank), before.drift, weights_recorded)
    choices = (*before.choices, *chosen)
    after = replace(
        before,
        drift=apart,
        history=history,
        known=weights_recorded,
        choices=choices,
        flips=flips_left,
        last=last,
    )
    return diffs_by_rank, after


def _flips(steps: Both[Step], plan: ComparisonPlan) -> list[Flips]:
    return flips_of(steps, plan.alignment, plan.runs.map(lambda run: run.info))
