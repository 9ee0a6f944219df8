"""Comparison of two runs, one step at a time, and how far a run moved and two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from padiff.align import Alignment, RuntimeEvidence, align, is_mapped, resolved
from padiff.align.call_order import call_order, derived_inputs, outermost_calls
from padiff.compare import diagnose
from padiff.compare.coverage import Findings, ReportFilter, Stacks, Tally, first_failed, models_of, stacks_of
from padiff.compare.declared import Declared, at_the_start
from padiff.compare.diagnose.place import Agreement
from padiff.compare.judge.drift import EQUAL, with_caveat
from padiff.compare.judge.missing_records import with_unrecorded
from padiff.compare.judge.policy import NoisePolicy, Policy
from padiff.compare.judge.site_facts import key_of, rounding_gradients, with_rates
from padiff.compare.measure.operands import picture_of
from padiff.compare.measure.pairs import measure_pair
from padiff.compare.measuring import Measuring
from padiff.compare.rearranged import other_boundaries
from padiff.compare.step import Before, ComparisonPlan, compare_step
from padiff.compare.workers import Workers
from padiff.dump.prepare import missing_steps_lines
from padiff.errors import PadiffError
from padiff.model.given_map import GivenMap
from padiff.pair.joined_calls import inputs_agree
from padiff.pair.merge_ranks import merge_ranks
from padiff.pair.plans import OWN_SAMPLES
from padiff.pair.steps import pair_steps
from padiff.records import (
    LOOP,
    PARAMETER_STAGES,
    SIDES,
    STAGES,
    Aftermath,
    Both,
    Coverage,
    Diff,
    FirstDiff,
    Pair,
    Record,
    Report,
    Run,
    RunInfo,
    Step,
    is_loss,
    is_of_loss,
    loss_role,
    settings_at,
)
from padiff.records.compared import Figure
from padiff.records.declared import differences
from padiff.records.pair_table import PairSchema
from padiff.records.recorded import left_out_line
from padiff.records.report_data import Movement
from padiff.records.step_diffs import FIGURE_NUMBERS, StepDiffs
from padiff.records.step_schema import without_values


def with_loop(alignment: Alignment, steps: Both[Step], infos: Both[RunInfo]) -> Alignment:
    """Return the alignment with the order of the loops' calls, and the inputs that they derive from other outputs."""
    settings = infos.zip(steps).map(lambda side: settings_at(side[0].settings, side[1].settings))
    paths = [(pair.reference.path, pair.candidate.path) for pair in alignment.pairs]
    try:
        named = steps.map(lambda step: replace(step, records=without_values(step.records)))
        derived = named.zip(settings).map(lambda side: derived_inputs(*side))
        alignment = replace(alignment, derived=derived)
        if not any(call for step in named for _, call in outermost_calls(step.records)):
            return alignment  # each layer is called once
        return replace(alignment, call_order=call_order(steps, derived, paths, inputs_agree))
    except PadiffError:  # a trace is damaged, or the values can no longer be read
        return alignment


def _apart(diffs: StepDiffs) -> set[str]:
    """Return the layers with an output on both sides that did not pass, or could not be compared."""
    places = diffs.sites.places["forward"]
    places = places[(diffs.sites.complete & ~(diffs.rows["passed"] & ~diffs.troubled))[places]]
    return {diffs.sites.layers[place] for place in places.tolist()}


# Largest number of parameters that are looked at, evenly spread over the model.
_MOST = 32

# Number of the figure that is relative to the tensor.
_RELATIVE = FIGURE_NUMBERS[Figure.REL_L2]

Site = tuple[str, str]


