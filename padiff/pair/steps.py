"""Pairing of the records of two steps, given the paired layers, with those of loss functions by their roles."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from padiff.align import Alignment, LayerPair
from padiff.align.call_order import (
    CallOrder,
    InputSite,
    call_order,
    calls_differ,
    is_derived,
    order_within,
    outermost_calls,
)
from padiff.align.matching.parameter_units import inside
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.model import equivalents
from padiff.pair.joined_calls import (
    JoinedCalls,
    asked_output,
    inputs_agree,
    joined_calls,
    layout_between,
    relative_error,
    square_layout,
    with_equal_lengths,
    without_evaluations,
)
from padiff.pair.parameters import Index, RecordPair, Sum, alone, pair_parameters, pair_split_outputs, whole_layout
from padiff.records import (
    BROADCAST,
    LOOP,
    PARAMETER_STAGES,
    RESHAPED,
    SAME,
    STAGES,
    TRANSPOSED,
    UNSCALED,
    Both,
    Layout,
    Pair,
    Record,
    Step,
    SwappedRows,
    is_functional,
    is_of_loss,
    loss_role,
)
from padiff.records.sources import Shape

# Largest relative distance of two tensors of the same quantity, while the runs still agree. Chosen.
_ALIKE = 0.1
# Relative distance of the sum of gradients from the gradient that the other side has of all its losses.
_ADDED = 1e-2
#: Roles that distinguish one call from another: the labels in most losses, else the predictions.
_TELLING = ("labels", "target", "logits", "prediction", "log_probabilities", "probabilities", "scores", "first")
_INTEGERS = ("int", "uint", "bool")
_PREDICTIONS = _TELLING[2:]
_SEQUENCE_FIRST = Layout(((1, 0, 2),))
# Labels have the same meaning for all loss functions.
_LABELS = ("labels", "target")


@dataclass(frozen=True, eq=False)
class _Call:
    """Call of a loss function: its records by role; role ``0`` is the result."""

    function: str
    roles: Mapping[str, Record]


def pair_losses(records: Both[Sequence[Record]]) -> list[RecordPair]:
    """Pair the records of the loss functions of a step."""
    calls = records.map(_calls)
    pairs: list[RecordPair] = []
    waiting: Both[list[_Call]] = Both([], [])
    for function in dict.fromkeys(call.function for side in calls for call in side):
        same = Both(*([call for call in side if call.function == function] for side in calls))
        matched = _matched(same) if len(same.reference) == len(same.candidate) else []
        for reference, candidate in matched:
            pairs += _pair_roles(reference, candidate)
        for unmatched, side, matched_calls in zip(waiting, same, zip(*matched) if matched else ((), ())):
            unmatched += [call for call in side if all(call is not call_matched for call_matched in matched_calls)]
    for label in _LABELS:
        labels = waiting.map(lambda side, label=label: [call for call in side if label in call.roles])  # type: ignore[misc]
        if len(labels.reference) != len(labels.candidate) or len(labels.reference) != 1:
            continue
        # One function may take logits, the other log-probabilities: the labels are the same quantity.
        (reference,), (candidate,) = labels
        pairs += _pair_roles(reference, candidate, only=label)
        waiting = waiting.zip(labels).map(lambda side: [call for call in side[0] if call is not side[1][0]])
    return pairs + alone(waiting.map(lambda side: [record for call in side for record in call.roles.values()]))


def _numbered_by_functions(of_loop: Both[list[Record]], totals: Both[list[Record]]) -> Both[list[Record]]:
    """Return a step's losses, numbered by the loss functions that computed them if the sides log different numbers.

    One loop may run backward from the first of two calls and the other ask for gradients of its loss, without backward.
    """
    functions = of_loop.map(lambda side: [r.order for r in side if is_of_loss(r) and loss_role(r.slot) == "0"])
    counts = functions.map(len)
    if len(totals.reference) == len(totals.candidate) or counts.reference != counts.candidate:
        return totals
    ranks = functions.zip(totals).map(lambda side: [sum(k < r.order for k in side[0]) - 1 for r in side[1]])
    if any(len({*side}) < len(side) or -1 in side for side in ranks):
        return totals
    return totals.zip(ranks).map(lambda side: [replace(r, call=k) for r, k in zip(*side)])


def identified_by_values(records: Iterable[Record]) -> bool:
    """Return True if values are needed to pair a step's loss calls: one function is called several times."""
    functions = [call.function for call in _calls([record for record in records if is_of_loss(record)])]
    return len(set(functions)) < len(functions)


