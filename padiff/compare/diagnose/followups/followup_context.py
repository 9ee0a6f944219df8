"""Further faults that a comparison finds in addition to the first diff, collected step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from padiff.align import Alignment
from padiff.compare.diagnose.causes import BETWEEN_CALLS
from padiff.compare.diagnose.first import described, scene_of
from padiff.compare.diagnose.followups import stage_faults
from padiff.compare.diagnose.followups.fault import Fault, Flow, are_one, families, kind_of_place, leaves
from padiff.compare.diagnose.hypotheses import missing_gradient, unowned_weights
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, PairPlace, alike, place_of, rounding_of
from padiff.compare.diagnose.hypotheses.engine import explain
from padiff.compare.diagnose.hypotheses.hypothesis import explains, weigh
from padiff.compare.diagnose.place import Evidence, Place, agreeing, graphs_of
from padiff.compare.diagnose.recompute.of_layers import Recorded, recorded
from padiff.compare.diagnose.settings import cause_in_settings, cause_of
from padiff.compare.diagnose.shifted import shift_cause
from padiff.compare.diagnose.traced import Graph, Relations
from padiff.errors import PadiffError
from padiff.records import (
    LOOP,
    STAGES,
    Aftermath,
    Both,
    Cause,
    Diff,
    Difference,
    FirstDiff,
    Pair,
    Recomputed,
    Run,
    Standing,
    Step,
    mark_of,
)
from padiff.records.both import SIDES
from padiff.records.first_diff import Mark
from padiff.records.step_diffs import StepDiffs

# The most places that are checked for a dependence on diffs; the most further faults in a report; the most kinds of
# layers with a fault: more kinds point to something that affects the whole computation.
_LOOKED_AT, _REPORTED, _KINDS = 12, 3, 2
# The most layers with a fault that has no proven cause.
_FEW = 2


@dataclass(frozen=True)
class Found:
    """The further faults in the step of the first diff.

    Attributes:
        faults: the faults to report.
        again: diffs that do not follow from the first diff, but may have the same fault.
    """

    faults: tuple[Fault, ...] = ()
    again: tuple[Diff, ...] = ()


def faults_of_step(
    first: FirstDiff, diff: Diff, place: Place, scene: DiffContext, evidence: Evidence, began: bool
) -> Found:
    """Return the further faults in the step of the first diff.

    Args:
        first: the first diff, as it is reported.
        diff: the diff itself.
        place: where in the code the diff comes from.
        scene: the scene of the diff, with the diffs of the same rank.
        evidence: the input of the search for causes.
        began: True if this is the first compared step.
    """
    # A fault in a later step may come from earlier diffs within the limits, unless the first diff explains itself.
    by_itself = began or first.recomputed is not None or (first.cause is not None and first.cause.proven)
    faults: list[Fault] = []
    unreached: list[Fault] = []
    if evidence.steps is not None and first.stage in ("input", "weight", "forward"):
        infos = evidence.runs.map(lambda run: run.info)
        graphs = place.graphs or graphs_of(evidence.steps, infos)
        sides = recorded(evidence.steps, infos, graphs)
        later = [d for d in scene.step if d is not diff]
        unreached = list(_unreached(diff, place, later, evidence, evidence.steps, graphs))
        faults += _one_of_each(unreached)
        if by_itself:
            faults += _by_themselves(diff, later, sides, scene)
            faults += [
                step_fault
                for step_fault in (stage_faults.loss_fault(scene), stage_faults.gradient_fault(scene, sides))
                if step_fault is not None
            ]
    if by_itself and _may_have_another_optimizer(first):
        among = stage_faults.unexplained(scene) if first.stage == "update" else None
        if among is None or among:
            fault = stage_faults.update_fault(scene, among)
            faults += [fault] if fault is not None else []
    return Found(tuple(chosen(faults, first, [], evidence)), tuple(fault.shown for fault in unreached))


def _may_have_another_optimizer(first: FirstDiff) -> bool:
    """Return True if a fault of the optimizer would be a different one than the first diff's."""
    if first.diff is None or not first.diff.pair.complete:
        return False
    if first.stage == "update":
        return first.cause is not None and first.cause.proven
    # Weights of a later step are results of the optimizer.
    return first.stage != "weight" or first.step == 0


