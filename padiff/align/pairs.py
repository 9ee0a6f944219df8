"""Pairing the records of two steps, given which layers answer to each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from padiff import equivalents
from padiff.align.layers import Alignment, LayerPair
from padiff.align.packed import take_apart
from padiff.records import LOOP, PARAMETER_STAGES, STAGES, Layer, Pair, Record, Step, is_functional

_Index = dict[tuple[str, str], list[Record]]


def pair_steps(reference: Step, candidate: Step, alignment: Alignment) -> list[Pair]:
    """Pair two steps' records: every record of either side ends in exactly one pair, in causal order.

    Within two layers that answer to each other, records of one stage and call are paired by slot, and what is then
    left by position where the shapes agree (``output.logits`` and ``output.0``, ``input.x`` and ``input.input``).
    """
    left, right = _index(reference.records), _index(candidate.records)
    for layers in alignment.pairs:
        take_apart(layers, left, right)
    whole = (dict(left), dict(right))
    pairs: list[tuple[Record | None, Record | None, str]] = []
    for layers in alignment.pairs:
        pairs += _pair_layer(layers, left, right, whole)
    for stage in STAGES:
        ours, theirs = left.pop((LOOP, stage), []), right.pop((LOOP, stage), [])
        pairs += [(a, b, "") for a, b in _match(ours, theirs)]
    pairs += _pair_inputs(left, right)
    pairs += [(record, None, "") for records in left.values() for record in records]
    pairs += [(None, record, "") for records in right.values() for record in records]
    made = [Pair(reference.number, a, b, transform) for a, b, transform in pairs]
    scales = (reference.loss_scale, candidate.loss_scale)
    # Gradients of activations are those of the scaled loss; gradients of parameters are recorded unscaled.
    made = [replace(pair, scales=scales) if pair.stage == "backward" else pair for pair in made]
    return sorted(made, key=_causal_order(reference, candidate))


def _index(records: Iterable[Record]) -> _Index:
    index: _Index = defaultdict(list)
    for record in records:
        index[record.layer, record.stage].append(record)
    return index


def _pair_layer(
    layers: LayerPair, left: _Index, right: _Index, whole: tuple[_Index, _Index]
) -> list[tuple[Record | None, Record | None, str]]:
    pairs: list[tuple[Record | None, Record | None, str]] = []
    for stage in STAGES:
        ours = left.pop((layers.reference.path, stage), [])
        theirs = right.pop((layers.candidate.path, stage), [])
        if stage in PARAMETER_STAGES:
            for a, b in _match(ours, theirs, equivalents.slot):
                a, b = _tied(a, b, layers, whole)
                pairs.append((a, b, _transform(layers, a, b)))
        else:
            doubtful = _doubtful_calls(ours, theirs)
            pairs += [(record, None, "") for record in ours if _call_name(record) in doubtful]
            pairs += [(None, record, "") for record in theirs if _call_name(record) in doubtful]
            sure = [[r for r in side if _call_name(r) not in doubtful] for side in (ours, theirs)]
            pairs += [(a, b, "") for a, b in _match(sure[0], sure[1])]
    return pairs


def _doubtful_calls(ours: list[Record], theirs: list[Record]) -> set[str]:
    """Functional calls that a layer makes more often, or with other shapes, on one side: which answers to which?"""
    shapes = []
    for side in (ours, theirs):
        found: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for record in sorted(side, key=lambda record: record.call):
            found[_call_name(record)].append(record.shape)
        shapes.append(found)
    names = (shapes[0].keys() | shapes[1].keys()) - {""}
    return {name for name in names if shapes[0].get(name) != shapes[1].get(name)}


def _call_name(record: Record) -> str:
    return record.slot.partition("()")[0] if is_functional(record.slot) else ""


def _match(
    ours: list[Record], theirs: list[Record], name: Callable[[str], str] = str
) -> list[tuple[Record | None, Record | None]]:
    waiting = {(name(record.slot), record.call): record for record in theirs}
    pairs: list[tuple[Record | None, Record | None]] = []
    alone: list[Record] = []
    for record in ours:
        partner = waiting.pop((name(record.slot), record.call), None)
        if partner is not None:
            pairs.append((record, partner))
        else:
            alone.append(record)
    waiting = {key: record for key, record in waiting.items() if not is_functional(record.slot)}
    for record in alone:
        if is_functional(record.slot):
            pairs.append((record, None))  # of another name it is another computation
            continue
        # By position within the call, only where this leaves no choice: as many on either side.
        same_call = [other for other in waiting.values() if other.call == record.call]
        ours_left = [other for other in alone if other.call == record.call and not is_functional(other.slot)]
        position = next(k for k, other in enumerate(ours_left) if other is record)
        fits = len(same_call) == len(ours_left) and sorted(same_call[position].shape) == sorted(record.shape)
        pairs.append((record, same_call[position] if fits else None))
    used = {id(b) for _, b in pairs if b is not None}
    return pairs + [(None, record) for record in theirs if id(record) not in used]


def _tied(
    a: Record | None, b: Record | None, layers: LayerPair, whole: tuple[_Index, _Index]
) -> tuple[Record | None, Record | None]:
    """A parameter that is tied on one side only is compared with the tensor that it is tied to."""
    if a is None and b is not None:
        a = _tied_record(layers.reference, b, whole[0])
    elif b is None and a is not None:
        b = _tied_record(layers.candidate, a, whole[1])
    return a, b


def _tied_record(layer: Layer, record: Record, index: _Index) -> Record | None:
    for parameter in layer.parameters:
        if parameter.tied_to and equivalents.slot(parameter.slot) == equivalents.slot(record.slot):
            path, slot = parameter.tied_to.rsplit("/", 1)
            # Only looked at, not taken: its own pair still stands.
            for other in index.get((path, record.stage), []):
                if other.slot == slot and other.call == record.call:
                    return other
    return None


def _transform(layers: LayerPair, a: Record | None, b: Record | None) -> str:
    if a is None or b is None:
        return ""
    layouts = [_layout(layer, record) for layer, record in ((layers.reference, a), (layers.candidate, b))]
    return "transpose" if all(layouts) and layouts[0] != layouts[1] else ""


def _layout(layer: Layer, record: Record) -> str:
    return next((p.layout for p in layer.parameters if equivalents.slot(p.slot) == equivalents.slot(record.slot)), "")


def _pair_inputs(left: _Index, right: _Index) -> list[tuple[Record | None, Record | None, str]]:
    """Inputs of a step whose outermost layers answer to none: by position, where number and shapes agree."""
    ours = [record for (_, stage), records in left.items() if stage == "input" for record in records]
    theirs = [record for (_, stage), records in right.items() if stage == "input" for record in records]
    if not ours or [record.shape for record in ours] != [record.shape for record in theirs]:
        return []
    for index in (left, right):
        for key in [key for key in index if key[1] == "input"]:
            del index[key]
    return [(a, b, "") for a, b in zip(ours, theirs, strict=True)]


def _causal_order(reference: Step, candidate: Step) -> Callable[[Pair], tuple[int, int, int, int]]:
    """Key: stage; then the reference's order, parameters by when their layer first ran in forward."""
    ran: dict[str, int] = {}
    for record in reference.records:
        if record.stage == "forward":
            ran.setdefault(record.layer, record.order)
    stage_of = {stage: position for position, stage in enumerate(STAGES)}
    last = len(reference.records) + len(candidate.records)

    def key(pair: Pair) -> tuple[int, int, int, int]:
        stage = stage_of[pair.stage]
        if pair.reference is None:
            assert pair.candidate is not None
            return stage, 1, last, pair.candidate.order
        record = pair.reference
        first = ran.get(record.layer, last) if record.stage in PARAMETER_STAGES else 0
        # Step-wide scalars come after the layers that they may explain.
        return stage, 0, last + 1 if record.layer == LOOP else first, record.order

    return key