def _calls(records: Sequence[Record]) -> list[_Call]:
    roles_by_call: dict[tuple[str, int], dict[str, Record]] = defaultdict(dict)
    for record in records:
        roles_by_call[record.slot.partition("()")[0], record.call][loss_role(record.slot)] = record
    return [_Call(function, roles) for (function, _), roles in roles_by_call.items()]


def _matched(calls: Both[list[_Call]]) -> list[tuple[_Call, _Call]]:
    """Return pairs of calls: in order, unless their inputs show another pairing."""
    in_order = list(zip(*calls))
    if len(in_order) == 1:
        return in_order
    if all(_alike(a, b) or _alike(a, b, _PREDICTIONS) for a, b in in_order):
        return in_order  # labels that are one number, such as 0.9 for 1, may be those of another call
    references, candidates = map(list, calls)
    matches = []
    # By what tells them apart best; then, where that differs, by another of the inputs; a last one of each is one call.
    for telling in (_TELLING, _PREDICTIONS):
        for call in list(references):
            partner = next((candidate for candidate in candidates if _alike(call, candidate, telling)), None)
            if partner is not None:
                references.remove(call)
                candidates.remove(partner)
                matches.append((call, partner))
    return matches + (list(zip(references, candidates)) if len(references) == 1 else [])


def _alike(a: _Call, b: _Call, telling: Sequence[str] = _TELLING) -> bool:
    """Return True if the first distinguishing input that two calls have agrees approximately."""
    for role in telling:
        expected, actual = a.roles.get(role), b.roles.get(role)
        if expected is not None and actual is not None:
            return _agree(expected, actual)
    return False


def _agree(a: Record, b: Record) -> bool:
    layout = _layout(a.shape, b.shape)
    if layout is None:
        return False
    try:
        if a.sketch is not None or b.sketch is not None:
            return a.sketch is not None and b.sketch is not None and _near(a.sketch.projection, b.sketch.projection)
        expected, actual = a.value, layout.apply(b.value, a.shape).reshape(a.shape)
    except (RunFolderError, SketchOnlyError):
        return False
    if expected.dtype.kind in "iub" and actual.dtype.kind in "iub":
        return bool(np.array_equal(expected, actual))
    return _near(expected.astype(np.float64), actual.astype(np.float64))


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.linalg.norm(a - b) <= _ALIKE * np.linalg.norm(a))


def _pair_roles(reference: _Call, candidate: _Call, only: str = "") -> list[RecordPair]:
    pairs: list[RecordPair] = []
    for role in dict.fromkeys((*reference.roles, *candidate.roles)):
        a, b = reference.roles.get(role), candidate.roles.get(role)
        layout = _layout(a.shape, b.shape) if a is not None and b is not None else None
        if layout is None or (only and role != only) or not _of_one_kind(a, b):
            pairs += alone(Both([a] if a is not None else [], [b] if b is not None else []))
        else:
            pairs.append(RecordPair(a, b, layout))
    return pairs


def _of_one_kind(a: Record | None, b: Record | None) -> bool:
    """Return True if both records are integers (class numbers), or neither is."""
    return a is not None and b is not None and a.dtype.startswith(_INTEGERS) == b.dtype.startswith(_INTEGERS)


def _layout(reference: tuple[int, ...], candidate: tuple[int, ...]) -> Layout | None:
    """Return the layout from a candidate's shape to the reference's; `None` if the shapes are of different
    quantities.
    """
    if math.prod(reference) != math.prod(candidate):
        return None
    if reference == candidate:
        return SAME
    layout = layout_between(reference, candidate)
    if layout and layout != BROADCAST:
        return layout
    few, many = sorted((reference, candidate), key=len)
    if len(few) == len(many):
        return Layout(("transpose",)) if len(few) == 2 and few == many[::-1] else None
    if len(few) <= 1 or few[-1] == many[-1]:
        return RESHAPED  # all rows in one row, classes last in both
    if few == reference and len(many) > 2 and few[-1] == many[1]:
        # Classes are the second axis on the other side, and the last axis on this side.
        return Layout(((0, *range(2, len(many)), 1), "reshape"))
    return None