def _unreached(
    diff: Diff, place: Place, step: Sequence[Diff], evidence: Evidence, steps: Both[Step], graphs: Both[Graph]
) -> Iterator[Fault]:
    """Yield outputs that differ although they are not computed from any tensor that differs."""
    if not all(step_.trace.functions and step_.trace.calls for step_ in steps):
        return
    infos = evidence.runs.map(lambda run: run.info)
    outputs = list(leaves(step, infos))
    like = diff if diff.pair.stage == "forward" else next(iter(outputs), None)
    if like is None:
        return
    flow = Flow(steps, infos, graphs, Relations(like, graphs, evidence.policy))
    agreed = agreeing(step, graphs)
    flow.add(diff, place, agreed)
    looked_at = 0
    for output in outputs:
        if looked_at >= _LOOKED_AT or flow.reaches(output):
            continue
        looked_at += 1
        first, where = described(output, step, evidence)
        flow.add(output, where, agreed)
        # The loop writes weights by gradients, which follow from the first diff.
        if where.inside is not None and (first.cause is None or first.cause.kind != BETWEEN_CALLS):
            inside = where.diff if where.diff is not output else None
            yield Fault(output, first.cause, first.recomputed, inside, kind_of_place(first, evidence))


def _by_themselves(diff: Diff, later: Sequence[Diff], sides: Both[Recorded], scene: DiffContext) -> list[Fault]:
    """Return the faults of layers that compute something else from the same inputs, one of each kind."""
    faults = list(stage_faults.layer_faults(later, sides, scene))
    # The fault at the first diff, found in the same way.
    first_fault = next(stage_faults.layer_faults([diff], sides, scene), None)
    if first_fault is not None and first_fault.cause is not None:
        kind = first_fault.cause.kind
        faults = [fault for fault in faults if fault.cause is None or fault.cause.kind != kind]
    if len(faults) > _FEW:
        faults = [fault for fault in faults if fault.cause is not None and fault.cause.proven]
    return _one_of_each(faults)


def _one_of_each(faults: Sequence[Fault]) -> list[Fault]:
    """Return the first fault of each kind, as a fault in the code shows at every call; empty for too many kinds."""
    kinds: dict[str, Fault] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, fault)
    return list(kinds.values()) if len(kinds) <= _KINDS else []


def chosen(
    found: Sequence[Fault], first: FirstDiff, others: Sequence[FirstDiff], evidence: Evidence
) -> Iterator[Fault]:
    """Yield the faults that differ from the first diff's and from each other.

    Args:
        found: the faults to choose from.
        first: the first diff.
        others: the further faults found so far.
        evidence: the input of the search for causes.
    """
    accepted: list[tuple[FirstDiff | Fault, str]] = [
        (first_diff, kind_of_place(first_diff, evidence)) for first_diff in (first, *others)
    ]
    for fault in found:
        if len(accepted) > _REPORTED:
            return
        if not any(are_one(fault, fault.kind, earlier, of) for earlier, of in accepted):
            accepted.append((fault, fault.kind))
            yield fault


def described_alone(fault: Fault, step: Sequence[Diff], evidence: Evidence) -> FirstDiff:
    """Return a fault as a first diff with its cause, without an extent."""
    first, _ = described(fault.shown, step, replace(evidence, steps=None), compute=False)
    return replace(
        first,
        diff=fault.diff,
        slot=fault.diff.pair.anchor.slot,
        cause=fault.cause,
        recomputed=fault.recomputed,
        standing=Standing.NEW,
        extent=None,
    )


# The most weights that are checked in each step, and the most elements of each; the largest error of an unchanged
# weight and the smallest error of a weight that was written to, in units of rounding. Chosen.
_WEIGHTS, _ELEMENTS = 4, 512
_NEAR, _FAR = 8.0, 100.0
# The most hypotheses on the code that wrote to the weights.
_TRIED = 20
# The most steps after the first diff whose weights are checked, as each step's records have to be paired again.
_STEPS = 16


