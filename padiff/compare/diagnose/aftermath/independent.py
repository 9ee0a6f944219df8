"""Faults besides the first diff in its step: what does not follow from it, as far as that is sure.

A false second fault costs more than one that is not reported: in doubt everything follows from the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from padiff.compare.diagnose.aftermath import gradients, layers, losses, updates
from padiff.compare.diagnose.aftermath.fault import Fault
from padiff.compare.diagnose.aftermath.flow import Flow, leaves
from padiff.compare.diagnose.aftermath.same import are_one, kind_of_place
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.first import described
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.place import Place, agreeing, graphs_of
from padiff.compare.diagnose.recompute.recorded import Recorded, recorded
from padiff.compare.diagnose.traced import Graph, Relations
from padiff.records import Both, Diff, FirstDiff, Standing, Step

# Places that are looked at for coming from nothing that differs; further faults that are reported; kinds of layers that
# may be at fault, each by itself: beyond, it is something that all of the computation goes through.
_LOOKED_AT, _REPORTED, _KINDS = 12, 3, 2
# Layers that may be at fault where it is not proven why.
_FEW = 2


@dataclass(frozen=True)
class Found:
    """What was found in the first diff's step.

    Attributes:
        faults: further faults.
        again: diffs that do not follow from the first, and may be the same fault.
    """

    faults: tuple[Fault, ...] = ()
    again: tuple[Diff, ...] = ()


def faults_of_step(first: FirstDiff, diff: Diff, place: Place, scene: Scene, evidence: Evidence, began: bool) -> Found:
    """Further faults in the first diff's step.

    Args:
        first: the first diff, as it is reported.
        diff: it itself.
        place: where in the code it comes from.
        scene: what hypotheses look at; of its step's diffs those of the first one's rank.
        evidence: what is known besides.
        began: whether its step is the first that was compared.
    """
    # What shows in a later step may have been wrong before by less than was allowed, unless it is explained by itself.
    by_itself = began or first.recomputed is not None or (first.cause is not None and first.cause.proven)
    found: list[Fault] = []
    unreached: list[Fault] = []
    if evidence.steps is not None and first.stage in ("input", "weight", "forward"):
        infos = evidence.runs.map(lambda run: run.info)
        graphs = place.graphs or graphs_of(evidence.steps, infos)
        sides = recorded(evidence.steps, infos, graphs)
        later = [other for other in scene.step if other is not diff]
        unreached = list(_unreached(diff, place, later, evidence, evidence.steps, graphs))
        found += _one_of_each(unreached)
        if by_itself:
            found += _by_themselves(diff, later, sides, scene)
            found += [one for one in (losses.own_fault(scene), gradients.own_fault(scene, sides)) if one is not None]
    if by_itself and _may_have_another_optimizer(first):
        among = updates.unexplained(scene) if first.stage == "update" else None
        if among is None or among:
            fault = updates.own_fault(scene, among)
            found += [fault] if fault is not None else []
    return Found(tuple(chosen(found, first, [], evidence)), tuple(fault.shown for fault in unreached))


def _may_have_another_optimizer(first: FirstDiff) -> bool:
    """Whether a fault of the optimizer would be another one than the first."""
    if first.diff is None or not first.diff.pair.complete:
        return False
    if first.stage == "update":
        return first.cause is not None and first.cause.proven
    # Weights of a later step are what the optimizer made of them.
    return first.stage != "weight" or first.step == 0


def _unreached(
    diff: Diff, place: Place, step: Sequence[Diff], evidence: Evidence, steps: Both[Step], graphs: Both[Graph]
) -> Iterator[Fault]:
    """Outputs that differ though nothing that differs is among what they are made of."""
    if not all(one.trace.functions and one.trace.calls for one in steps):
        return
    infos = evidence.runs.map(lambda run: run.info)
    some = list(leaves(step, infos))
    like = diff if diff.pair.stage == "forward" else next(iter(some), None)
    if like is None:
        return
    flow = Flow(steps, infos, graphs, Relations(like, graphs, evidence.policy))
    agreed = agreeing(step, graphs)
    flow.add(diff, place, agreed)
    looked_at = 0
    for other in some:
        if looked_at >= _LOOKED_AT or flow.reaches(other):
            continue
        looked_at += 1
        found, where = described(other, step, evidence)
        flow.add(other, where, agreed)
        if where.inside is not None:
            inside = where.diff if where.diff is not other else None
            yield Fault(other, found.cause, found.recomputed, inside, kind_of_place(found, evidence))


def _by_themselves(diff: Diff, later: Sequence[Diff], sides: Both[Recorded], scene: Scene) -> list[Fault]:
    """Layers that depart from what they are whatever goes in, one of each kind."""
    found = list(layers.own_faults(later, sides, scene))
    # What is wrong at the first diff, said in the same way.
    own = next(layers.own_faults([diff], sides, scene), None)
    if own is not None and own.cause is not None:
        kind = own.cause.kind
        found = [one for one in found if one.cause is None or one.cause.kind != kind]
    if len(found) > _FEW:
        found = [one for one in found if one.cause is not None and one.cause.proven]
    return _one_of_each(found)


def _one_of_each(faults: Sequence[Fault]) -> list[Fault]:
    """Of several faults of one kind the first: one fault in the code shows wherever that is called."""
    kinds: dict[str, Fault] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, fault)
    return list(kinds.values()) if len(kinds) <= _KINDS else []


def chosen(
    found: Sequence[Fault], first: FirstDiff, others: Sequence[FirstDiff], evidence: Evidence
) -> Iterator[Fault]:
    """The faults that are others than the first one, and than each other.

    Args:
        others: further faults that are known.
    """
    known: list[tuple[FirstDiff | Fault, str]] = [(one, kind_of_place(one, evidence)) for one in (first, *others)]
    for fault in found:
        if len(known) > _REPORTED:
            return
        if not any(are_one(fault, fault.kind, other, of) for other, of in known):
            known.append((fault, fault.kind))
            yield fault


def described_alone(fault: Fault, step: Sequence[Diff], evidence: Evidence) -> FirstDiff:
    """A fault, described as a diff is."""
    found, _ = described(fault.shown, step, replace(evidence, steps=None), compute=False)
    return replace(
        found,
        diff=fault.diff,
        slot=fault.diff.pair.anchor.slot,
        cause=fault.cause,
        recomputed=fault.recomputed,
        standing=Standing.NEW,
        extent=None,
    )
