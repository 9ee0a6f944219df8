"""Layers that compute otherwise than the reference's, given what goes into the candidate's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.aftermath.fault import Fault
from padiff.compare.diagnose.aftermath.flow import leaves
from padiff.compare.diagnose.hypotheses.engine import explain
from padiff.compare.diagnose.hypotheses.scene import Scene, whole_of
from padiff.compare.diagnose.recompute.parts import Part
from padiff.compare.diagnose.recompute.recorded import Recorded, off_by, rounding
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import SIDES, Both, Cause, Diff, InMemory, Pair, Recomputed, Record

# Layers that are looked at, at most.
_MOST = 200
# How many times what rounding explains a layer has to be off. Chosen.
_FAR = 10.0


def own_faults(diffs: Sequence[Diff], sides: Both[Recorded], scene: Scene) -> Iterator[Fault]:
    """Of the layers whose outputs differ, those that are wrong whatever goes in.

    Args:
        diffs: those that are looked at.
        scene: of the first diff.
    """
    weights = _weights(scene)
    infos = sides.map(lambda side: side.info)
    for diff in list(leaves(diffs, infos))[:_MOST]:
        try:
            with np.errstate(all="ignore"):
                found = _own_fault(diff, sides, weights.get(diff.pair.anchor.layer, {}), scene)
        except (PadiffError, OSError, KeyError, ValueError, IndexError):
            continue  # what would tell it is no longer there
        if found is not None:
            yield found


def _own_fault(diff: Diff, sides: Both[Recorded], weights: dict[str, Pair], scene: Scene) -> Fault | None:
    pair = diff.pair
    one, other = pair.reference, pair.candidate
    if pair.layout or one is None or other is None or one.shape != other.shape:
        return None
    layer = sides.reference.layers[one.layer]
    right = sides.reference.part(one)
    if right is None:
        return None
    near = off_by(right, one)
    limit = max(rounding(sides.reference.dtype(one)), rounding(sides.candidate.dtype(other)))
    if near is None or near > limit:
        return None  # the reference's own is not what it says, so nothing can be held against it
    given = sides.candidate.given(other)
    expected = sides.reference.tensor_given(one)
    if given is None or expected is None or given.shape != expected.shape:
        return None
    own = {}
    for parameter in layer.parameters:
        if parameter.slot in equivalents.ONE_SIDED:
            continue
        values = whole_of(weights[parameter.slot]) if parameter.slot in weights else None
        if values is None:
            return None
        own[parameter.slot] = values.candidate
    part = sides.reference.part(one, given, own)
    far = None if part is None else off_by(part, other)
    if part is None or far is None or far <= _FAR * limit:
        return None
    held = sides.candidate.layers[other.layer]
    rules = Both(layer.type, held.type if equivalents.kind(held) == equivalents.kind(layer) else "")
    recomputed = Recomputed("layer", rules, Both(near, far), SIDES.candidate)
    cause = _cause(diff, part, given, scene, list(weights.values()))
    return Fault(diff, cause, recomputed, kind=equivalents.kind(layer))


def _weights(scene: Scene) -> dict[str, dict[str, Pair]]:
    """The step's weights, by layer and slot of the reference."""
    found: dict[str, dict[str, Pair]] = {}
    for (layer, slot, _), pair in scene.pairs(scene.number, "weight").items():
        found.setdefault(layer, {})[slot] = pair
    return found


def _cause(diff: Diff, part: Part, given: np.ndarray, scene: Scene, weights: Sequence[Pair]) -> Cause | None:
    """Why, as computed against what the reference's layer makes of the candidate's own inputs."""
    pair = diff.pair
    one, other = pair.reference, pair.candidate
    assert one is not None and other is not None
    made = part.values if part.of is None else part.of(part.pick(other.value))
    if made.size != math.prod(other.shape):
        return None  # only a part of it was computed
    values = made.reshape(other.shape).astype(np.float32)
    own = replace(pair, reference=_as(one, values, other), candidate=other)
    measured = measure_pair(own)
    if measured.figures is None:
        return None
    alone = replace(measured, passed=False, judgement=diff.judgement)
    weighed = [replace(measure_pair(p), passed=True) for p in weights]
    fed = replace(other, stage="input", slot="input", order=pair.anchor.order - 1)
    fed = replace(fed, layer=one.layer, source=InMemory(given), shape=given.shape, dtype=str(given.dtype))
    before = replace(measure_pair(Pair(pair.step, fed, fed)), passed=True)
    return explain(replace(scene, diff=alone, step=[before, *weighed, alone], _pairs={})).cause


def _as(record: Record, values: np.ndarray, like: Record) -> Record:
    return replace(record, source=InMemory(values), shape=like.shape, dtype="float32")