class Later:
    """Search for faults in the steps after the first diff.

    Args:
        first: the first diff.
        runs: the reference and the candidate run.
    """

    def __init__(self, first: FirstDiff, runs: Both[Run]) -> None:
        self._first, self._runs = first, runs
        self._steps = 0
        # Names of the checks that are done: a fault is reported once.
        self._seen: set[str] = {"input"} if first.stage == "input" else set()
        if first.diff is not None and not first.diff.pair.complete:
            self._seen.add("stepped")
        if first.stage == "weight" and first.step:
            self._seen.add("written")
        if first.cause is not None and first.cause.kind == "never_stepped":
            self._seen |= {"input", "stepped", "written"}  # where its steps end is not where the other side's do

    def faults(self, diffs: StepDiffs, alignment: Alignment) -> Iterator[Fault]:
        """Yield the faults of a step.

        Args:
            diffs: the judged diffs of the step, of one rank.
            alignment: the pairs of layers and parameters.
        """
        self._steps += 1
        if self._steps > _STEPS:
            self._seen.add("written")
        if self._seen >= {"input", "stepped", "written"}:
            return
        for name, find in (("input", self._input), ("stepped", self._stepped), ("written", self._written)):
            if name in self._seen:
                continue
            try:
                with np.errstate(all="ignore"):
                    fault = find(diffs, alignment)
            except (PadiffError, OSError, KeyError, ValueError, IndexError):
                continue  # the values can no longer be read
            if fault is not None:
                self._seen.add(name)
                yield fault

    def _scene(self, diff: Diff, diffs: Sequence[Diff], alignment: Alignment) -> DiffContext:
        return scene_of(diff, diffs, alignment, self._runs)

    def _input(self, diffs: StepDiffs, alignment: Alignment) -> Fault | None:
        """Return a fault if the candidate's batch is another batch of the reference's; else `None`.

        A model may compute its own inputs, so an unknown batch is no fault.
        """
        diff = next((d for d in diffs.failing(["input"]) if not d.pair.derived), None)
        if diff is None:
            return None
        self._seen.add("input")
        cause = shift_cause(diff, self._runs) or explain(self._scene(diff, diffs, alignment)).cause
        return Fault(diff, cause, kind="input") if cause is not None and cause.proven else None

    def _stepped(self, diffs: StepDiffs, alignment: Alignment) -> Fault | None:
        """Return a fault if an optimizer left out a step or repeated it; else `None`."""
        unpaired = diffs.failing(["grad", "update"], complete=False)
        diff = next((d for d in unpaired if d.pair.anchor.layer != LOOP), None)
        if diff is None:
            return None
        self._seen.add("stepped")
        scene = self._scene(diff, diffs, alignment)
        cause = missing_gradient.interval_cause(scene) or next(missing_gradient.missing_causes(scene), None)
        if (
            cause is None
            or not cause.proven
            or cause.kind not in ("step_skipped", "gradients_cleared", "step_repeated")
        ):
            return None
        return Fault(diff, cause, kind="update")

    def _written(self, diffs: StepDiffs, alignment: Alignment) -> Fault | None:
        """Return a fault if a weight differs from the weight of the step before plus its update, on one side only;
        else `None`.
        """
        weights = [*diffs.failing(["weight"])]
        if not weights:
            return None
        largest = sorted(weights, key=lambda d: -float(np.prod(d.pair.anchor.shape)))[:_WEIGHTS]
        scene = self._scene(weights[0], diffs, alignment)
        sides = scene.sides(scene.number - 1) if scene.number - 1 in scene.numbers else None
        if sides is None or any(_steps(step) != 1 for step in sides):
            return None  # skipped and repeated optimizer steps are reported by themselves
        measured: list[tuple[Diff, Both[float], Both[float]]] = []
        for diff in largest:
            errors = _beside_its_update(scene, diff, place_of(diff.pair))
            if errors is not None:
                measured.append((diff, *errors))
        if not measured:
            return None
        for side, other_side in (tuple(SIDES.swapped()), tuple(SIDES)):
            alone = [entry for entry in measured if getattr(entry[1], side) > _FAR]
            if alone and all(getattr(entry[1], other_side) <= _NEAR for entry in measured):
                diff, _, shares = alone[0]
                cause = _what_wrote(replace(scene, diff=diff))
                return Fault(diff, cause, Recomputed("weight", Both("", ""), shares, side), kind="weight")
        return None