def pair_steps(reference: Step, candidate: Step, alignment: Alignment) -> list[Pair]:
    """Pair two steps' records: every record of either side is in at least one pair, in causal order.

    Parameters are paired by the alignment, by rows if one side fuses several into one tensor. Within two paired layers,
    other records of one stage and call are paired by slot, and remaining records by position if the shapes agree
    (``output.logits`` and ``output.0``, ``input.x`` and ``input.input``); a tensor in another layout gets the `Layout`
    that brings it into the reference's layout.
    """
    paths = [(pair.reference.path, pair.candidate.path) for pair in alignment.pairs]
    training, idle, moved = without_evaluations(Both(reference, candidate))
    equal, uncut = with_equal_lengths(training, paths)
    uneven = _uneven(equal, paths)
    calls = joined_calls(equal, uneven) if uneven else JoinedCalls(equal, Both([], []))
    steps = calls.steps
    renumbered, originals = _order_of(steps, alignment, uneven).renumbered(steps.candidate.records)
    indexes = Both(_index(steps.reference.records), _index(renumbered))
    repeated, asked = _take_repeats(indexes, alignment)
    repeats = {id(record) for side in (*repeated, *uncut, *idle) for record in side}
    originals = {**originals, **{new: originals.get(id(record), record) for new, record in asked.items()}}
    apart = _apart(alignment)
    alike = tuple(
        parameters
        for parameters in alignment.parameters
        if not any(slice_.layer in paths for slices, paths in zip(parameters, apart) for slice_ in slices)
    )
    pairs = pair_parameters(indexes, replace(alignment, parameters=alike))
    for split in alignment.splits:
        pairs += pair_split_outputs(split, alignment.parameters, indexes)
    for layers, both_paths in zip(alignment.pairs, paths):
        pairs += _pair_layer(layers, indexes, both_paths not in alignment.cut_elsewhere)
    for stage in STAGES:
        of_loop = _taken_out(indexes, Both(LOOP, LOOP), stage)
        if stage == "loss":
            pairs += pair_losses(of_loop.map(lambda side: [record for record in side if is_of_loss(record)]))
            totals = of_loop.map(lambda side: [record for record in side if not is_of_loss(record)])
            of_loop = _numbered_by_functions(of_loop, totals)
            for side in of_loop.zip(totals):
                originals.update((id(numbered), record) for numbered, record in zip(*side))
        pairs += _match(of_loop)
    pairs += _pair_inputs(indexes)
    pairs += alone(repeated) + alone(calls.rest) + alone(uncut) + alone(idle)
    pairs += alone(indexes.map(lambda index: chain.from_iterable(index.values())))
    buffers, pairs_made = _buffers(alignment), []
    scales = steps.map(lambda step: step.loss_scale)
    for pair in _with_layouts(pairs, _square_shapes(alignment)):
        a, b = Both(pair.reference, pair.candidate).map(lambda r: r if r is None else originals.get(id(r), r))
        a, b = Both(a, b).map(lambda r: r if r is None else moved.get(id(r), r))
        sides = zip(pair, buffers, apart) if a is None or b is None else ()
        optional = any(
            r is not None
            and ((r.layer, r.slot) in slots or r.layer in paths or id(r) in repeats or calls.leaves_alone(r))
            for r, slots, paths in sides
        )
        # Gradients of activations are those of the scaled loss; gradients of parameters are recorded unscaled.
        scaled = "backward" in (a.stage if a is not None else "", b.stage if b is not None else "")
        anchor, sites = (a, alignment.derived.reference) if a is not None else (b, alignment.derived.candidate)
        derived = anchor is not None and is_derived(anchor, sites)
        pairs_made.append(Pair(reference.number, a, b, pair.layout, scales if scaled else UNSCALED, optional, derived))
    order = causal_order(steps, alignment.derived)
    return sorted(pairs_made, key=lambda pair: order(pair.reference, pair.candidate))


