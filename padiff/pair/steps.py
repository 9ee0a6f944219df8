"""Pairing the records of two steps, given which layers answer to each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from padiff.align import Alignment, LayerPair, ParameterPair, Slice
from padiff.align.matching.parameter_units import inside
from padiff.model import equivalents
from padiff.pair.layouts import layout_between, square_layout
from padiff.pair.parameters import Found, Index, pair_parameters, pair_split_outputs
from padiff.records import (
    BROADCAST,
    LOOP,
    PARAMETER_STAGES,
    SAME,
    STAGES,
    Both,
    Layout,
    Pair,
    Record,
    Step,
    is_functional,
)


def pair_steps(reference: Step, candidate: Step, alignment: Alignment) -> list[Pair]:
    """Pair two steps' records: every record of either side ends in at least one pair, in causal order.

    Parameters are paired as the alignment says, by rows where one side holds several in one. Within two layers that
    answer to each other, other records of one stage and call are paired by slot, and what is then left by position
    where the shapes agree (``output.logits`` and ``output.0``, ``input.x`` and ``input.input``); a tensor in another
    layout gets the `Layout` that brings it into the reference's.
    """
    left, right = _index(reference.records), _index(candidate.records)
    apart = _apart(alignment)
    alike = [p for p in alignment.parameters if not any((k, part.layer) in apart for k, part in _parts(p))]
    pairs = pair_parameters(left, right, replace(alignment, parameters=tuple(alike)))
    for split in alignment.splits:
        pairs += pair_split_outputs(split, alignment.parameters, left, right)
    for layers in alignment.pairs:
        paths = layers.reference.path, layers.candidate.path
        pairs += _pair_layer(layers, left, right, paths not in alignment.cut_elsewhere)
    for stage in STAGES:
        ours, theirs = left.pop((LOOP, stage), []), right.pop((LOOP, stage), [])
        pairs += [(a, b, SAME) for a, b in _match(ours, theirs)]
    pairs += _pair_inputs(left, right)
    pairs += [(record, None, SAME) for records in left.values() for record in records]
    pairs += [(None, record, SAME) for records in right.values() for record in records]
    optional = _buffers(alignment)
    made = [
        Pair(reference.number, a, b, layout, optional=_lone(a, b) in optional or _lone(a, b)[:2] in apart)
        for a, b, layout in _with_layouts(pairs)
    ]
    scales = Both(reference.loss_scale, candidate.loss_scale)
    # Gradients of activations are those of the scaled loss; gradients of parameters are recorded unscaled.
    made = [replace(pair, scales=scales) if pair.stage == "backward" else pair for pair in made]
    return sorted(made, key=_causal_order(reference, candidate))


def _index(records: Iterable[Record]) -> Index:
    index: Index = defaultdict(list)
    for record in records:
        index[record.layer, record.stage].append(record)
    return index


def _pair_layer(layers: LayerPair, left: Index, right: Index, outputs: bool) -> Found:
    """Pair what the two layers themselves recorded; without ``outputs`` they end at other places, and stand alone."""
    pairs: Found = []
    for stage in STAGES:
        ours = left.pop((layers.reference.path, stage), [])
        theirs = right.pop((layers.candidate.path, stage), [])
        if stage in PARAMETER_STAGES:
            # What the trees declare is paired by the alignment; a record of anything else, by its slot.
            declared = [{p.slot for p in layer.parameters} for layer in (layers.reference, layers.candidate)]
            rest = [[r for r in side if r.slot not in known] for side, known in zip((ours, theirs), declared)]
            pairs += [(a, b, SAME) for a, b in _match(rest[0], rest[1], equivalents.slot)]
            ours = [r for r in ours if r.slot in declared[0]]
            theirs = [r for r in theirs if r.slot in declared[1]]
        if stage in PARAMETER_STAGES or not outputs:
            pairs += [(record, None, SAME) for record in ours] + [(None, record, SAME) for record in theirs]
            continue
        doubtful = _doubtful_calls(ours, theirs)
        pairs += [(record, None, SAME) for record in ours if _call_name(record) in doubtful]
        pairs += [(None, record, SAME) for record in theirs if _call_name(record) in doubtful]
        sure = [[r for r in side if _call_name(r) not in doubtful] for side in (ours, theirs)]
        pairs += [(a, b, _features(layers, a, b)) for a, b in _match(sure[0], sure[1])]
    return pairs


def _features(layers: LayerPair, a: Record | None, b: Record | None) -> Layout:
    """The layout between a convolution, whose features are the second axis, and a linear layer: there, the last.

    Their shapes need not tell, where all extents are equal.
    """
    if a is None or b is None or a.shape != b.shape or len(a.shape) < 3:
        return SAME
    groups = [equivalents.group_of_kinds(equivalents.kind(layer)) for layer in (layers.reference, layers.candidate)]
    axes = range(len(a.shape))
    if groups == ["conv", "linear"]:
        return Layout(((0, axes[-1], *axes[1:-1]),))
    if groups == ["linear", "conv"]:
        return Layout(((0, *axes[2:], 1),))
    return SAME


def _same_tensors(pairs: Found) -> Found:
    """The pairs, where a container gives out what a layer inside of it gave out, and its gradient, seen as that."""
    layouts: dict[object, Layout] = {}
    sites: dict[tuple[str, str, int], Layout] = {}
    for a, b, layout in pairs:
        if layout and a is not None and b is not None and a.stage == "forward":
            layouts[a.source.identity, b.source.identity] = layout
    found: Found = []
    for a, b, layout in pairs:
        if a is not None and b is not None and a.stage in ("forward", "backward") and a.shape == b.shape and not layout:
            site = a.layer, a.slot, a.call
            same = a.source.identity, b.source.identity
            layout = layouts.get(same, SAME) if a.stage == "forward" else sites.get(site, SAME)
            if layout and a.stage == "forward":
                sites[site] = layout
        found.append((a, b, layout))
    return found


def _with_layouts(pairs: Found) -> Found:
    """The pairs, each with the layout that brings the candidate's tensor into the reference's layout."""
    found: Found = []
    for a, b, layout in pairs:
        if a is not None and b is not None and a.stage not in PARAMETER_STAGES:
            layout = layout or layout_between(a.shape, b.shape)
        found.append((a, b, layout))
    found = _same_tensors(found)
    # A gradient of what is the same for all samples is their sum: no quantity of the other side.
    once = [pair for pair in found if pair[2] == BROADCAST and pair[0] is not None and pair[0].stage == "backward"]
    for pair in once:
        where = next(k for k, other in enumerate(found) if other is pair)
        found[where : where + 1] = [(pair[0], None, SAME), (None, pair[1], SAME)]
    # Where two swapped axes happen to be equally long the shape is no help: the run's other tensors tell.
    usual: dict[int, set[Layout]] = defaultdict(set)
    for a, b, layout in found:
        if a is None or b is None or a.stage != "forward" or len(a.shape) != len(b.shape):
            continue
        if a.shape != b.shape or (not layout and len(set(a.shape)) == len(a.shape)):
            usual[len(a.shape)].add(layout)
    for k, (a, b, layout) in enumerate(found):
        if a is not None and b is not None and not layout and a.stage not in PARAMETER_STAGES and a.shape == b.shape:
            layouts = usual[len(a.shape)]
            if len(layouts) == 1 and layouts != {SAME}:
                found[k] = (a, b, square_layout(a.shape, layouts))
    return found


def _buffers(alignment: Alignment) -> set[tuple[int, str, str]]:
    """Side, layer and slot of all buffers: what only one model keeps may be missing on the other."""
    return {
        (k, layer.path, p.slot)
        for k, layers in enumerate(alignment.layers)
        for layer in layers
        for p in layer.parameters
        if p.role == "buffer"
    }


def _apart(alignment: Alignment) -> set[tuple[int, str]]:
    """Side and path of the layers whose parameters are not compared: those at and below mapped layers that differ."""
    above = [{pair[k] for pair in alignment.differ_inside} for k in (0, 1)]
    if not any(above):
        return set()
    return {
        (k, layer.path)
        for k, layers in enumerate(alignment.layers)
        for layer in layers
        if any(layer.path == path or inside(layer.path, path) for path in above[k])
    }


def _parts(pair: ParameterPair) -> Iterator[tuple[int, Slice]]:
    """Each part with its side."""
    yield from ((0, part) for part in pair.reference)
    yield from ((1, part) for part in pair.candidate)


def _lone(a: Record | None, b: Record | None) -> tuple[int, str, str]:
    """The one record of a pair with a missing side, as `_buffers` names it; of a complete pair a name that none has."""
    record = a if a is not None else b
    if record is None or (a is not None and b is not None):
        return -1, "", ""
    return (0 if a is not None else 1, record.layer, record.slot)


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


def _pair_inputs(left: Index, right: Index) -> Found:
    """Inputs of a step whose outermost layers answer to none: by position, where number and shapes agree."""
    ours = [record for (_, stage), records in left.items() if stage == "input" for record in records]
    theirs = [record for (_, stage), records in right.items() if stage == "input" for record in records]
    if not ours or [record.shape for record in ours] != [record.shape for record in theirs]:
        return []
    for index in (left, right):
        for key in [key for key in index if key[1] == "input"]:
            del index[key]
    return [(a, b, SAME) for a, b in zip(ours, theirs, strict=True)]


def _causal_order(reference: Step, candidate: Step) -> Callable[[Pair], tuple[int, int, int, int, int]]:
    """Key: what the optimizers did before; stage; then the reference's order, parameters by when their layer first ran
    in forward.
    """
    ran: dict[str, int] = {}
    for record in reference.records:
        if record.stage == "forward":
            ran.setdefault(record.layer, record.order)
    stage_of = {stage: position for position, stage in enumerate(STAGES)}
    turns = _turns(reference), _turns(candidate)
    last = len(reference.records) + len(candidate.records)

    def key(pair: Pair) -> tuple[int, int, int, int, int]:
        stage = stage_of[pair.stage]
        if pair.reference is None:
            assert pair.candidate is not None
            return turns[1].get(pair.candidate.order, 0), stage, 1, last, pair.candidate.order
        record = pair.reference
        first = ran.get(record.layer, last) if record.stage in PARAMETER_STAGES else 0
        # Step-wide scalars come after the layers that they may explain.
        return turns[0].get(record.order, 0), stage, 0, last + 1 if record.layer == LOOP else first, record.order

    return key


def _turns(step: Step) -> dict[int, int]:
    """By order of the record, how often the layers ran again after an optimizer had stepped: a critic trained several
    times in one step, two optimizers in turn.
    """
    turns: dict[int, int] = {}
    turn, stepped = 0, False
    for record in sorted(step.records, key=lambda record: record.order):
        if record.stage == "update":
            stepped = True
        elif stepped and record.layer != LOOP and record.stage in ("input", "forward", "backward"):
            turn, stepped = turn + 1, False
        turns[record.order] = turn
    return turns