def _steps(step: Step) -> int:
    """Return the number of optimizer steps in a step."""
    return len({record.call for record in step.records if record.stage == "update" and record.layer != LOOP})


def _what_wrote(scene: DiffContext) -> Cause | None:
    """Return the cause of the changed weights if a hypothesis proves it; else `None`."""
    for hypothesis in islice(unowned_weights.write_hypotheses(scene), _TRIED):
        if explains(weigh(hypothesis.predict()), hypothesis):
            return Cause(hypothesis.kind, hypothesis.sentence, True, fix=hypothesis.fix_line)
    return None


def _beside_its_update(scene: DiffContext, diff: Diff, at: PairPlace) -> tuple[Both[float], Both[float]] | None:
    """Return the error of each side's weight, compared with the weight before plus its update.

    Returns:
        The errors in units of rounding, and as shares of the weight's norm; `None` if they can't be computed.
    """
    before, added = (scene.pairs(scene.number - 1, stage).get(at) for stage in ("weight", "update"))
    if before is None or added is None:
        return None
    now, was, by = alike((diff.pair, before, added), _ELEMENTS)
    if now is None or was is None or by is None or not now.reference.shape == was.reference.shape == by.reference.shape:
        return None
    rounding = rounding_of(diff.pair)
    noise, share = [], []
    for values, start, update in ((getattr(now, s), getattr(was, s), getattr(by, s)) for s in SIDES):
        error = float(np.linalg.norm(values - start - update))
        size = float(np.linalg.norm(values))
        if not size or not rounding or not np.isfinite(error):
            return None
        noise.append(error / (size * rounding))
        share.append(error / size)
    return Both(*noise), Both(*share)


# Kinds of differences that are about the loop or the optimizer, not about the model.
_OF_THE_LOOP = ("optimizer_setting", "learning_rate", "clipping", "loss_setting")
# Families of causes, by the kind of difference with the same effect.
_ALIKE = {"clipping": "clip", "learning_rate": "learning", "loss_setting": "loss"}


def declared_besides(
    found: Sequence[tuple[int, Difference]], first: FirstDiff, others: Sequence[FirstDiff], began: int
) -> Iterator[FirstDiff]:
    """Yield differences of settings that change the result and are independent of the first diff; one for each kind.

    Args:
        found: the differences, each with the number of the first step that shows it.
        first: the first diff, of a tensor.
        others: the further faults found so far.
        began: the number of the first compared step.
    """
    if first.diff is None or not _is_known(first, began):
        return
    known_families = frozenset[str]().union(*(families(difference.cause) for difference in (first, *others)))
    stages = {difference.stage for difference in others}
    reported: dict[str, list[tuple[int, Difference]]] = {}
    for number, difference in found:
        alike = _ALIKE.get(difference.kind, difference.kind.partition("_")[0])
        if (
            not difference.changes
            or alike in known_families
            or cause_in_settings(first.diff.pair, [difference]) is not None
        ):
            continue
        # A stage that has a reported fault is left out: the setting may be its cause.
        later = STAGES.index(difference.stage) >= STAGES.index(first.stage)
        if difference.kind in _OF_THE_LOOP and later and difference.stage not in stages:
            reported.setdefault(difference.kind, []).append((number, difference))
    for of_kind in reported.values():
        number, difference = of_kind[0]
        yield FirstDiff(
            number,
            difference.stage,
            difference.place.reference,
            difference.place.candidate,
            slot=difference.name,
            cause=cause_of([d for _, d in of_kind]),
            parameters=difference.parameters,
            standing=Standing.NEW,
        )


def _is_known(first: FirstDiff, began: int) -> bool:
    """Return True if no setting can cause the first diff: it is in the first compared step, or explained by itself."""
    if first.stage == "weight" and first.step != began:
        return False
    return first.step == began or first.recomputed is not None or (first.cause is not None and first.cause.proven)


