"""Faults in the step of the first diff that certainly do not follow from the first diff.

A false second fault does more harm than a missing one: in doubt, every diff follows from the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.first import described
from padiff.compare.diagnose.followups import gradient_faults, layer_faults, loss_faults, update_faults
from padiff.compare.diagnose.followups.fault import Fault
from padiff.compare.diagnose.followups.flow import Flow, leaves
from padiff.compare.diagnose.followups.same_fault import are_one, kind_of_place
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.place import Place, agreeing, graphs_of
from padiff.compare.diagnose.recompute.recorded import Recorded, recorded
from padiff.compare.diagnose.traced import Graph, Relations
from padiff.records import Both, Diff, FirstDiff, Standing, Step

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
                for step_fault in (loss_faults.own_fault(scene), gradient_faults.own_fault(scene, sides))
                if step_fault is not None
            ]
    if by_itself and _may_have_another_optimizer(first):
        among = update_faults.unexplained(scene) if first.stage == "update" else None
        if among is None or among:
            fault = update_faults.own_fault(scene, among)
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
        if where.inside is not None:
            inside = where.diff if where.diff is not output else None
            yield Fault(output, first.cause, first.recomputed, inside, kind_of_place(first, evidence))


def _by_themselves(diff: Diff, later: Sequence[Diff], sides: Both[Recorded], scene: DiffContext) -> list[Fault]:
    """Return the faults of layers that compute something else from the same inputs, one of each kind."""
    faults = list(layer_faults.own_faults(later, sides, scene))
    # The fault at the first diff, found in the same way.
    first_fault = next(layer_faults.own_faults([diff], sides, scene), None)
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