def movement(run: Run, steps: Sequence[int], last: StepDiffs) -> Movement | None:
    """Return how far a run's training moved; `None` if its records do not show it.

    Args:
        run: the reference.
        steps: numbers of the compared steps.
        last: the diffs of the last compared step.
    """
    try:
        records = [run.steps(number)[0].records for number in (steps[0], steps[-1])]
        places = [_places(each) for each in records]
        trained = [site for site in places[0]["weight"] if site in places[-1]["update"]]
        chosen = trained[:: max(1, -(-len(trained) // _MOST))]
        # Within one step, the update is what moved.
        others = places[1]["update" if len(steps) == 1 else "weight"]
        pairs = [(records[0][places[0]["weight"][site]], records[1][others[site]]) for site in chosen if site in others]
        if len(steps) == 1:
            moved = [(_norm(update), _norm(weight)) for weight, update in pairs]
        else:
            moved = [_distance(before, after) for before, after in pairs]
        losses = [_loss(each, where["loss"]) for each, where in zip(records, places)]
    except (PadiffError, OSError, ValueError):
        return None  # what can no longer be read shows nothing
    size = math.hypot(*(norm for _, norm in moved))
    sites = set(trained)
    here = [place for place in last.known_places("weight").tolist() if last.sites.keys[place] in sites]
    if not size or not here or not math.isfinite(size):
        return None
    share = math.hypot(*(distance for distance, _ in moved)) / size
    updates = [place for place in last.known_places("update").tolist() if last.rows["figure"][place] == _RELATIVE]
    both = (losses[0], losses[1]) if len(steps) > 1 and losses[0] is not None and losses[1] is not None else None
    # A fault shows in the weights or, as a share of the movement, in the updates.
    limit = float(np.median(last.rows["limit"][here]))
    if updates:
        limit = min(limit, share * float(np.median(last.rows["limit"][updates])))
    return Movement(share, limit, both) if math.isfinite(share) else None


def _places(records: Sequence[Record]) -> dict[str, dict[Site, int]]:
    """Return the position of each weight, update and loss among the records."""
    places: dict[str, dict[Site, int]] = {"weight": {}, "update": {}, "loss": {}}
    for place, record in enumerate(without_values(records)):
        if record.stage in places:
            places[record.stage].setdefault((record.layer, record.slot), place)
    return places


def _distance(first: Record, last: Record) -> tuple[float, float]:
    figures = measure_pair(Pair(0, first, last)).figures
    return (math.nan, math.nan) if figures is None else (figures.l2, figures.reference_l2)


def _norm(record: Record) -> float:
    return _distance(record, record)[1]


def _loss(records: Sequence[Record], places: dict[Site, int]) -> float | None:
    place = places.get((LOOP, "loss"))
    record = None if place is None else records[place]
    return None if record is None or record.source.sketched or record.shape else float(record.value)


_NO_STEPS: Both[Sequence[int]] = Both((), ())


class RunComparison:
    """Comparison of two runs one step at a time, which also works while the runs grow.

    Args:
        reference, candidate: the run to trust, and the run in question.
        layer_map: layers to pair, in the form that `padiff.model.given_map.GivenMap.from_value` accepts.
        policy: the rule that passes or fails a diff. Default: `NoisePolicy`.
        stages: stages to report; the limits of a policy may also depend on other stages.
        layers: only layers whose paths in either run match one of these patterns are reported.
        boundaries: True to search for all layers that end at different places of the computation
            (`padiff.compare.rearranged`); False if one side's layers run on the other's values: then only layers
            with outputs of different shapes are searched for.
        aligned: function that pairs the layers, with the signature of `padiff.align.align`.
        workers: processes that measure steps ahead of the one that is judged.
        measuring: called from time to time while a step is measured, with the finished share of the step.
        alone: True to judge each step like a first step: both sides begin the step equal, so limits contain no drift.

    Raises:
        UsageError: the layer map does not fit the runs; an unknown stage; a pattern that matches no layer.
    """

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        layer_map: GivenMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
        policy: Policy | None = None,
        stages: Collection[str] = STAGES,
        boundaries: bool = True,
        aligned: Callable[..., Alignment] = align,
        workers: Workers | None = None,
        layers: Collection[str] | None = None,
        measuring: Callable[[float], None] | None = None,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self.runs = Both(reference, candidate)
        self._infos = self.runs.map(lambda run: run.info)
        self._map = GivenMap.from_value(layer_map)
        self._policy: Policy = policy if policy is not None else NoisePolicy()
        self._asked = ReportFilter.from_arguments(stages, layers, self._infos)
        # A limit also depends on the other diffs of the step.
        self._measured_stages = frozenset(STAGES) if self._policy.in_context else self._asked.stages
        self._measuring = Measuring(self._measured_stages, self._policy.elementwise, workers, measuring)
        self._boundaries, self._aligned = boundaries, aligned
        self._plan: ComparisonPlan | None = None
        # Layers whose outputs steps have shown so far, and the pairs of the last such step.
        self._met: set[str] = set()
        self._schema: PairSchema | None = None
        self._first_diff: FirstDiff | None = None
        #: The first diff that did not pass, with the records around it; `None` if all passed.
        self.scene: diagnose.DiffContext | None = None
        self._place: diagnose.Place | None = None
        #: Consequences of the first diff, and independent faults, once a first diff exists.
        self._around: diagnose.FollowupContext | None = None
        #: The first compared step, if it has diffs.
        self._began: int | None = None
        self._before = Before()
        #: Largest errors of each tensor, in the steps before the latest one and in all steps.
        self._agreed = self._agreed_now = Agreement()
        self._declared = Declared()
        #: The latest compared step, if it has diffs.
        self._parted: tuple[int, Both[list[Step]]] | None = None
        #: Records of the latest compared step, of each rank.
        self._compared: list[Both[Step]] = []
        #: The diffs of the first rank in the latest compared step.
        self._latest: Sequence[Diff] = ()
        #: True if processes held parts of the compared tensors.
        self.spread = False
        #: Call stacks of the layers, from one of the steps.
        self._stacks: Both[Stacks] = Both({}, {})
        if aligned is not align or is_mapped(self._infos.reference, self._infos.candidate, self._map):
            aligned(*self._infos, self._map)  # raises an error for a wrong map, before any step is recorded

    @property
    def alignment(self) -> Alignment:
        """Return the alignment of the layers, based on the first compared step, which shows the called layers."""
        return self._plan.alignment if self._plan is not None else self._aligned(*self._infos, self._map)

    @property
    def latest(self) -> Sequence[Step]:
        """Return the latest compared step of each run, of the first rank; empty if there is none."""
        return tuple(self._compared[0]) if self._compared else ()

    def common(self) -> list[int]:
        """Return the numbers of the steps that both runs have by now."""
        numbers = self.runs.map(lambda run: run.numbers())
        candidate_numbers = set(numbers.candidate)
        return [number for number in numbers.reference if number in candidate_numbers]

    def compare(self, number: int) -> Report:
        """Compare one step of all ranks; a rank's records without a partner in the other run become diffs of one
        side.
        """
        diffs = self.diffs(number)
        report = self.report(diffs, [number])
        return replace(report, explained=self.explain_later(diffs))

    def diffs(self, number: int) -> Sequence[Diff]:
        """Return the judged diffs of one step, in causal order."""
        return StepDiffs.joined(self.rank_diffs(Both(number, number)))

    def rank_diffs(self, numbers: Both[int]) -> list[StepDiffs]:
        """Return the judged diffs of each rank for a pair of step numbers, preceded by records that no rank
        compares, if any.
        """
        # Released first: two steps at a time would take twice the memory, and garbage collections twice the time.
        self._compared, self._latest = [], ()
        return self._diffs(self.runs.zip(numbers).map(lambda side: side[0].steps(side[1])), numbers)

    def step_diffs(self, steps: Both[Step]) -> Sequence[Diff]:
        """Return the judged diffs of two steps."""
        return StepDiffs.joined(self._diffs(steps.map(lambda step: [step])))

    def _diffs(self, steps: Both[list[Step]], numbers: Both[int] | None = None) -> list[StepDiffs]:
        steps = steps.map(merge_ranks)
        self.spread = self.spread or any(side and side[0].spread for side in steps)
        if self._alone:
            self._before, self._agreed_now = replace(self._before, drift=EQUAL), Agreement()
        if self._plan is None:
            self._plan, diffs, before = self._first(steps, numbers)
        else:
            diffs, before = self._next(steps, numbers, self._plan)
            others = self._boundaries_of(diffs, steps, self._plan.alignment)
            if others:  # of layers whose outputs earlier steps lack
                alignment = self._plan.alignment
                alignment = replace(alignment, cut_elsewhere=alignment.cut_elsewhere | others)
                self._plan = replace(self._plan, alignment=alignment)
                diffs, before = self._next(steps, numbers, self._plan)
        if diffs and diffs[0].sites is not self._schema:
            self._schema = sites = diffs[0].sites
            self._met.update(sites.layers[k] for k in sites.places["forward"].tolist() if sites.complete[k])
        self._before, self._latest = before, diffs[0] if diffs else []
        self._compared = [Both(*sides) for sides in zip(*steps)]
        self._agreed = self._agreed_now
        self._agreed_now = self._agreed.after(diffs)
        if all(steps):
            called = before.history.map(lambda side: side.called)
            first = steps.map(lambda ranks: ranks[0])
            self._stacks = self._stacks.zip(first).map(lambda side: side[0] or stacks_of(side[1]))
            self._declared.add_step(self.runs.map(lambda run: run.info), first, self._plan.alignment, called)
            self._declared.hold_against(diffs)
            if any(step.evaluations or not step.number for step in first):
                for number, difference in diagnose.calls_in_training_mode(first, self._plan.alignment):
                    self._declared.add_lasting(number, difference)
            if self._policy.settings_count:
                diffs = with_rates(diffs, partial(self._declared.rates_agree, first))
        first_rank = next((rank for rank in diffs if rank), None)
        if self._began is None and first_rank is not None:
            self._began = first_rank[0].pair.step
        if self._around is not None and first_rank is not None:
            self._around.search(first_rank, self._plan.alignment)
        if not all(rank.passed for rank in diffs):
            self._parted = steps.reference[0].number if steps.reference else -1, steps
        if self._asked.everything:
            return diffs
        return [StepDiffs.from_diffs([diff for diff in rank if self._asked.has(diff.pair)]) for rank in diffs]

    def _first(
        self, steps: Both[list[Step]], numbers: Both[int] | None
    ) -> tuple[ComparisonPlan, list[StepDiffs], Before]:
        """Compare the first step, which shows the called layers, equal starts, and layers with different boundaries."""
        self._measuring.start(steps.reference[0])  # workers import while this process aligns
        evidence = steps.map(lambda ranks: RuntimeEvidence.from_step(ranks[0]))
        alignment = resolved(self._aligned(*self._infos, self._map, evidence), evidence)
        if all(map(len, steps)):
            alignment = with_loop(alignment, steps.map(lambda ranks: ranks[0]), self._infos)
        before_now: list[StepDiffs] = []

        def measure(pairs: Sequence[Pair]) -> StepDiffs:
            if not before_now:
                before_now.append(self._measuring.diffs(pairs, numbers, alignment))
                return before_now[0]
            return self._measuring.again(pairs, before_now[0])

        plan = ComparisonPlan(self.runs, alignment, self._policy, self._measured_stages, measure)
        diffs, before = compare_step(steps, plan, self._before)
        others = self._boundaries_of(diffs, steps, alignment)
        if others:
            plan = replace(plan, alignment=replace(alignment, cut_elsewhere=others))
            diffs, before = compare_step(steps, plan, self._before)
        return replace(plan, measure=None), diffs, before

    def _next(
        self, steps: Both[list[Step]], numbers: Both[int] | None, plan: ComparisonPlan
    ) -> tuple[list[StepDiffs], Before]:
        """Compare a step after the first one."""
        measure = partial(self._measuring.diffs, numbers=numbers, alignment=plan.alignment)
        return compare_step(steps, replace(plan, measure=measure), self._before)

    def _boundaries_of(
        self, diffs: Sequence[StepDiffs], steps: Both[list[Step]], alignment: Alignment
    ) -> frozenset[tuple[str, str]]:
        """Return the pairs of layers with different boundaries, of those whose outputs no step before has shown."""
        compared = next((rank for rank in diffs if not rank or rank[0].problem is not OWN_SAMPLES), None)
        if compared is None or (self._met and self._met.issuperset(_apart(compared))):
            return frozenset()
        single = all(map(len, steps)) and len(steps.reference) == 1
        first = steps.map(lambda ranks: ranks[0]) if single else None
        others = other_boundaries(compared, alignment, self._boundaries, first)
        return frozenset(paths for paths in others if paths[0] not in self._met)

    def before(self, step: int, candidate: RunInfo) -> Report | None:
        """Return a report of the declared differences before any step can be compared.

        Returns `None` if no difference holds for every possible alignment, or if the policy does not count settings.

        Args:
            step: the candidate's first step.
            candidate: the candidate's present description.
        """
        if not self._policy.settings_count:
            return None
        reference = self.runs.reference
        numbers = reference.numbers()
        later = [number for number in numbers if number >= step] or numbers[-1:]
        settings = settings_at(reference.info.settings, reference.steps(later[0])[0].settings if later else {})
        infos = Both(replace(reference.info, settings=settings), candidate)
        declared = [
            difference for difference in at_the_start(infos, self.alignment) if difference.stage in self._asked.stages
        ]
        first = diagnose.before_the_first(declared, step)
        if first is None:
            return None
        return Report(
            diffs=(),
            coverage=Coverage(),
            first_diff=first,
            tolerance=self._policy.describe(),
            reference=reference.name,
            candidate=self.runs.candidate.name,
            environment=differences(*infos),
            settings_differ=tuple(declared),
        )

    def report(
        self,
        diffs: Sequence[Diff],
        steps: Sequence[int],
        only: Both[Sequence[int]] = _NO_STEPS,
        settings: bool | None = None,
    ) -> Report:
        """Return the report of diffs of several steps.

        Args:
            only: steps that only one run has.
            settings: True to count differing hyper-parameters of layers that ran as a diff even if no tensor differs.
                Default: the policy's choice.
        """
        tally = Tally(self.alignment)
        tally.add(diffs)
        return self._reported(tuple(diffs), tally, self.first(diffs), steps, only, settings)

    def report_of(
        self,
        findings: Findings,
        first: FirstDiff | None,
        steps: Sequence[int],
        only: Both[Sequence[int]],
    ) -> Report:
        """Return the report of all findings, with the first diff among them."""
        report = self._reported(findings.diffs, findings.tally, first, steps, only, None)
        lost = tuple(line for side, run in zip(SIDES, self.runs) for line in missing_steps_lines(run, f"the {side}"))
        copies = self.runs.map(lambda run: run.info.copies_left_out)
        left_out = tuple(
            f"not recorded in the {side}: {left_out_line(names)}" for side, names in zip(SIDES, copies) if names
        )
        report = replace(report, coverage=replace(report.coverage, lost=lost, copies=left_out))
        if first is None and report.first_diff is not None and self._latest:
            # No tensor exceeds its limit; the errors may prove the cause all the same.
            declared = self._declared.at(self._latest[0].pair.step)
            evidence = diagnose.Evidence(self.runs, self.alignment, self._policy, declared=lambda _: declared)
            return replace(report, first_diff=diagnose.with_proof(report.first_diff, self._latest, evidence))
        if report.first_diff is None and not self._alone:
            return replace(report, moved=movement(self.runs.reference, steps, StepDiffs.from_diffs(self._latest)))
        return report

    def first(self, diffs: Sequence[Diff]) -> FirstDiff | None:
        """Return the first diff that did not pass, with its description; `None` if all passed."""
        failed = first_failed(diffs)
        if failed is None:
            return None
        if self._first_diff is not None and self._first_diff.diff is failed:
            return self._first_diff
        # Later diffs usually follow from the first diff: no hypotheses are computed for them.
        later = self._first_diff is not None and failed.pair.step > self._first_diff.step
        evidence = diagnose.Evidence(
            self.runs, self.alignment, self._policy, self._steps_of(failed), self._declared.at, self._agreed
        )
        step = [diff for diff in diffs if diff.pair.step == failed.pair.step]
        first, place = diagnose.described(failed, step, evidence, compute=not later)
        if not later and (first.cause is None or first.cause.kind == "code"):
            failed, first, place = self._after_the_end(failed, step, evidence) or (failed, first, place)
        if self._around is not None:
            return self._around.placed(first, failed)
        # Created now, because a recorder with max_bytes may delete the step later.
        first = replace(first, picture=picture_of(failed.pair))
        self._around = diagnose.FollowupContext(first, failed, place, step, evidence, self._began)
        self._first_diff, self._place = first, place
        scene = diagnose.scene_of(failed, step, self.alignment, self.runs)
        self.scene = replace(scene, declared=evidence.declared(failed.pair.step), place=place)
        return first

    def _after_the_end(
        self, failed: Diff, step: Sequence[Diff], evidence: diagnose.Evidence
    ) -> tuple[Diff, FirstDiff, diagnose.Place] | None:
        """Return the first diff after that of a container whose cause is not known, if that diff's cause is proven.

        One author's container ends at another place of the computation than its partner, such as before a residual: its
        output differs with and without a fault.
        """
        layers = {pair.reference.path: pair for pair in self.alignment.pairs}
        pair = layers.get(failed.pair.anchor.layer)
        if failed.pair.stage != "forward" or pair is None or not all(layer.children for layer in pair):
            return None
        leaves = {path for path, leaf in layers.items() if not any(layer.children for layer in leaf)}
        inside = [d for d in step if d.pair.complete and d.pair.stage in ("forward", "input")]
        after = first_failed([d for d in inside if d.pair.anchor.layer in leaves])
        if after is None:
            return None
        first, place = diagnose.described(after, step, evidence)
        return (after, first, place) if first.cause is not None and first.cause.proven else None

    def explain_later(self, diffs: Sequence[Diff]) -> FirstDiff | None:
        """Return the earlier first diff with its cause, if this step proves the cause; otherwise `None`.

        Full tensors of this step can prove a cause that the earlier step's sketches could not. The returned first diff
        replaces the earlier one.

        Args:
            diffs: diffs of the last compared step.
        """
        first, place = self._first_diff, self._place
        if first is None or first.diff is None or place is None or not diffs or diffs[0].pair.step <= first.step:
            return None
        figures = first.diff.figures
        if (first.cause is not None and first.cause.proven) or figures is None or figures.basis == "tensors":
            return None
        # All diffs of this step may pass: limits grow with the distance of the runs.
        steps = self._compared[first.rank or 0] if (first.rank or 0) < len(self._compared) else None
        evidence = diagnose.Evidence(self.runs, self.alignment, self._policy, steps, self._declared.at)
        cause = diagnose.cause_found_later(first, place, diffs, evidence)
        if cause is None:
            return None
        self._first_diff = replace(first, cause=cause)
        return self._first_diff

    def _steps_of(self, diff: Diff) -> Both[Step] | None:
        """Return the step and rank that hold a diff; `None` unless it is the last step that had a diff."""
        if self._parted is None or self._parted[0] != diff.pair.step:
            return None
        ranks = self._parted[1]
        pairs = [Both(*sides) for sides in zip(*ranks)]
        if all(len(side) == 1 for side in ranks):
            return pairs[0]  # the diff may hold its record with the rows in another order
        matches = (sides for sides in pairs if any(record is diff.pair.reference for record in sides.reference.records))
        return next(matches, None)

    def _reported(
        self,
        diffs: Sequence[Diff],
        tally: Tally,
        first: FirstDiff | None,
        steps: Sequence[int],
        only: Both[Sequence[int]],
        settings: bool | None,
    ) -> Report:
        history = self._before.history
        called = history.map(lambda side: side.called)
        coverage = tally.coverage(steps, only, self.alignment, self._infos, called)
        if self._asked.stages & PARAMETER_STAGES:
            coverage = with_unrecorded(coverage, self._infos.zip(history), self._asked.layers)
        if first is not None:
            first = with_caveat(first, coverage)
        differ = self._declared.in_steps(steps, self._asked.concerns)
        if first is not None and not any(difference.kind == "mode" for _, difference in differ):
            differ += diagnose.evaluated_calls(first, self.runs, self.alignment)
        tensor = first
        if self._policy.settings_count if settings is None else settings:
            first = diagnose.settings_first(differ, first) if differ else first
            # Different settings explain the distance of the runs, so no amplified rounding is reported.
            coverage = replace(coverage, amplified=None) if first is not tensor else coverage
        # After the first difference the limits are as large as the runs are apart: everything is within them.
        last = math.inf if first is None else first.step
        around = self._around
        return Report(
            diffs=diffs,
            coverage=coverage,
            first_diff=first,
            tolerance=self._policy.describe(),
            reference=self.runs.reference.name,
            candidate=self.runs.candidate.name,
            environment=differences(*self._infos),
            settings_differ=tuple(difference for _, difference in differ),
            aftermath=around.aftermath(first, tensor) if around is not None else Aftermath({}),
            independent=around.independent(first, tensor, differ, steps, self._asked.has) if around is not None else (),
            models=models_of(self.runs.map(lambda run: run.info), self.alignment, self._stacks),
            choices=tuple(each for each in self._before.choices if each.step in steps and each.step <= last),
        )


_STAGES = frozenset({"backward", "grad", "update", "loss"})


class StepDistance(NamedTuple):
    """Relative distances of two runs in one step, as shares of the reference's norms; NaN where nothing was recorded.

    Attributes:
        updates: distance of the updates of all parameters together, without parameters whose gradients are rounding
            noise.
        loss: distance of the losses of all micro-batches together.
    """

    updates: float
    loss: float


class Distance:
    """Meter of the distance of two runs, step by step.

    Args:
        infos: the runs.
        layer_map: layers to pair, in the form that `compare_runs` accepts.
    """

    def __init__(self, infos: Both[RunInfo], layer_map: Any = None) -> None:
        self._infos, self._map = infos, GivenMap.from_value(layer_map)
        self._alignment: Alignment | None = None

    def measure(self, steps: Both[Step]) -> StepDistance:
        """Return the distance of one step of both runs."""
        if self._alignment is None:
            evidence = steps.map(RuntimeEvidence.from_step)
            self._alignment = resolved(
                align(self._infos.reference, self._infos.candidate, self._map, evidence), evidence
            )
        pairs = pair_steps(steps.reference, steps.candidate, self._alignment)
        diffs = StepDiffs.from_diffs([measure_pair(pair) for pair in pairs if pair.complete and pair.stage in _STAGES])
        noise = diffs.keys_of(diffs.figure_fact(rounding_gradients))
        updates, losses = [0.0, 0.0], [0.0, 0.0]
        for diff in diffs:
            figures, anchor = diff.figures, diff.pair.anchor
            if figures is None or not diff.compared:
                continue
            if diff.pair.stage == "update" and anchor.layer != LOOP and key_of(diff) not in noise:
                sums = updates
            elif is_loss(anchor) or (
                diff.pair.stage == "loss" and is_of_loss(anchor) and loss_role(anchor.slot) == "0"
            ):
                sums = losses
            else:
                continue
            sums[0] += math.inf if figures.nonfinite else figures.l2**2
            sums[1] += figures.reference_l2**2
        return StepDistance(*(math.sqrt(error / size) if size else math.nan for error, size in (updates, losses)))