class FollowupContext:
    """Further faults, and the relation of each diff to the first one.

    Args:
        first: the first diff, as it is reported.
        diff: the diff itself.
        place: where in the code the diff comes from.
        step: the diffs of its step.
        evidence: the input of the search for causes.
        began: the number of the first compared step; `None` if no step was compared.
    """

    def __init__(
        self, first: FirstDiff, diff: Diff, place: Place, step: Sequence[Diff], evidence: Evidence, began: int | None
    ) -> None:
        self._first, self._mark, self._later = first, mark_of(diff), Later(first, evidence.runs)
        self._evidence = replace(evidence, steps=None)  # the steps of the first diff are of no use in later steps
        self._began = first.step if began is None else began
        self._marks: dict[Mark, Standing] = {}
        self._faults: list[tuple[FirstDiff, Diff]] = []
        scene = scene_of(diff, step, evidence.alignment, evidence.runs)
        try:
            findings = faults_of_step(first, diff, place, scene, evidence, first.step == self._began)
        except Exception:
            findings = Found()  # an error here must not hide the first diff, so it only means no further faults
        self._marks.update((mark_of(d), Standing.AGAIN) for d in findings.again)
        for fault in findings.faults:
            self._add(fault, step, evidence)
        self._marks[self._mark] = Standing.FIRST

    def _add(self, fault: Fault, step: Sequence[Diff], evidence: Evidence) -> None:
        self._faults.append((described_alone(fault, step, evidence), fault.diff))
        self._marks[mark_of(fault.shown)] = Standing.NEW

    def search(self, diffs: StepDiffs, alignment: Alignment) -> None:
        """Search a later step for further faults.

        Args:
            diffs: the judged diffs of the step, of its first process with diffs.
            alignment: the pairs of layers and parameters.
        """
        if diffs[0].pair.step <= self._first.step:
            return
        evidence = replace(self._evidence, alignment=alignment)
        earlier = [first_diff for first_diff, _ in self._faults]
        try:
            faults = list(chosen(list(self._later.faults(diffs, alignment)), self._first, earlier, evidence))
        except Exception:
            faults = []  # an error here must not end the comparison
        for fault in faults:
            self._add(fault, diffs, evidence)

    def placed(self, found: FirstDiff, diff: Diff) -> FirstDiff:
        """Return the first diff of a later step, marked as a fault by itself or as a consequence.

        Args:
            found: the first diff of the step, as it is reported.
            diff: the diff itself.
        """
        mark = mark_of(diff)
        alone = next((fault for fault, shown in self._faults if mark_of(shown) == mark), None)
        return alone or replace(found, standing=self._marks.get(mark, Standing.FOLLOWS))

    def aftermath(self, first: FirstDiff | None, tensor: FirstDiff | None) -> Aftermath:
        """Return the relation of each diff to the first one.

        Args:
            first: the first difference between the runs: a tensor or a setting.
            tensor: the first tensor that differs, possibly because of that setting.
        """
        if first is None or first is tensor:
            return Aftermath(self._marks)
        standing = Standing.NEW if self._is_alone(first, tensor) else Standing.FOLLOWS
        return Aftermath({**self._marks, self._mark: standing})

    def independent(
        self,
        first: FirstDiff | None,
        tensor: FirstDiff | None,
        differ: Sequence[tuple[int, Difference]],
        steps: Collection[int],
        asked: Callable[[Pair], bool],
    ) -> tuple[FirstDiff, ...]:
        """Return further faults that show in some steps, in causal order.

        Args:
            first, tensor: as for `aftermath`.
            differ: the settings that differ in these steps, with the step numbers.
            steps: the numbers of the steps.
            asked: returns True for a pair that is reported.
        """
        if first is None:
            return ()
        faults = [
            fault for fault, shown in self._faults if fault.step in steps and asked(shown.pair) and fault is not first
        ]
        if first is not tensor and tensor is not None and self._is_alone(first, tensor):
            faults.append(replace(tensor, standing=Standing.NEW, extent=None))
        if first is tensor and first.standing is Standing.FIRST:
            faults += declared_besides(differ, first, faults, self._began)
        return tuple(sorted(faults, key=lambda one: (one.step, STAGES.index(one.stage))))

    @staticmethod
    def _is_alone(first: FirstDiff, tensor: FirstDiff | None) -> bool:
        """Return True if a tensor differs because its layer or loss is wrong, and not because of a setting."""
        if tensor is None or tensor.recomputed is None or not tensor.recomputed.wrong:
            return False
        return tensor.recomputed.what in ("layer", "loss") and first.stage in ("grad", "update")
