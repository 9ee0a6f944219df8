"""Comparison of one step of two runs: a pure function of the steps, the plan and the state left by earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from padiff.align import Alignment
from padiff.compare.choices import Flips, chooses, flips_of
from padiff.compare.judge import limits
from padiff.compare.judge.drift import NONE, Drift, drift
from padiff.compare.judge.flipped_rows import EarlierFlips, counted, judged_by_rows
from padiff.compare.judge.missing_records import NOTHING_YET, History, absent_stages, excused
from padiff.compare.judge.policy import Policy, forms_of, written_otherwise
from padiff.compare.measure.measure_step import measured
from padiff.compare.measure.pairs import measure_pair, with_floors
from padiff.compare.rearranged import with_row_orders
from padiff.pair.plans import PairPlans, in_one, left_out, rank_steps, step_pairs, weights_known
from padiff.records import Both, Figure, Pair, Rule, Run, Step
from padiff.records.report_data import ChoiceCounts
from padiff.records.step_diffs import RULE_NUMBERS, StepDiffs

if TYPE_CHECKING:
    from padiff.compare.diagnose.hypotheses.averages import Averages


# Most weights of a step that are compared with the step before.
_MOST = 8
# Factor by which a copy may be off more than its source. Chosen.
_MORE = 1.5


def with_averages(diffs: StepDiffs, rank: int, runs: Both[Run], alignment: Alignment, before: Drift) -> StepDiffs:
    """Return the diffs, with those of weights failed that follow their sources otherwise than the reference's do.

    Args:
        diffs: the judged diffs of one rank of a step.
        rank: the rank.
        before: the drift of the step before.
    """
    suspects = _suspects(diffs, before)
    if not suspects:
        return diffs
    # Imported where needed: most comparisons have no average that is off.
    from padiff.compare.diagnose.hypotheses.averages import failing
    from padiff.compare.diagnose.hypotheses.diff_context import DiffContext

    made = list(diffs)
    scene = DiffContext(made[suspects[0]], made, alignment, runs, rank)
    failed = failing(scene, suspects, made)
    references = diffs.rows["reference_l2"]
    return diffs.with_failures(
        {
            place: (
                Figure.REL_L2,
                float(diffs.relative[place]),
                _limit(float(references[place]), average),
                Rule.AVERAGE,
            )
            for place, average in failed.items()
        }
    )


def with_other_forms(diffs: StepDiffs, steps: Both[Step], runs: Both[Run]) -> StepDiffs:
    """Return the diffs, with outputs of whole models passed that the losses take in another form.

    Args:
        diffs: the judged diffs of one rank of a step.
        steps: the records of the rank.
    """
    places = forms_of(diffs)
    if not places or not all(step.trace.functions for step in steps):
        return diffs
    # Imported where needed: most comparisons have no such output.
    from padiff.compare.diagnose.hypotheses.loss_schedule import other_forms

    outputs = [place for place in places if diffs.sites.stages[place] == "forward"]
    answers = other_forms([diffs[place].pair for place in outputs], steps, runs)
    sites = {diffs.sites.keys[place] for place, is_form in zip(outputs, answers) if is_form}
    made = list(diffs)
    for place in places:
        if diffs.sites.keys[place] in sites:
            made[place] = written_otherwise(made[place])
    return diffs.replaced(made) if sites else diffs


def _limit(reference: float, average: Averages) -> float:
    """Return the relative error that rounding of an average explains."""
    rounding = average.noise * float(np.sqrt(average.now.reference.size)) / reference if reference else 0.0
    return max(rounding, limits.allowed("float32", "weight"))


def _suspects(diffs: StepDiffs, before: Drift) -> list[int]:
    """Return the weights without an optimizer that passed by the drift, and are off by more than their sources."""
    sites, rows = diffs.sites, diffs.rows
    if before.step < 0 or diffs.number is None or before.step != diffs.number - 1:
        return []
    places = sites.places["weight"]
    drifting = places[(rows["passed"] & (rows["rule"] == RULE_NUMBERS[Rule.DRIFT]))[places] & diffs.measured[places]]
    drifting = drifting[diffs.relative[drifting] > limits.allowed("float32", "weight")]
    if not len(drifting):
        return []
    trained = {sites.keys[place] for place in sites.places["update"].tolist()}
    errors: dict[tuple[str, tuple[int, ...]], float] = {}
    for place in places.tolist():
        if (key := sites.keys[place]) in trained and np.isfinite(rows["l2"][place]):
            like = key[1], sites.shapes[place]
            errors[like] = max(errors.get(like, 0.0), float(rows["l2"][place]), before.weights.get(key, 0.0))
    suspects = []
    for place in drifting.tolist():
        key, like = sites.keys[place], (sites.keys[place][1], sites.shapes[place])
        if key in trained or like not in errors:
            continue
        if rows["l2"][place] > _MORE * max(errors[like], before.weights.get(key, 0.0)):
            suspects.append(place)
    return sorted(suspects, key=lambda place: -float(diffs.relative[place]))[:_MOST]


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
        if not judged.passed and plan.policy.in_context:
            judged = with_other_forms(judged, rank, plan.runs)
        judged = with_averages(judged, len(diffs_by_rank), plan.runs, plan.alignment, before.drift)
        if plan.policy.in_context and chooses(rank):
            number = len(diffs_by_rank)
            left = before.flips.get(number, EarlierFlips()).with_trace(rank.reference.trace)
            if not judged.passed:
                # A step that passes may leave flips, too: they are looked up when a later step does not pass.
                left = left.with_places(
                    [each for some in before.last.get(number, ()) for each in _flips(some, plan, {})]
                )
                flips = _flips(rank, plan, left.moved(judged))
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
            elif rank.reference.trace.functions:  # the first step tells as much, at little cost
                counts = counted(judged, _flips(rank, plan, {}), rank.reference)
                chosen += [counts] if counts is not None else []
            flips_left[number], last[number] = left.with_diffs(judged), (rank,)
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


def _flips(steps: Both[Step], plan: ComparisonPlan, moved: Mapping[int, np.ndarray]) -> list[Flips]:
    return flips_of(steps, plan.alignment, plan.runs.map(lambda run: run.info), moved)
