"""Comparison of one step of two runs: a pure function of the steps, the plan and the state left by earlier steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from padiff.align import Alignment
from padiff.compare import diagnose
from padiff.compare.choices import Flips, chooses, flips_of, is_readable, reached
from padiff.compare.judge import limits
from padiff.compare.judge.drift import NONE, Drift, Form, Site, drift, site_of
from padiff.compare.judge.flipped_rows import EarlierFlips, counted, judged_by_rows
from padiff.compare.judge.missing_records import NOTHING_YET, History, absent_stages, excused
from padiff.compare.judge.policy import Policy, forms_of, is_in_another_form, written_otherwise
from padiff.compare.judge.site_facts import SiteFacts
from padiff.compare.measure.measure_step import measured
from padiff.compare.measure.operands import elements
from padiff.compare.measure.pairs import few, measure_pair, with_floors
from padiff.compare.rearranged import with_row_orders
from padiff.errors import PadiffError
from padiff.frameworks.catalog import LOOKING
from padiff.pair.plans import PairPlans, in_one, left_out, rank_steps, step_pairs, weights_known
from padiff.records import LOOP, Both, Diff, Figure, Pair, Rule, Run, Step, Trace, TracedCall, is_below
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


# Largest relative error of an output that agrees although an input is written in another form.
_SAME_OUTPUT = 1e-5


def input_forms(diffs: StepDiffs, trace: Trace) -> dict[Site, Form]:
    """Return the inputs of two values, such as masks, that both sides write in different ways.

    An output that is computed with such an input and agrees shows it. Beside weights that differ any such input counts,
    as the weights come first.

    Args:
        diffs: the judged diffs of one rank of a step.
        trace: the reference's calls.
    """
    failed = np.flatnonzero(~diffs.rows["passed"]).tolist()
    inputs = [diffs[k] for k in failed if diffs.sites.stages[k] == "input" and diffs.measured[k]]
    inputs = [diff for diff in inputs if is_in_another_form(diff, 2)]
    if not inputs:
        return {}
    # Imported where needed: most comparisons have no such input.
    from padiff.compare.diagnose.traced import Graph

    graph, is_of_weights = Graph(trace), any(diffs.sites.stages[k] == "weight" for k in failed)
    agreeing = {
        graph.tensor_of(record)
        for place in diffs.sites.places["forward"].tolist()
        if diffs.measured[place] and diffs.relative[place] <= _SAME_OUTPUT
        if (record := diffs[place].pair.reference) is not None
    }
    forms = {}
    for diff in inputs:
        called = graph.of_record(diff.pair.anchor)
        tensors = {each.tensor for each in called.inputs if each.slot == diff.pair.anchor.slot} if called else set()
        takers: set[str] = set()
        for call in trace.calls:
            if tensors & {operand.tensor for operand in call.inputs}:
                tensors |= {operand.tensor for operand in call.outputs}
                takers |= set() if call.function else {call.layer}
        for call in trace.calls:  # the code of a layer of the framework hands the mask on unseen
            if "attention" in call.layer_type.lower() and any(is_below(call.layer, path) for path in takers):
                tensors |= {operand.tensor for operand in call.outputs}
        if is_of_weights or tensors & (agreeing - {None}):
            forms[site_of(diff)] = Form(Rule.GIVEN_OTHERWISE, 1.0)
    return forms


# Functions with a pole where their first operand, or a divisor, is zero; and functions that leave such an operand as
# small as it is.
_AT_POLES = {"log": 0, "log2": 0, "log10": 0, "rsqrt": 0, "div": 1}
_KEPT = LOOKING | {"add", "mul", "neg", "abs", "clamp", "clip"}
# Share of its terms below which a difference has lost a digit; the units in the last place that it may be off by; and
# the least elements for each one that may be off. Chosen.
_LOST, _UNITS, _EACH = 0.1, 16, 8


def with_magnified(diffs: StepDiffs, step: Step, run: Run) -> StepDiffs:
    """Return the diffs, with outputs and what goes into losses passed whose few wrong elements come from rounding.

    A logarithm of a difference that is nearly nothing (``log(1 - a * a)``) magnifies the rounding of single elements
    without a limit: such an output, or input of a loss, may be off in a few elements, and the loss by as much.

    Args:
        diffs: the judged diffs of one rank of a step.
        step: the reference's records of the rank.
        run: the reference.
    """
    sites, facts = diffs.sites, diffs.sites.fact(SiteFacts)
    failed = [place for place in np.flatnonzero(~diffs.rows["passed"]).tolist() if diffs.measured[place]]
    if not any(facts.into_loss[place] or sites.stages[place] == "forward" for place in failed):
        return diffs
    try:
        traces = step.trace, *(first.trace for number in run.numbers()[:1] for first in run.steps(number)[:1])
        trace = next((trace for trace in traces if trace.functions), None)
        poles = {} if trace is None else _poles(trace)
    except PadiffError:
        return diffs  # a step or its trace is damaged; the figures stay valid
    if trace is None or not poles:
        return diffs
    magnified = reached(trace, [*poles])
    losses = {
        (f"{call.function}()", call.nth)
        for call in trace.calls
        if call.layer == LOOP and any(operand.tensor in magnified for operand in call.inputs)
    }
    outputs = {
        (call.layer, call.call, operand.slot)
        for call in trace.calls
        for operand in call.outputs
        if not call.function and operand.tensor in magnified
    }
    judged_diffs, errors = list(diffs), dict[tuple[str, int], float]()
    for place in failed:
        call = sites.slots[place].partition(".")[0], judged_diffs[place].pair.anchor.call
        judged, error = judged_diffs[place].judgement, float(diffs.relative[place])
        anchor = judged_diffs[place].pair.anchor
        is_output = sites.stages[place] == "forward" and (anchor.layer, anchor.call, anchor.slot) in outputs
        is_of_loss = sites.stages[place] == "loss" and (call in losses or facts.losses[place])
        if judged is None or not (is_output or is_of_loss):
            continue
        if is_output or facts.into_loss[place]:
            bulk = _without_few(judged_diffs[place], [*poles.values()], in_rows=trace is step.trace)
            if bulk <= judged.limit:
                judged_diffs[place] = judged_diffs[place].judged(True, Figure.BULK, bulk, judged.limit, judged.rule)
                errors[call] = max(errors.get(call, 0.0), error)
            continue
        # A loss that the loop logs is made of any of those.
        largest = max(errors.values(), default=0.0) if facts.losses[place] else errors.get(call, 0.0)
        if error <= (limit := limits.LOSS_OF_OUTPUTS * largest):
            judged_diffs[place] = judged_diffs[place].judged(True, Figure.REL_L2, error, limit, Rule.OUTPUTS)
    return diffs.replaced(judged_diffs)


def _without_few(diff: Diff, poles: Sequence[_Pole], in_rows: bool) -> float:
    """Return the relative error of a tensor without its few worst elements; infinity if its elements are not known, or
    if one of them is off by more than the poles make of rounding, in its row if the poles are those of this step.
    """
    try:
        values = elements(diff.pair)
    except PadiffError:
        return math.inf
    if values is None:
        return math.inf
    norm = float(np.linalg.norm(values.reference))
    if not norm:
        return math.inf
    errors = np.abs(np.ravel(values.candidate.astype(np.float64) - values.reference))
    rows = diff.pair.anchor.shape[0] if diff.pair.anchor.shape else 1
    most = np.zeros((rows, 1))
    for pole in poles:
        by_row = pole.errors.reshape(rows, -1) if in_rows and len(pole.errors) == rows else np.full((1, 1), pole.worst)
        most = most + by_row.max(axis=1, keepdims=True)
    beyond = np.linalg.norm(np.maximum(errors.reshape(rows, -1) - most, 0.0))
    bulk = np.linalg.norm(np.sort(errors)[: errors.size - min(few(errors.size), errors.size // _EACH)])
    return float(max(beyond, bulk)) / norm


class _Pole(NamedTuple):
    """Rounding of a difference that nearly cancels out, as a function near its pole magnifies it.

    Attributes:
        errors: the errors of the elements; 0 where nothing cancels out.
        worst: the error of an element of which nothing is left.
    """

    errors: np.ndarray
    worst: float


def _poles(trace: Trace) -> dict[int, _Pole]:
    """Return the calls that take a function near its pole, of a difference whose terms nearly cancel out.

    Returns:
        The errors that rounding of the difference causes, by the position of the call.
    """
    producers = {operand.tensor: call for call in trace.calls if call.function for operand in call.outputs}
    poles = {}
    for position, call in enumerate(trace.calls):
        place = _AT_POLES.get(call.function, len(call.inputs))
        pole = _magnified(trace, producers, call.inputs[place].tensor) if place < len(call.inputs) else None
        if pole is not None:
            factor = 1.0 if call.function.startswith("log") else float(_sizes(trace, call.outputs[0].tensor).max())
            poles[position] = _Pole(pole.errors * factor, pole.worst * factor)
    return poles


def _magnified(trace: Trace, producers: Mapping[int, TracedCall], tensor: int) -> _Pole | None:
    """Return the relative errors of a tensor that rounding causes; `None` if no difference nearly cancels out."""
    call, sizes = producers.get(tensor), _sizes(trace, tensor)
    smallest = float(sizes.min(initial=math.inf))
    while call is not None and call.function not in ("sub", "rsub"):
        numbers = [abs(value) for value in call.arguments.values() if type(value) in (int, float)]
        # A small number that is added is what is left where the terms are equal.
        smallest = min([smallest, *numbers]) if call.function == "add" else smallest
        is_followed = call.function in _KEPT and len(call.inputs) == 1
        call = producers.get(call.inputs[0].tensor) if is_followed else None
    if call is None:
        return None
    terms = [float(_sizes(trace, operand.tensor).max(initial=0.0)) for operand in call.inputs]
    largest = max([*terms, *(abs(value) for value in call.arguments.values() if type(value) in (int, float))])
    unit = 2 * limits.ROUNDING["float32"]
    if smallest >= _LOST * largest:
        return None
    errors = np.where(sizes < _LOST * largest, _UNITS * unit * largest / np.maximum(sizes, unit), 0.0)
    return _Pole(errors, _UNITS * unit * largest / max(smallest, unit))


def _sizes(trace: Trace, tensor: int) -> np.ndarray:
    """Return the absolute values of a tensor; none if its values were not kept."""
    source = trace.tensors[tensor].source
    return np.abs(source.read().astype(np.float64)) if source is not None and not source.sketched else np.zeros(0)


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
            rank_diffs = rank_diffs if again is None else again
            judged = judged if again is None else plan.policy.judge(with_floors(again, steps), before.drift)
            try:
                forms = input_forms(judged, rank.reference.trace)
            except PadiffError:
                forms = {}  # the trace is damaged; the figures stay valid
            if forms:
                drift_before = replace(before.drift, forms={**before.drift.forms, **forms})
                judged = plan.policy.judge(with_floors(rank_diffs, steps), drift_before)
        judged = excused(judged, infos.zip(history), rank, plan.alignment)
        judged, history = absent_stages(judged, rank, history, plan.runs)
        if not judged.passed and plan.policy.in_context:
            judged = with_magnified(judged, rank.reference, plan.runs.reference)
            judged = with_other_forms(judged, rank, plan.runs)
        judged = with_averages(judged, len(diffs_by_rank), plan.runs, plan.alignment, before.drift)
        if plan.policy.in_context and (chooses(rank) if judged.passed else is_readable(rank)):
            number = len(diffs_by_rank)
            left = before.flips.get(number, EarlierFlips()).with_traces(rank.map(lambda step: step.trace))
            if not judged.passed:
                # A step that passes may leave flips, too: they are looked up when a later step does not pass.
                left = left.with_places(
                    [each for some in before.last.get(number, ()) for each in _flips(some, plan, {})]
                )
                flips = _flips(rank, plan, left.moved(judged), left.traced)
                judged, counts = judged_by_rows(
                    judged,
                    flips,
                    rank.reference,
                    lambda some: plan.policy.judge(with_floors(some, steps), before.drift),
                    left,
                )
                if counts is not None:
                    judged = diagnose.contradicted(judged, rank, infos, flips)
                    chosen.append(counts)
                    left = left.with_grads(judged).with_counts(counts)
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


def _flips(
    steps: Both[Step],
    plan: ComparisonPlan,
    moved: Mapping[int, np.ndarray],
    traced: Both[Trace] | None = None,
) -> list[Flips]:
    return flips_of(steps, plan.alignment, plan.runs.map(lambda run: run.info), moved, traced)