def _uneven(steps: Both[Step], paths: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs of layers that the steps call another number of times, of those that both call."""
    counts = steps.map(_calls_of_layers)
    return [(a, b) for a, b in paths if 0 < counts.reference[a] != counts.candidate[b] > 0]


def _calls_of_layers(step: Step) -> Counter[str]:
    """Return the number of recorded calls of each layer."""
    calls = {(r.layer, r.call) for r in step.records if r.stage in ("input", "forward") and r.layer != LOOP}
    return Counter(layer for layer, _ in calls)


def _order_of(steps: Both[Step], alignment: Alignment, uneven: Sequence[tuple[str, str]]) -> CallOrder:
    """Return the order of the calls: the alignment's, or that of a step in which one side calls a layer more often.

    Args:
        uneven: pairs of layers with other numbers of calls, before some were joined.
    """
    paths = [(pair.reference.path, pair.candidate.path) for pair in alignment.pairs]
    order = alignment.call_order
    uneven = _uneven(steps, uneven) if uneven and not order.numbers else []
    if uneven and not calls_differ(steps.map(lambda s: s.records)):
        return order_within(steps, paths, uneven)
    if order.calls == outermost_calls(steps.candidate.records) or not calls_differ(steps.map(lambda s: s.records)):
        return order
    return call_order(steps, alignment.derived, paths, inputs_agree)


def _index(records: Iterable[Record]) -> Index:
    index: Index = defaultdict(list)
    for record in records:
        index[record.layer, record.stage].append(record)
    return index


def _taken_out(indexes: Both[Index], paths: Both[str], stage: str) -> Both[list[Record]]:
    """Remove and return the indexes' records of two layers at a stage."""
    return Both(
        indexes.reference.pop((paths.reference, stage), []), indexes.candidate.pop((paths.candidate, stage), [])
    )


def _pair_layer(layers: LayerPair, indexes: Both[Index], outputs: bool) -> list[RecordPair]:
    """Pair the records of two layers; without ``outputs`` the layers end at different places, and outputs stay
    unpaired.
    """
    pairs: list[RecordPair] = []
    paths = layers.map(lambda layer: layer.path)
    for stage in STAGES:
        records = _taken_out(indexes, paths, stage)
        if not records.reference and not records.candidate:
            continue
        if stage in PARAMETER_STAGES:
            # The alignment pairs the parameters in the layer trees; other records are paired by slot.
            slots = layers.map(lambda layer: {parameter.slot for parameter in layer.parameters})
            declared, undeclared = _parted(records, slots, lambda record: record.slot)
            pairs += _match(undeclared, equivalents.slot) + alone(declared)
        elif outputs or stage == "input":
            doubtful = _doubtful_calls(records)
            if doubtful:
                unsure, records = _parted(records, Both(doubtful, doubtful), _call_name)
                pairs += alone(unsure)
            pairs += [RecordPair(a, b, _features(layers, a, b)) for a, b in _match(records)]
        else:
            pairs += alone(records)
    return pairs


def _take_repeats(indexes: Both[Index], alignment: Alignment) -> tuple[Both[list[Record]], dict[int, Record]]:
    """Take gradients that one loop asks for once more out of the indexes, add those of several losses, and renumber.

    A loop may ask for the gradients of two inputs in one call or in two. Each call is a backward through the layers
    above, which gives equal gradients again. Without these repeats both sides have as many. A loop may also begin a
    backward at each of its losses, where the other loop begins one at their sum.

    Returns:
        The repeats, and the original of each renumbered record by the new record's id.
    """
    repeats: Both[list[Record]] = Both([], [])
    originals: dict[int, Record] = {}
    for layers in alignment.pairs:
        records = Both(*(index.get((layer.path, "backward"), []) for index, layer in zip(indexes, layers)))
        counts = records.map(lambda side: Counter((asked_output(r), r.call) for r in side))
        if counts.reference == counts.candidate or not any("@" in r.slot for side in records for r in side):
            continue
        gradients = records.map(_by_output)
        for key in dict.fromkeys([*gradients.reference, *gradients.candidate]):
            sides = Both(gradients.reference[key], gradients.candidate[key])
            if not _add_up(sides, repeats) and not _add_up(sides.swapped(), repeats.swapped()):
                _take_equal(sides.reference, repeats.reference)
                _take_equal(sides.candidate, repeats.candidate)
                _line_up(sides, repeats)
        for index, layer, side in zip(indexes, layers, gradients):
            renumbered = []
            for (slot, _), outputs in side.items():
                for number, record in enumerate(outputs):
                    name = f"{slot}@{number}" if number else record.slot
                    other = record if name == record.slot else replace(record, slot=name)
                    originals[id(other)] = record
                    renumbered.append(other)
            index[layer.path, "backward"] = renumbered
    return repeats, originals


def _by_output(records: Iterable[Record]) -> dict[tuple[str, int], list[Record]]:
    gradients: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        gradients[asked_output(record), record.call].append(record)
    return gradients


def _take_equal(gradients: list[Record], repeats: list[Record]) -> None:
    """Move the gradients that repeat earlier ones of the same output into ``repeats``."""
    distinct: list[Record] = []
    for record in gradients:
        (repeats if any(_same_values(record, other) for other in distinct) else distinct).append(record)
    gradients[:] = distinct


def _line_up(gradients: Both[list[Record]], repeats: Both[list[Record]]) -> None:
    """Bring the gradients that both sides have to the front, and add up what one side has in parts."""
    if len(gradients.reference) == len(gradients.candidate):
        return
    unmatched: Both[list[Record]] = Both([], list(gradients.candidate))
    both: Both[list[Record]] = Both([], [])
    for record in gradients.reference:
        partner = next((candidate for candidate in unmatched.candidate if inputs_agree(record, candidate)), None)
        if partner is None:
            unmatched.reference.append(record)
            continue
        unmatched.candidate[:] = [candidate for candidate in unmatched.candidate if candidate is not partner]
        both.reference.append(record)
        both.candidate.append(partner)
    if not _add_up(unmatched, repeats):
        _add_up(unmatched.swapped(), repeats.swapped())
    for side, front, others in zip(gradients, both, unmatched):
        side[:] = [*front, *others]


def _add_up(gradients: Both[list[Record]], rest: Both[list[Record]]) -> bool:
    """Replace one side's gradients of an output by their sum, if the other side has it; note the others as ``rest``.

    Sketches do not add up: where their norms allow for a sum, none of the gradients is compared.
    """
    many, whole = gradients
    if len(whole) != 1 or len(many) < 2 or any(r.shape != whole[0].shape or r.part is not None for r in many):
        return False
    sketches = [record.source.sketch for record in (*whole, *many)]
    if any(record.source.sketched for record in (*whole, *many)):
        total, *sizes = (math.nan if sketch is None else sketch.l2 for sketch in sketches)
        if not 2 * max(sizes) - sum(sizes) <= total * (1 + _ADDED) or not total <= sum(sizes) * (1 + _ADDED):
            return False
        rest.reference.extend(many)
        rest.candidate.extend(whole)
        many[:] = whole[:] = []
        return True
    added = replace(many[0], slot=whole[0].slot, source=Sum(tuple(record.source for record in many)))
    expected = np.asarray(whole[0].value, np.float64)
    if np.linalg.norm(np.asarray(added.value, np.float64) - expected) > _ADDED * np.linalg.norm(expected):
        return False
    rest.reference.extend(many[1:])
    many[:] = [added]
    return True


def _same_values(first: Record, second: Record) -> bool:
    """Return True if two gradients of one output hold the same values."""
    if first.source.sketched != second.source.sketched or first.shape != second.shape:
        return False
    a, b = first.source.sketch, second.source.sketch
    if a is not None and b is not None:
        return a.is_equal(b)
    return np.array_equal(first.value, second.value, equal_nan=True)


def _parted(
    records: Both[list[Record]], names: Both[set[str]], name: Callable[[Record], str]
) -> tuple[Both[list[Record]], Both[list[Record]]]:
    """Split records into those with one of the names, and the others."""
    sides = records.zip(names)
    return (
        sides.map(lambda side: [record for record in side[0] if name(record) in side[1]]),
        sides.map(lambda side: [record for record in side[0] if name(record) not in side[1]]),
    )


def _features(layers: LayerPair, a: Record | None, b: Record | None) -> Layout:
    """Return the layout between a convolution (features on the second axis) and a linear layer (on the last axis).

    The shapes do not show the layout if all extents are equal.
    """
    if a is None or b is None or a.shape != b.shape or len(a.shape) < 3:
        return SAME
    groups = layers.map(lambda layer: equivalents.group_of_kinds(equivalents.kind(layer)))
    axes = range(len(a.shape))
    if groups == Both("conv", "linear"):
        return Layout(((0, axes[-1], *axes[1:-1]),))
    if groups == Both("linear", "conv"):
        return Layout(((0, *axes[2:], 1),))
    return SAME


def _same_tensors(pairs: list[RecordPair]) -> list[RecordPair]:
    """Return the pairs, with an inner layer's layout also on a container's output that is the same tensor, and its
    gradient.
    """
    layouts: dict[object, Layout] = {}
    sites: dict[tuple[str, str, int], Layout] = {}
    for pair in pairs:
        a, b = pair.reference, pair.candidate
        if pair.layout and a is not None and b is not None and a.stage == "forward":
            layouts[a.source.identity, b.source.identity] = pair.layout
    if not layouts:
        return pairs
    result: list[RecordPair] = []
    for pair in pairs:
        a, b = pair.reference, pair.candidate
        if a is None or b is None or a.stage not in ("forward", "backward") or a.shape != b.shape or pair.layout:
            result.append(pair)
            continue
        site = a.layer, a.slot, a.call
        if a.stage == "backward":
            layout = sites.get(site, SAME)
        elif layout := layouts.get((a.source.identity, b.source.identity), SAME):
            sites[site] = layout
        result.append(RecordPair(a, b, layout) if layout else pair)
    return result


def _square_shapes(alignment: Alignment) -> set[Shape]:
    """Return the shapes of square parameters that one side stores transposed."""
    stored = {p.reference[0].result_shape for p in alignment.parameters if whole_layout(p) == TRANSPOSED}
    return {shape for shape in stored if shape == shape[::-1]}


def _is_transposed(a: Record, b: Record) -> bool:
    """Return True if two inputs agree better if one is transposed: weights that a loop computes and hands in."""
    if a.source.sketched or b.source.sketched:
        return relative_error(a, b) > _ADDED  # compared by what no order changes
    transposed = np.linalg.norm(np.asarray(a.value, np.float64) - np.asarray(b.value, np.float64).T)
    return bool(transposed < relative_error(a, b) * np.linalg.norm(a.value) / 2)


def _with_layouts(pairs: list[RecordPair], squares: Collection[Shape] = ()) -> list[RecordPair]:
    """Return the pairs, each with the layout that brings the candidate's tensor into the reference's layout.

    Args:
        squares: shapes of inputs that may be transposed weights.
    """
    result: list[RecordPair] = []
    for pair in pairs:
        a, b = pair.reference, pair.candidate
        if a is not None and b is not None and a.stage not in PARAMETER_STAGES and not pair.layout:
            layout = layout_between(a.shape, b.shape)
            if a.stage == "input" and a.shape == b.shape and a.shape in squares and _is_transposed(a, b):
                layout = TRANSPOSED
            pair = RecordPair(a, b, layout) if layout else pair
        result.append(pair)
    pairs, result = _same_tensors(result), []
    # If two swapped axes have the same length, the layout follows from the run's other tensors.
    usual: dict[int, set[Layout]] = defaultdict(set)
    for pair in pairs:
        a, b = pair.reference, pair.candidate
        if a is None or b is None or a.stage != "forward" or len(a.shape) != len(b.shape):
            continue
        if a.shape != b.shape or (not pair.layout and len(set(a.shape)) == len(a.shape)):
            usual[len(a.shape)].add(pair.layout)
    for pair in pairs:
        a, b = pair.reference, pair.candidate
        if a is not None and b is not None and a.stage not in PARAMETER_STAGES:
            layouts = usual[len(a.shape)]
            if a.stage == "backward" and pair.layout == BROADCAST:
                # The gradient of a tensor shared by all samples is a sum over samples, which the other side does not
                # have.
                result += alone(Both([a], [b]))
                continue
            if not pair.layout and a.shape == b.shape and len(layouts) == 1 and layouts != {SAME}:
                pair = RecordPair(a, b, square_layout(a.shape, layouts))
        result.append(pair)
    return _with_swapped_rows(result)


def _with_swapped_rows(pairs: list[RecordPair]) -> list[RecordPair]:
    """Return the pairs, with rows in one order where one side has the sequence first and the other the batch.

    Outputs of three axes show it, or the integers that a model gets. Rows that are flat on a side are those of either
    order: their values tell.
    """
    swaps = {swap for pair in pairs if (swap := _swap_shown_by(pair)) is not None}
    if not swaps:
        return pairs
    result, of_outputs = [], dict[tuple[str, str, int], Layout]()
    for pair in pairs:
        a, b = pair.reference, pair.candidate
        if a is not None and b is not None and a.stage not in PARAMETER_STAGES and pair.layout.in_order:
            site = a.layer, a.slot, a.call
            layout = of_outputs.get(site) if a.stage == "backward" else None
            layout = layout or next(filter(None, (_swapped(pair, swap) for swap in swaps)), pair.layout)
            if a.stage == "forward":
                of_outputs[site] = layout
            pair = RecordPair(a, b, layout)
        result.append(pair)
    return result


def _swap_shown_by(pair: RecordPair) -> SwappedRows | None:
    a, b = pair.reference, pair.candidate
    if a is None or b is None or a.stage not in ("input", "forward"):
        return None
    if pair.layout == _SEQUENCE_FIRST:
        return SwappedRows(b.shape[0], b.shape[1])
    if len(a.shape) != 2 or a.shape != b.shape[::-1] or not all(r.dtype.startswith(_INTEGERS) for r in (a, b)):
        return None
    if a.source.sketched or b.source.sketched or np.array_equal(a.value, b.value):
        return None
    return SwappedRows(*b.shape) if np.array_equal(a.value, b.value.T) else None


def _swapped(pair: RecordPair, swap: SwappedRows) -> Layout | None:
    """Return the layout that swaps a pair's rows; `None` if they are not such rows, or agree better as they are."""
    a, b = pair.reference, pair.candidate
    assert a is not None and b is not None
    axes = swap.inverse.axes_in(a.shape), swap.axes_in(b.shape)
    if not all(axes) or a.shape[axes[0] :] != b.shape[axes[1] :]:
        return None
    layout = Layout((swap, "reshape"))
    if a.source.sketched or b.source.sketched:
        return layout  # compared by what no order changes
    expected = np.asarray(a.value, np.float64)
    in_its_order, exchanged = (np.asarray(each.apply(b.value, a.shape), np.float64) for each in (pair.layout, layout))
    if in_its_order.shape != expected.shape:
        return layout
    with np.errstate(all="ignore"):
        return layout if np.linalg.norm(exchanged - expected) < np.linalg.norm(in_its_order - expected) else None


def _buffers(alignment: Alignment) -> Both[set[tuple[str, str]]]:
    """Return layer and slot of all buffers; a buffer that only one model has may be missing on the other side."""
    return alignment.layers.map(
        lambda layers: {(layer.path, p.slot) for layer in layers for p in layer.parameters if p.role == "buffer"}
    )


def _apart(alignment: Alignment) -> Both[set[str]]:
    """Return paths of the layers whose parameters are not compared: mapped layers that differ, and layers inside
    them.
    """
    above = Both({a for a, _ in alignment.differ_inside}, {b for _, b in alignment.differ_inside})
    return alignment.layers.zip(above).map(
        lambda side: {
            layer.path for layer in side[0] if any(layer.path == path or inside(layer.path, path) for path in side[1])
        }
    )


def _doubtful_calls(records: Both[list[Record]]) -> set[str]:
    """Return functional calls whose number or shapes differ between the sides, so that their pairing is uncertain."""
    if not any(is_functional(record.slot) for side in records for record in side):
        return set()
    shapes = records.map(_call_shapes)
    names = shapes.reference.keys() | shapes.candidate.keys()
    return {name for name in names if shapes.reference.get(name) != shapes.candidate.get(name)}


def _call_shapes(records: list[Record]) -> dict[str, list[tuple[int, ...]]]:
    """Return the output shapes of each function, call by call."""
    shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.call):
        if is_functional(record.slot):
            shapes[_call_name(record)].append(record.shape)
    return shapes


