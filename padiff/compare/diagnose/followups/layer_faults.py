"""Layers that compute something else than the reference's layer from the candidate's own inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.followups.fault import Fault
from padiff.compare.diagnose.followups.flow import leaves
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, whole_of
from padiff.compare.diagnose.hypotheses.engine import explain
from padiff.compare.diagnose.recompute.partial_outputs import Part
from padiff.compare.diagnose.recompute.recorded import Recorded, off_by, rounding
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import SIDES, Both, Cause, Diff, InMemory, Pair, Recomputed, Record

# The most layers that are checked.
_MOST = 200
# The smallest error of a faulty layer, as a multiple of the limit for rounding. Chosen.
_FAR = 10.0


def own_faults(diffs: Sequence[Diff], sides: Both[Recorded], scene: DiffContext) -> Iterator[Fault]:
    """Yield the faults of layers that are wrong independently of their inputs.

    Args:
        diffs: the diffs to check.
        sides: the recorded tensors of either side.
        scene: the scene of the first diff.
    """
    weights = _weights(scene)
    infos = sides.map(lambda side: side.info)
    for diff in list(leaves(diffs, infos))[:_MOST]:
        try:
            with np.errstate(all="ignore"):
                fault = _own_fault(diff, sides, weights.get(diff.pair.anchor.layer, {}), scene)
        except (PadiffError, OSError, KeyError, ValueError, IndexError):
            continue  # the values can no longer be read
        if fault is not None:
            yield fault


def _own_fault(diff: Diff, sides: Both[Recorded], weights: dict[str, Pair], scene: DiffContext) -> Fault | None:
    pair = diff.pair
    reference, candidate = pair.reference, pair.candidate
    if pair.layout or reference is None or candidate is None or reference.shape != candidate.shape:
        return None
    layer = sides.reference.layers[reference.layer]
    right = sides.reference.part(reference)
    if right is None:
        return None
    near = off_by(right, reference)
    limit = max(rounding(sides.reference.dtype(reference)), rounding(sides.candidate.dtype(candidate)))
    if near is None or near > limit:
        return None  # the reference's recorded output does not fit its own layer, so it can't serve as a rule
    candidate_input = sides.candidate.given(candidate)
    expected = sides.reference.tensor_given(reference)
    if candidate_input is None or expected is None or candidate_input.shape != expected.shape:
        return None
    candidate_weights = {}
    for parameter in layer.parameters:
        if parameter.slot in equivalents.ONE_SIDED:
            continue
        values = whole_of(weights[parameter.slot]) if parameter.slot in weights else None
        if values is None:
            return None
        candidate_weights[parameter.slot] = values.candidate
    part = sides.reference.part(reference, candidate_input, candidate_weights)
    far = None if part is None else off_by(part, candidate)
    if part is None or far is None or far <= _FAR * limit:
        return None
    candidate_layer = sides.candidate.layers[candidate.layer]
    rules = Both(
        layer.type, candidate_layer.type if equivalents.kind(candidate_layer) == equivalents.kind(layer) else ""
    )
    recomputed = Recomputed("layer", rules, Both(near, far), SIDES.candidate)
    cause = _cause(diff, part, candidate_input, scene, list(weights.values()))
    return Fault(diff, cause, recomputed, kind=equivalents.kind(layer))


def _weights(scene: DiffContext) -> dict[str, dict[str, Pair]]:
    """Return the pairs of the step's weights, by layer and slot of the reference."""
    weights: dict[str, dict[str, Pair]] = {}
    for (layer, slot, _), pair in scene.pairs(scene.number, "weight").items():
        weights.setdefault(layer, {})[slot] = pair
    return weights


def _cause(diff: Diff, part: Part, fed_values: np.ndarray, scene: DiffContext, weights: Sequence[Pair]) -> Cause | None:
    """Return the cause of a layer's fault; `None` if no hypothesis explains the fault.

    The layer's output is compared with the output of the reference's layer, computed from the same input.
    """
    pair = diff.pair
    reference, candidate = pair.reference, pair.candidate
    assert reference is not None and candidate is not None
    computed = part.values if part.of is None else part.of(part.pick(candidate.value))
    if computed.size != math.prod(candidate.shape):
        return None  # only a part of the output was computed
    values = computed.reshape(candidate.shape).astype(np.float32)
    computed_pair = replace(pair, reference=_as(reference, values, candidate), candidate=candidate)
    measured = measure_pair(computed_pair)
    if measured.figures is None:
        return None
    alone = replace(measured, passed=False, judgement=diff.judgement)
    weighed = [replace(measure_pair(p), passed=True) for p in weights]
    fed = replace(candidate, stage="input", slot="input", order=pair.anchor.order - 1)
    fed = replace(
        fed, layer=reference.layer, source=InMemory(fed_values), shape=fed_values.shape, dtype=str(fed_values.dtype)
    )
    before = replace(measure_pair(Pair(pair.step, fed, fed)), passed=True)
    return explain(replace(scene, diff=alone, step=[before, *weighed, alone], _pairs={})).cause


def _as(record: Record, values: np.ndarray, like: Record) -> Record:
    return replace(record, source=InMemory(values), shape=like.shape, dtype="float32")
