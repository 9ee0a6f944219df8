"""Layers with the same content that end at different places: their outputs differ though all later outputs agree.

One library puts the activation into its block or its normalisation, another one calls the activation outside. Both
compute the same, but the two layers' outputs are not the same quantity. The evidence is that later outputs agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from padiff.align import Alignment, LayerPair
from padiff.align.matching.parameter_units import containers_of
from padiff.compare.choices import reached
from padiff.compare.judge.limits import COARSENESS, allowed, coarse
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import RunFolderError
from padiff.model import equivalents
from padiff.records import RESHAPED, ROOT, SAME, Both, Diff, Figure, Kind, Layer, Pair, Step
from padiff.records.step_diffs import StepDiffs

# Least relative error that a different boundary explains, of a container's outputs and of other outputs. A missing
# activation changes a tensor by far more than the first share, unless a normalisation leaves few negative values.
_GROSS, _VISIBLE = 0.05, 1e-3


def other_boundaries(
    diffs: StepDiffs, alignment: Alignment, values: bool = True, steps: Both[Step] | None = None
) -> frozenset[tuple[str, str]]:
    """Return pairs of layers, by path, whose outputs differ although later outputs agree.

    Only layers that are built differently are candidates: their sublayers differ, or the models have different numbers
    of their kind. The model itself and pairs from the user's layer map are never candidates. Outputs that differ by
    little, or right before the first other diff, are not returned.

    Args:
        values: True to also consider outputs that have the same shape on both sides.
        steps: the compared step; its traces show what is computed inside of a layer with several outputs.
    """
    places = diffs.sites.places["forward"]
    if (diffs.rows["passed"] & ~diffs.troubled)[places].all():
        return frozenset()
    built = _Built(alignment)
    forward = [d for d in (diffs[place] for place in places.tolist()) if d.compared]
    doubtful = {_paths(d) for d in forward if _has_other_shape(d)}  # also if choices excuse the difference
    if values:
        doubtful |= {_pair_paths(p) for p in alignment.pairs if built.differently(p)}
    doubtful -= {_pair_paths(p) for p in alignment.pairs if _is_fixed(p)}
    sure = [d for d in forward if _paths(d) not in doubtful]
    # A smaller error comes from a fault or from rounding, not from a different boundary.
    containers = {_pair_paths(p) for p in alignment.pairs if p.reference.children}
    wide = [
        d
        for d in forward
        if (not d.passed or _has_other_shape(d)) and _paths(d) in doubtful
        if _error(d) >= (_GROSS if _paths(d) in containers else _VISIBLE)
    ]
    first = min((_order(d) for d in sure if not d.passed and _error(d) >= _VISIBLE / 2), default=math.inf)
    agreeing = [d for d in sure if _agrees(d) and _order(d) < first]
    last = max(map(_order, agreeing), default=-1)
    # Two kinds of layer that give other shapes compute other quantities: a bag of embeddings, and embeddings.
    kinds = {_pair_paths(p) for p in alignment.pairs if len({*p.map(equivalents.kind)}) > 1}
    other_kinds = [d for d in wide if _has_other_shape(d) and _paths(d) in kinds]
    further = _ending_inside([d for d in wide if _order(d) >= last], steps) if steps is not None and values else []
    earlier = [d for d in wide if _order(d) < last and _leads_to(d, agreeing, sure, steps)]
    return frozenset(_paths(d) for d in [*earlier, *further, *other_kinds])


def _leads_to(diff: Diff, agreeing: Sequence[Diff], later: Sequence[Diff], steps: Both[Step] | None) -> bool:
    """Return False if the reference's trace shows that no agreeing output depends on this one.

    Args:
        diff: the diff of an output.
        agreeing: the outputs that agree.
        later: all outputs that show if layers after it agree.
        steps: the step; `None` if there are no traces.
    """
    trace = steps.reference.trace if steps is not None else None
    if trace is None or not trace.functions:
        return True
    positions = {(call.layer, call.call): k for k, call in enumerate(trace.calls) if not call.function}
    if not all(_site(each) in positions for each in (diff, *later)):
        return True
    later = [each for each in later if _order(each) > _order(diff)]
    for by_value in (True, False):
        after = reached(trace, {positions[_site(diff)]}, by_value)
        depending = [
            each
            for each in later
            if any(operand.tensor in after for operand in trace.calls[positions[_site(each)]].outputs)
        ]
        if depending:
            return any(each is other for each in depending for other in agreeing)
    return False


def _site(diff: Diff) -> tuple[str, int]:
    return ("", 0) if diff.pair.reference is None else (diff.pair.reference.layer, diff.pair.reference.call)


def _ending_inside(diffs: Sequence[Diff], steps: Both[Step]) -> list[Diff]:
    """Return the diffs of outputs that the other side's layer computes on its way to outputs of its own.

    One side's router returns scores, the other's the chosen places and their weights, too.
    """
    try:
        calls = steps.map(lambda step: step.trace.calls)
        outputs = calls.map(lambda side: {(c.layer, c.call): len(c.outputs) for c in side if not c.function})
        return [diff for diff in diffs if _several(diff, outputs) and _is_computed_inside(diff, steps)]
    except RunFolderError:
        return []  # a trace is damaged; the figures stay valid


def _several(diff: Diff, outputs: Both[dict[tuple[str, int], int]]) -> bool:
    counts = [
        side.get((record.layer, record.call), 1) for side, record in zip(outputs, diff.pair.sides) if record is not None
    ]
    return counts[0] != counts[-1]


def _is_computed_inside(diff: Diff, steps: Both[Step]) -> bool:
    reference, candidate = diff.pair.reference, diff.pair.candidate
    assert reference is not None and candidate is not None
    for record, other, step in ((reference, candidate, steps.candidate), (candidate, reference, steps.reference)):
        for call in step.trace.calls:
            if (call.layer, call.call) != (other.layer, other.call):
                continue
            for tensor in (step.trace.tensors[operand.tensor] for operand in call.outputs):
                if tensor.source is None or math.prod(tensor.shape) != math.prod(record.shape):
                    continue
                inner = replace(other, source=tensor.source, shape=tensor.shape, dtype=tensor.dtype)
                layout = SAME if tensor.shape == record.shape else RESHAPED
                if _agrees(measure_pair(Pair(diff.pair.step, record, inner, layout)), tensor.dtype):
                    return True
    return False


def _has_other_shape(diff: Diff) -> bool:
    return diff.problem is not None and diff.problem.kind is Kind.SHAPES


def _error(diff: Diff) -> float:
    if diff.problem or diff.figures is None:
        return math.inf
    return diff.figures.rel_l2 if diff.figures.l2 else 0.0


def _agrees(diff: Diff, dtype: str = "") -> bool:
    """Return True if an output differs by no more than a dtype rounds. Default: its own.

    Rows that chose otherwise do not count if the others agree to far better than the coarse dtypes round.
    """
    judged = diff.judgement
    if judged is not None and diff.passed and judged.figure is Figure.OTHER_ROWS and judged.value < _VISIBLE / 2:
        return True
    dtype = coarse(dtype or diff.pair.anchor.dtype)
    rounding = allowed(dtype, "forward") if dtype in COARSENESS else 0.0
    return _error(diff) < max(_VISIBLE / 2, rounding)


class _Built:
    """Test for pairs of layers that are built differently although they hold the same parameters."""

    def __init__(self, alignment: Alignment) -> None:
        layers = alignment.layers.map(lambda side: sorted(side, key=lambda layer: layer.path))
        self._kinds = layers.map(lambda side: Counter(equivalents.kind(x) for x in side if _is_plain(x)))
        self._inside = layers.map(_leaves_inside)

    def differently(self, pair: LayerPair) -> bool:
        if any(layer.children for layer in pair):
            inside = self._inside.zip(pair).map(lambda side: side[0].get(side[1].path))
            built: Both[object] = inside.zip(pair).map(lambda side: (side[0], _is_own_class(side[1])))
        elif _is_plain(pair.reference):
            kinds = pair.map(equivalents.kind)
            built = self._kinds.zip(kinds).map(lambda side: (side[1], side[0][side[1]]))
        else:
            # A layer of the user's own class may contain what the other side calls after it: a normalisation the
            # activation, a router softmax and choice.
            built = pair.map(lambda layer: (equivalents.kind(layer), _is_own_class(layer), layer.settings.get("act")))
        return built.reference != built.candidate


def _leaves_inside(layers: Sequence[Layer]) -> dict[str, Counter[str]]:
    """Count the kinds of the leaf layers inside each container."""
    inside: dict[str, Counter[str]] = {}
    for layer in layers:
        if layer.children:
            continue
        for above in containers_of(layer.path):
            inside.setdefault(above, Counter())[equivalents.kind(layer)] += 1
    return inside


def _is_plain(layer: Layer) -> bool:
    return not layer.parameters and not layer.children


def _is_own_class(layer: Layer) -> bool:
    return layer.type.lower() != layer.kind


def _is_fixed(pair: LayerPair) -> bool:
    return pair.reason == "given" or ROOT in _pair_paths(pair)


def _pair_paths(pair: LayerPair) -> tuple[str, str]:
    return pair.reference.path, pair.candidate.path


def _paths(diff: Diff) -> tuple[str, str]:
    reference, candidate = diff.pair.reference, diff.pair.candidate
    return (reference.layer if reference else "", candidate.layer if candidate else "")


def _order(diff: Diff) -> int:
    return diff.pair.anchor.order