def _call_name(record: Record) -> str:
    return record.slot.partition("()")[0] if is_functional(record.slot) else ""


def _match(records: Both[list[Record]], name: Callable[[str], str] = str) -> list[RecordPair]:
    waiting = {(name(record.slot), record.call): record for record in records.candidate}
    pairs: list[RecordPair] = []
    unmatched: list[Record] = []
    for record in records.reference:
        partner = waiting.pop((name(record.slot), record.call), None)
        if partner is not None:
            pairs.append(RecordPair(record, partner))
        else:
            unmatched.append(record)
    waiting = {key: record for key, record in waiting.items() if not is_functional(record.slot)}
    for record in unmatched:
        if is_functional(record.slot):
            pairs.append(RecordPair(record, None))  # functional calls with different names are different computations
            continue
        # By position within the call, if both sides have equally many.
        same_call = [rival for rival in waiting.values() if rival.call == record.call]
        rivals = [rival for rival in unmatched if rival.call == record.call and not is_functional(rival.slot)]
        position = next(k for k, rival in enumerate(rivals) if rival is record)
        fits = len(same_call) == len(rivals) and sorted(same_call[position].shape) == sorted(record.shape)
        pairs.append(RecordPair(record, same_call[position] if fits else None))
    used = {id(pair.candidate) for pair in pairs}
    return pairs + [RecordPair(None, record) for record in records.candidate if id(record) not in used]


def _pair_inputs(indexes: Both[Index]) -> list[RecordPair]:
    """Pair inputs of a step whose outermost layers are unpaired: by position, if number and shapes agree."""
    inputs = indexes.map(
        lambda index: [r for (_, stage), records in index.items() if stage == "input" for r in records]
    )
    shapes = inputs.map(lambda records: [record.shape for record in records])
    if not inputs.reference or shapes.reference != shapes.candidate:
        return []
    for index in indexes:
        for key in [key for key in index if key[1] == "input"]:
            del index[key]
    return [RecordPair(a, b) for a, b in zip(*inputs)]


#: Sort key of a pair, given both sides.
Order = Callable[["Record | None", "Record | None"], tuple[int, int, int, int, int]]


def causal_order(steps: Both[Step], derived: Both[frozenset[InputSite]]) -> Order:
    """Return the sort key of pairs.

    Pairs are ordered by turn (see `_turns`), by stage, and by the reference's order; parameters are ordered by the
    first forward of their layer. Derived inputs are ordered among the outputs.
    """
    ran: dict[str, int] = {}
    for record in steps.reference.records:
        if record.stage == "forward":
            ran.setdefault(record.layer, record.order)
    stage_of = {stage: position for position, stage in enumerate(STAGES)}
    turns = steps.map(_turns)
    last = sum(len(step.records) for step in steps)

    def stage(record: Record, sites: frozenset[InputSite]) -> int:
        return stage_of["forward" if is_derived(record, sites) else record.stage]

    def key(record: Record | None, other: Record | None) -> tuple[int, int, int, int, int]:
        if record is None:
            assert other is not None
            return turns.candidate.get(other.order, 0), stage(other, derived.candidate), 1, last, other.order
        first = ran.get(record.layer, last) if record.stage in PARAMETER_STAGES else 0
        # Step-wide scalars come after the layers that they may explain.
        first = last + 1 if record.layer == LOOP else first
        return turns.reference.get(record.order, 0), stage(record, derived.reference), 0, first, record.order

    return key


def _turns(step: Step) -> dict[int, int]:
    """Return by a record's order how often layers ran again after an optimizer step, or after a backward.

    Several turns occur if a critic is trained several times in one step, or two optimizers alternate; if a step
    accumulates gradients, writes weights by hand between two calls, or moves an input along its gradient.
    """
    turns: dict[int, int] = {}
    turn, stepped, learned = 0, False, False
    for record in sorted(step.records, key=lambda record: record.order):
        if record.stage == "update":
            stepped = True
        elif record.layer != LOOP and record.stage in ("input", "forward", "backward"):
            if stepped or (learned and record.stage != "backward"):
                turn, stepped, learned = turn + 1, False, False
            learned = learned or record.stage == "backward"
        turns[record.order] = turn
    return turns
